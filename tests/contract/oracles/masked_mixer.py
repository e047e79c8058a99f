"""out[t, c] = b[t] + sum over s <= t and k of W[t, s, k] x[s, c + k - (K - 1) // 2], within each chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, columns, heads


def mixed(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """The equation for the tokens of one chunk, x [tokens, channels]; weight [size, size, kernel], bias [size]."""
    tokens, channels = x.shape
    kernel = weight.shape[-1]
    out = torch.zeros_like(x)
    for t in range(tokens):
        for c in range(channels):
            total = float(bias[t])
            for s in range(t + 1):
                for k in range(kernel):
                    neighbor = c + k - (kernel - 1) // 2
                    if 0 <= neighbor < channels:
                        total += float(weight[t, s, k]) * float(x[s, neighbor])
            out[t, c] = total
    return out


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    chunk = model.chunk_size
    weight, bias = weights["token_map.weight"], weights["token_map.bias"]
    begins = range(0, len(hidden), chunk)
    done = len(hidden) - len(hidden) % chunk
    if mixer.form == "flat":
        output = torch.cat([mixed(weight, bias, hidden[begin : begin + chunk]) for begin in begins])
        return Answer(output, {"open_hidden": hidden[done:].unsqueeze(1)})
    biased = "value.bias" in weights
    value = heads(hidden, weights["value.weight"], model.resolved_head_dim)
    if biased:
        value = value + weights["value.bias"].view(value.shape[1:])
    bias = bias.view(model.heads, -1)
    read = [
        torch.cat([mixed(weight[h], bias[h], value[begin : begin + chunk, h]) for begin in begins])
        for h in range(model.heads)
    ]
    output = torch.stack([weights["output.weight"] @ token for token in torch.cat(read, dim=1)])
    if biased:
        output = output + weights["output.bias"]
    return Answer(output, {"open_values": columns(value, done, len(hidden))})
