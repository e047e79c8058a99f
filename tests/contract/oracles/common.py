"""Parts that oracles share: projections, rotary positions and softmax attention, one token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Answer:
    """What an oracle gives for one document."""

    output: Tensor
    """[tokens, hidden_size]"""
    state: dict[str, Any]
    """The state after the last token, in the declared layout with one batch row."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Auxiliary losses by name, each summed over the tokens."""


def heads(hidden: Tensor, weight: Tensor, width: int) -> Tensor:
    """Return hidden W^T [tokens, heads, width], of hidden [tokens, hidden_size] and W [heads * width, hidden_size]."""
    return torch.stack([weight @ token for token in hidden]).reshape(len(hidden), -1, width)


def projected(model, weights: dict[str, Tensor], hidden: Tensor, name: str) -> Tensor:
    """Return query, key or value [tokens, heads, width] of hidden [tokens, hidden_size], normalized or not."""
    made = heads(hidden, weights[f"{name}.weight"], model.resolved_head_dim)
    if f"{name}.bias" in weights:
        made = made + weights[f"{name}.bias"].reshape(made.shape[1:])
    if not model.qk_norm or name == "value":
        return made
    weight = weights[f"{name}_norm.weight"]
    if model.qk_norm == "projection":
        return rms_norm(made.flatten(1), weight, model.norm_eps).reshape(made.shape)
    return torch.stack([rms_norm(token, weight, model.norm_eps) for token in made])


def rotary(vector: Tensor, position: int, theta: float) -> Tensor:
    """Rotate each pair (i, i + width/2) of a vector [width] by position * theta^(-2i/width) (RoFormer)."""
    half = len(vector) // 2
    out = vector.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = cos * vector[i] - sin * vector[i + half]
        out[i + half] = sin * vector[i] + cos * vector[i + half]
    return out


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return softmax(q . k / sqrt(width)) v for one query of one head; vectors [width], like `query`."""
    scores = [math.exp(float(query @ key) / math.sqrt(len(query))) for key in keys]
    total = sum(scores)
    return sum((score / total * value for score, value in zip(scores, values, strict=True)), torch.zeros_like(query))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row of x [rows, width]."""
    return torch.stack([row / torch.sqrt((row * row).mean() + eps) * weight for row in x])


def swiglu(model, weights: dict[str, Tensor], prefix: str, hidden: Tensor) -> Tensor:
    """What a layer's normalized SwiGLU adds to hidden [rows, hidden_size]; prefix: of the layer's parameters."""
    normed = rms_norm(hidden, weights[f"{prefix}mlp_norm.weight"], model.norm_eps)
    gate, up = normed @ weights[f"{prefix}mlp.gate.weight"].T, normed @ weights[f"{prefix}mlp.up.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}mlp.down.weight"].T


def columns(rows: Tensor, first: int, last: int) -> Tensor:
    """Return tokens first .. last-1 of rows [tokens, heads, width] as [tokens, 1, heads, width]."""
    return rows[first:last].unsqueeze(1)
