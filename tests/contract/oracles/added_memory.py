"""Attention and a memory beside it, each by its own oracle; their outputs are added."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    answer = Answer(torch.zeros_like(hidden), {})
    for name, part in (("attention", mixer.attention), ("memory", mixer.memory)):
        own = {n.removeprefix(f"{name}."): w for n, w in weights.items() if n.startswith(f"{name}.")}
        found = importlib.import_module(f"tests.contract.oracles.{part.kind}").run(part, model, own, hidden)
        answer.output = answer.output + found.output
        answer.state |= {f"{name}_{key}": value for key, value in found.state.items()}
        answer.losses |= {f"{name}_{key}": loss for key, loss in found.losses.items()}
    return answer
