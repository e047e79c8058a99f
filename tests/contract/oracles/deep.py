"""Deep memories, one token and one head at a time, the inner gradients by autograd.

M(x) = x + LN(W1 gelu(W2 x)) or x + LN(W x). Gradients are taken at the weights of the inner chunk's start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer, columns


def gelu(vector: Tensor) -> Tensor:
    """Return the exact GELU of a hidden vector [inner width]."""
    return vector * 0.5 * (1 + torch.erf(vector / math.sqrt(2)))


def layer_norm(vector: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the layer norm of a vector [width]; weight [width]."""
    mean = sum(vector) / len(vector)
    variance = sum((x - mean) ** 2 for x in vector) / len(vector)
    return weight * (vector - mean) / torch.sqrt(variance + eps)


@dataclass
class Network:
    """A head's matrices and their momentum, now and at the start of the open inner chunk."""

    head: int
    now: list[Tensor]
    carried: list[Tensor]
    first: list[Tensor]
    first_carried: list[Tensor]


class Memory:
    """The networks of all heads."""

    def __init__(self, mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> None:
        """Start from weights by name and hidden [tokens, hidden_size]."""
        self.mixer, self.model, self.weights, self.hidden = mixer, model, weights, hidden
        self.names = ["matrix"] if mixer.network == "linear" else ["up", "down"]
        self.momentum = getattr(mixer, "momentum", False)
        wide, width = mixer.expansion * model.resolved_head_dim, model.resolved_head_dim
        shapes = {"matrix": (width, width), "up": (wide, width), "down": (width, wide)}
        self.zeros = [torch.zeros(model.resolved_kv_heads, *shapes[name], dtype=torch.float64) for name in self.names]
        self.starts = self.zeros
        if mixer.start == "learned":
            self.starts = [weights[f"start.{name}"] for name in self.names]
        self.gates: dict[tuple[int, int], dict[str, float]] = {}

    def prepare(self, vector: Tensor, t: int) -> Tensor:
        """Return a query or key [width] as the memory gets it, like `vector`."""
        return recurrence.unit(vector) if self.mixer.normalize else vector

    ask = prepare

    def begin(self, h: int) -> Network:
        """Return the network of head h before the first token."""
        start, zero = [w[h] for w in self.starts], [w[h] for w in self.zeros]
        return Network(h, start, zero, start, zero)

    def token_gates(self, t: int, h: int) -> dict[str, float]:
        """Return rate, decay and momentum of a token and head."""

        def gate(name: str) -> float:
            projected = self.weights[f"token_gates.{name}.weight.weight"][h] @ self.hidden[t]
            return recurrence.sigmoid(float(projected + self.weights[f"token_gates.{name}.start"][h]))

        most = self.mixer.max_rate or 1 / self.model.resolved_head_dim
        return {
            "rate": most if self.mixer.rate == "fixed" else most * gate("rate"),
            "decay": gate("log_decay") if self.mixer.decay else 1.0,
            "momentum": gate("log_momentum") if self.momentum else 0.0,
        }

    def answer(self, weights: list[Tensor], x: Tensor, h: int) -> Tensor:
        """Return M(x) of a vector x [width] for head h."""
        read = weights[0] @ x if len(weights) == 1 else weights[1] @ gelu(weights[0] @ x)
        if self.mixer.layer_norm:
            width = self.model.resolved_head_dim
            weight = self.weights["norm_weight.weight"][h * width : (h + 1) * width]
            read = layer_norm(read, weight, self.model.norm_eps)
        return x + read if self.mixer.residual else read

    def write(self, memory: Network, t: int, h: int, key: Tensor, value: Tensor) -> Network:
        """Return the network after token t was learned; key and value [width]."""
        if t % self.mixer.inner_chunk == 0:
            memory = replace(memory, first=memory.now, first_carried=memory.carried)
        start = [w.clone().requires_grad_() for w in memory.first]
        predicted = self.answer(start, key, h)
        loss = -(predicted @ value) if self.mixer.kind == "dla" else (predicted - value).square().sum()
        rates = self.gates[t, h] = self.token_gates(t, h)
        steps = torch.autograd.grad(loss, start)
        carried = [rates["momentum"] * s - rates["rate"] * g for s, g in zip(memory.carried, steps, strict=True)]
        now = [rates["decay"] * w + s for w, s in zip(memory.now, carried, strict=True)]
        return replace(memory, now=now, carried=carried)

    def read(self, memory: Network, query: Tensor) -> Tensor:
        """Return M(query) of a query [width]."""
        return self.answer(memory.now, query, memory.head)

    def beside(self, value: Tensor, h: int) -> float:
        """Return what passes by the memory; value [width]."""
        return 0.0

    def mixture(self, parts: list[tuple[float, Network]]) -> Network:
        """Return the network whose matrices are the weighted sums of these."""
        mixed = [sum(share * memory.now[i] for share, memory in parts) for i in range(len(self.names))]
        return Network(parts[0][1].head, mixed, [], [], [])

    def closed(self, memory: Network) -> Network:
        """Return the network as it is read once its segment has ended."""
        return memory

    def kept(self, memory: Network) -> dict[str, Tensor]:
        """Return what is kept of it at the end of a segment."""
        return {name: w.T if name == "down" else w for name, w in zip(self.names, memory.now, strict=True)}

    def state(self, memories: list[Network], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return the state of all heads after all tokens; keys, values [tokens, kv_heads, width]."""
        tokens = len(self.hidden)
        done = tokens - tokens % self.mixer.inner_chunk
        whole = done == tokens
        state = {}
        for i, name in enumerate(self.names):
            now = [(m.now if whole else m.first)[i] for m in memories]
            state[name] = torch.stack([w - self.starts[i][h] for h, w in enumerate(now)])[None]
            if self.momentum:
                carried = [(m.carried if whole else m.first_carried)[i] for m in memories]
                state[f"{name}_momentum"] = torch.stack(carried)[None]
        for name, tensor in (("key", keys), ("value", values)):
            state[f"open_{name}"] = columns(tensor, done, tokens).permute(1, 2, 0, 3)
        for name, gate in (("log_decay", "decay"), ("log_momentum", "momentum"), ("rate", "rate")):
            if name != "rate" and not getattr(self.mixer, gate, False):
                continue
            each = [[self.gates[t, h][gate] for t in range(done, tokens)] for h in range(self.model.resolved_kv_heads)]
            found = torch.tensor(each, dtype=torch.float64).reshape(1, self.model.resolved_kv_heads, tokens - done)
            state[f"open_{name}"] = found if name == "rate" else found.log()
        return state


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    return recurrence.run(mixer, model, weights, hidden, Memory)
