"""What the oracles share: projections, rotary positions and softmax attention, one token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Answer:
    """output [tokens, hidden_size]; state in the declared layout with one batch row; auxiliary losses, summed."""

    output: Tensor
    state: dict[str, Any]
    losses: dict[str, Tensor] = field(default_factory=dict)


def heads(hidden: Tensor, weight: Tensor, width: int) -> Tensor:
    """[tokens, heads, width] = hidden W^T."""
    return torch.stack([weight @ token for token in hidden]).reshape(len(hidden), -1, width)


def rotary(vector: Tensor, position: int, theta: float) -> Tensor:
    """RoPE: the pair (i, i + width/2) turned by position * theta^(-2i/width)."""
    half = len(vector) // 2
    out = vector.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = cos * vector[i] - sin * vector[i + half]
        out[i + half] = sin * vector[i] + cos * vector[i + half]
    return out


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """softmax(q . k / sqrt(width)) v for one query of one head."""
    scores = [math.exp(float(query @ key) / math.sqrt(len(query))) for key in keys]
    total = sum(scores)
    return sum((score / total * value for score, value in zip(scores, values, strict=True)), torch.zeros_like(query))


def columns(rows: Tensor, first: int, last: int) -> Tensor:
    """Tokens first..last-1 of [tokens, heads, width] as [tokens, 1, heads, width]."""
    return rows[first:last].unsqueeze(1)
