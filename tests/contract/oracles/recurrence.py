"""Parts that the oracles of recurrent memories share, one token and one head at a time.

y_t = norm(read) * silu(gate); before it, each channel of q, k, v is silu(sum_j w_j x_{t-j}) of its own last tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, heads


def silu(vector: Tensor) -> Tensor:
    """Return SiLU of a vector [heads * width]."""
    return torch.tensor([x / (1 + math.exp(-x)) for x in vector.tolist()], dtype=vector.dtype)


def sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x)."""
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    """Return log(1 + e^x)."""
    return math.log1p(math.exp(x))


def unit(vector: Tensor) -> Tensor:
    """Return a vector [width] divided by its length."""
    return vector / math.sqrt(sum(x * x for x in vector.tolist()))


def convolved(mixer, weights: dict[str, Tensor], name: str, projected: Tensor) -> Tensor:
    """Return `projected` [tokens, heads, width] after the short convolution, if there is one."""
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
    """Return query, key and value of hidden [tokens, hidden_size], convolved, and the `before_` tensors."""
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
    """Return the output of one token [hidden_size] from what its heads read, reads [width] each."""
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
    """Matrix memories S [width, values] of all heads; a mechanism overrides what it does otherwise."""

    def __init__(self, mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> None:
        """Start from weights by name and hidden [tokens, hidden_size]."""
        self.mixer, self.model, self.weights, self.hidden = mixer, model, weights, hidden

    def prepare(self, vector: Tensor, t: int) -> Tensor:
        """Return a query or key [width] as the memory gets it, without the scale of queries."""
        return vector

    def ask(self, vector: Tensor, t: int) -> Tensor:
        """Return a query [width] as the memory gets it."""
        return self.prepare(vector, t) / math.sqrt(self.model.resolved_head_dim)

    def begin(self, h: int) -> Tensor:
        """Return S of head h before the first token."""
        return torch.zeros(
            self.model.resolved_head_dim, self.model.resolved_head_dim * self.mixer.expand_v, dtype=torch.float64
        )

    def write(self, S: Tensor, t: int, h: int, key: Tensor, value: Tensor) -> Tensor:
        """Return S after token t, of S before it and key, value [width]."""
        return S + key[:, None] * value[None, :]

    def read(self, S: Tensor, query: Tensor) -> Tensor:
        """Return S^T q of a query [width]."""
        return sum(x * row for x, row in zip(query.tolist(), S, strict=True))

    def beside(self, value: Tensor, h: int) -> Tensor | float:
        """Return what passes by the memory; value [width]."""
        return 0.0

    def mixture(self, parts: list[tuple[float, Tensor]]) -> Tensor:
        """Return the memory whose weights are the weighted sum of these S [width, values]."""
        return sum(share * S for share, S in parts)

    def closed(self, S: Tensor) -> Tensor:
        """Return the memory as it is read once its segment has ended, like `S`."""
        return S

    def kept(self, S: Tensor) -> dict[str, Tensor]:
        """Return what is kept of S [width, values] at the end of a segment."""
        return {"memory": S}

    def state(self, memories: list[Tensor], keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return the state of all heads after all tokens; keys, values [tokens, kv_heads, width]."""
        return {"memory": torch.stack(memories)[None]}


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor, kind: type = Matrix) -> Answer:
    """Run a document of hidden [tokens, hidden_size] through the memories of class `kind`."""
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
