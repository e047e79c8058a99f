"""Recurrent memories, one token and one head at a time: what their oracles share.

y_t = norm(read) * silu(gate); before it, each channel of q, k, v is silu(sum_j w_j x_{t-j}) of its own last tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, heads


def silu(vector: Tensor) -> Tensor:
    return torch.tensor([x / (1 + math.exp(-x)) for x in vector.tolist()], dtype=vector.dtype)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def unit(vector: Tensor) -> Tensor:
    return vector / math.sqrt(sum(x * x for x in vector.tolist()))


def convolved(mixer, weights: dict[str, Tensor], name: str, projected: Tensor) -> Tensor:
    """[tokens, heads, width] after the short convolution, if there is one."""
    if mixer.convolution == 1:
        return projected
    taps = weights[f"convolutions.{name}.weight"]
    flat = projected.flatten(1)
    out = torch.zeros_like(flat)
    for t in range(len(flat)):
        for j in range(mixer.convolution):  # the last weight is the present token's
            if t - j >= 0:
                out[t] += taps[:, mixer.convolution - 1 - j] * flat[t - j]
        out[t] = silu(out[t])
    return out.view_as(projected)


def projections(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> tuple[dict, dict]:
    """Query, key and value after their convolutions, and the `before_` tensors of the state."""
    widths = {
        "query": model.resolved_head_dim,
        "key": model.resolved_head_dim,
        "value": model.resolved_head_dim * getattr(mixer, "expand_v", 1),
    }
    made, state = {}, {}
    for name, width in widths.items():
        projected = heads(hidden, weights[f"{name}.weight"], width)
        made[name] = convolved(mixer, weights, name, projected)
        if mixer.convolution > 1:
            zeros = torch.zeros(mixer.convolution - 1, *projected.shape[1:], dtype=torch.float64)
            state[f"before_{name}"] = torch.cat((zeros, projected))[-(mixer.convolution - 1) :, None]
    return made, state


def finished(mixer, model, weights: dict[str, Tensor], token: Tensor, reads: list[Tensor]) -> Tensor:
    """One token's output from what its heads read."""
    out = []
    width = len(reads[0])
    for h, read in enumerate(reads):
        mean_square = sum(x * x for x in read.tolist()) / width
        own = slice(h * width, (h + 1) * width)
        read = read / math.sqrt(mean_square + model.norm_eps) * weights["norm.weight"][own]
        if mixer.output_gate:
            read = read * silu(weights["gate.weight"][own] @ token)
        out.append(read)
    return weights["output.weight"] @ torch.cat(out)


class Matrix:
    """Memories [keys, values] of all heads: `write` is what a mechanism adds."""

    def __init__(self, mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> None:
        self.mixer, self.model, self.weights, self.hidden = mixer, model, weights, hidden

    def prepare(self, vector: Tensor, t: int) -> Tensor:
        """What the memory gets of a query or key."""
        return vector

    def ask(self, vector: Tensor, t: int) -> Tensor:
        """What the memory gets of a query."""
        return self.prepare(vector, t) / math.sqrt(self.model.resolved_head_dim)

    def begin(self, h: int) -> Tensor:
        """Before the first token."""
        return torch.zeros(
            self.model.resolved_head_dim, self.model.resolved_head_dim * self.mixer.expand_v, dtype=torch.float64
        )

    def write(self, S: Tensor, t: int, h: int, key: Tensor, value: Tensor) -> Tensor:
        """After token t."""
        return S + key[:, None] * value[None, :]

    def read(self, S: Tensor, query: Tensor) -> Tensor:
        """S^T q."""
        return sum(x * row for x, row in zip(query.tolist(), S, strict=True))

    def beside(self, value: Tensor, h: int) -> Tensor | float:
        """What passes by the memory."""
        return 0.0

    def mixture(self, parts: list[tuple[float, Tensor]]) -> Tensor:
        """The memory whose weights are the sum of these."""
        return sum(share * S for share, S in parts)

    def closed(self, S: Tensor) -> Tensor:
        """The memory as it is read once its segment has ended."""
        return S

    def kept(self, S: Tensor) -> dict[str, Tensor]:
        """What is kept of it at the end of a segment."""
        return {"memory": S}

    def state(self, memories: list[Tensor], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Of all heads, after all tokens."""
        return {"memory": torch.stack(memories)[None]}


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor, kind: type = Matrix) -> Answer:
    memory = kind(mixer, model, weights, hidden)
    made, state = projections(mixer, model, weights, hidden)
    groups = model.heads // model.resolved_kv_heads
    now = [memory.begin(h) for h in range(model.resolved_kv_heads)]
    keys = torch.zeros_like(made["key"])
    output = []
    for t in range(len(hidden)):
        for h in range(model.resolved_kv_heads):
            keys[t, h] = memory.prepare(made["key"][t, h], t)
            now[h] = memory.write(now[h], t, h, keys[t, h], made["value"][t, h])
        reads = [
            memory.read(now[h // groups], memory.ask(made["query"][t, h], t))
            + memory.beside(made["value"][t, h // groups], h // groups)
            for h in range(model.heads)
        ]
        output.append(finished(mixer, model, weights, hidden[t], reads))
    return Answer(torch.stack(output), {**memory.state(now, keys, made["value"]), **state})
