"""Mixers one after the other, over their own oracles."""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    total = torch.zeros_like(hidden)
    answer = Answer(total, {})
    for i, part in enumerate(mixer.mixers):
        x = hidden
        if i:
            rows = [row / math.sqrt(float(row @ row) / len(row) + model.norm_eps) for row in hidden + total]
            x = torch.stack(rows)
        own = {n.removeprefix(f"mixers.{i}."): w for n, w in weights.items() if n.startswith(f"mixers.{i}.")}
        found = importlib.import_module(f"tests.contract.oracles.{part.kind}").run(part, model, own, x)
        total = total + found.output
        answer.state |= {f"{i}_{name}": value for name, value in found.state.items()}
        answer.losses |= {f"{i}_{name}": loss for name, loss in found.losses.items()}
    answer.output = total
    return answer
