"""Memora, one token and one head at a time, the inner gradients by autograd.

W_t = scale * softmax(a_t log W_{t-1} - b_t grad), row by row. Gradients are taken at the W of the inner chunk's start.
Its first token's W is exact, later ones' are W less their steps, while the logarithms gather all of them. In the first
of two matrices each entry of a row has a decay of its own: there each token takes from the logarithms of a row what its
step adds to that of the row's sum, to first order at the W of the inner chunk's start. In the other matrices a row has
one decay, and any number may be added to its logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.contract.oracles import deep, recurrence
from tests.contract.oracles.common import Answer, columns


@dataclass
class Network:
    """A head's weights and logarithms, and the logarithms at the start of the open inner chunk."""

    head: int
    now: list[Tensor]
    logs: list[Tensor]
    first: list[Tensor]


def shift(log_weights: Tensor, decay: Tensor, step: Tensor) -> float:
    """Return how much a step adds to the logarithm of a row's sum, to first order; all [inputs of the row].

    The derivative of log sum_j exp(L_j) by L_j is the share of entry j.
    """
    shares = log_weights.exp() / log_weights.exp().sum()
    added = (decay - 1) * log_weights - step
    return float(sum(share * more for share, more in zip(shares, added, strict=True)))


class Memory(deep.Memory):
    """The networks of all heads."""

    def on_simplex(self, logs: list[Tensor]) -> list[Tensor]:
        """Return scale * softmax of each row of matrices [outputs, width]."""
        out = []
        for matrix in logs:
            size = matrix.shape[1] ** 0.5 if self.mixer.scale is None else self.mixer.scale
            rows = [row.exp() / row.exp().sum() for row in matrix]
            out.append(size * torch.stack(rows))
        return out

    def begin(self, h: int) -> Network:
        """See `deep.Memory.begin`."""
        logs = [w[h] for w in self.starts]
        return Network(h, self.on_simplex(logs), logs, logs)

    def token_gates(self, t: int, h: int) -> dict[str, Tensor]:
        """Return rate and decay of each channel of a token and head."""

        def gate(name: str) -> Tensor:
            rank, prefix = self.mixer.gate_rank, f"token_gates.{name}"
            low = self.weights[f"{prefix}.weight.weight"][h * rank : (h + 1) * rank] @ self.hidden[t]
            projected = low @ self.weights[f"{prefix}.channels"][h] + self.weights[f"{prefix}.start"][h]
            return torch.tensor([recurrence.sigmoid(x) for x in projected.tolist()], dtype=torch.float64)

        most, ones = (
            self.mixer.max_rate or 1 / self.model.resolved_head_dim,
            torch.ones(self.model.resolved_head_dim, dtype=torch.float64),
        )
        return {
            "rate": most * ones if self.mixer.rate == "fixed" else most * gate("rate"),
            "decay": gate("log_decay") if self.mixer.decay else ones,
        }

    def write(self, memory: Network, t: int, h: int, key: Tensor, value: Tensor) -> Network:
        """See `deep.Memory.write`."""
        starting = t % self.mixer.inner_chunk == 0
        first = memory.logs if starting else memory.first
        # log W itself, where its entries fade at different rates
        exact = [self.on_simplex([w])[0].log() if len(first) == 2 and i == 0 else w for i, w in enumerate(first)]
        uneven = len(first) == 2 and self.mixer.decay
        last = exact if starting and uneven else memory.logs
        weights = [w.clone().requires_grad_() for w in self.on_simplex(first)]
        steps = torch.autograd.grad((self.answer(weights, key, h) - value).square().sum(), weights)
        rates = self.gates[t, h] = self.token_gates(t, h)

        def of(gate: str, i: int) -> Tensor:
            """Return a gate as matrix i has it: on its inputs if it is the first of two, on its outputs if the last."""
            return rates[gate][None, :] if i < len(steps) - 1 else rates[gate][:, None]

        taken = [of("rate", i) * step for i, step in enumerate(steps)]
        logs = [of("decay", i) * w - step for i, (w, step) in enumerate(zip(last, taken, strict=True))]
        if uneven:
            rows = zip(logs[0], exact[0], taken[0], strict=True)
            decay = rates["decay"]
            logs[0] = torch.stack([row - shift(log_weights, decay, step) for row, log_weights, step in rows])
        now = self.on_simplex(logs) if starting else [w - step for w, step in zip(memory.now, taken, strict=True)]
        return Network(h, now, logs, first)

    def mixture(self, parts: list[tuple[float, Network]]) -> Network:
        """See `deep.Memory.mixture`."""
        mixed = [sum(share * memory.now[i] for share, memory in parts) for i in range(len(self.names))]
        return Network(parts[0][1].head, mixed, [], [])

    def closed(self, memory: Network) -> Network:
        """Return the network as every inner chunk that follows would see it."""
        return Network(memory.head, self.on_simplex(memory.logs), memory.logs, memory.logs)

    def kept(self, memory: Network) -> dict[str, Tensor]:
        """See `deep.Memory.kept`."""
        weights = zip(self.names, self.on_simplex(memory.logs), strict=True)
        return {name: w.T if name == "down" else w for name, w in weights}

    def state(self, memories: list[Network], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """See `deep.Memory.state`."""
        tokens = len(self.hidden)
        done = tokens - tokens % self.mixer.inner_chunk
        state = {}
        for i, name in enumerate(self.names):
            logs = [(m.logs if done == tokens else m.first)[i] for m in memories]
            state[name] = torch.stack([w - self.starts[i][h] for h, w in enumerate(logs)])[None]
        for name, tensor in (("key", keys), ("value", values)):
            state[f"open_{name}"] = columns(tensor, done, tokens).permute(1, 2, 0, 3)
        for name, gate in (("log_decay", "decay"), ("rate", "rate")):
            if name == "log_decay" and not self.mixer.decay:
                continue
            each = [self.gates[t, h][gate] for h in range(self.model.resolved_kv_heads) for t in range(done, tokens)]
            stacked = torch.stack(each) if each else torch.zeros(0, dtype=torch.float64)
            found = stacked.reshape(1, self.model.resolved_kv_heads, tokens - done, self.model.resolved_head_dim)
            state[f"open_{name}"] = found if name == "rate" else found.log()
        return state


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    return recurrence.run(mixer, model, weights, hidden, Memory)
