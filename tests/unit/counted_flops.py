"""FLOPs of small models as torch's counter sees them, which formulas are compared with."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.memory.composite.log_linear import MergedSegments
from megamem.memory.composite.log_linear_products import FadedMatrices
from megamem.memory.recurrent import deep
from megamem.memory.recurrent.deep import DeepMemory
from megamem.model.stage import build_stage
from megamem.ops.deep_memory.kept_networks import Spans
from megamem.ops.linear_recurrence import torch as recurrence
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.freezing import freeze

CHUNK, CHUNKS, ROWS = 64, 8, 2


def triangular_solve(left: tuple[int, ...], right: tuple[int, ...], *_: object, **__: object) -> int:
    """A multiplication and an addition for each entry below the diagonal, rounded up to the square's half."""
    return math.prod(right) * right[-2]


SOLVES = {torch.ops.aten.linalg_solve_triangular: triangular_solve}


def small_model(mixer: object, kv_heads: int = 4, **changes: object) -> ModelConfig:
    tree = {
        "layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": kv_heads, "vocab_size": 96, "chunk_size": CHUNK,
        "mixer": mixer, "attention_kernel": "eager", **changes,
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "test")


def counted(
    model: ModelConfig, learning: Collection[str] | None = None, gradient_enters: bool = False
) -> tuple[float, float]:
    """Forward and backward FLOPs per token, counted while a sequence of all chunks runs as one window.

    Memories compute inner chunks one by one here, as their equations do: many at once, they share products over their
    borders and repeat their forward pass in the backward one, as kept networks do too.

    learning: the parameters that learn; all if not given.
    gradient_enters: whether what the embedding gives requires a gradient, though the embedding be frozen.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "TOGETHER", 1)
        patch.setattr(DeepMemory, "whole_inner_chunks", lambda self, chunk, tokens: 0)
        patch.setattr(deep, "kept_networks", networks_in_turn)
        for levels in (FadedMatrices, MergedSegments):
            patch.setattr(levels, "whole_steps", lambda self, chunk, tokens: 0)
        return _counted(model, learning, gradient_enters)


def networks_in_turn(
    query: Tensor, matrices: Sequence[Tensor], shares: Tensor, eps: float | None, spans: Spans, *_: object
) -> Tensor:
    """What `kept_networks` returns, with the backward pass of autograd, which keeps everything."""
    out: list[Tensor] = []
    for n in range(shares.shape[-1]):
        begin, end = spans[n] if spans else (0, query.shape[-2])
        made = query[..., begin:end, :] @ matrices[0][:, :, n, None].mT
        made = F.gelu(made) @ matrices[1][:, :, n, None] if len(matrices) == 2 else made
        made = made if eps is None else F.layer_norm(made, made.shape[-1:], eps=eps)
        out.append(F.pad(shares[..., begin:end, n, None] * made, (0, 0, begin, query.shape[-2] - end)))
    return torch.stack(out).sum(0)


def _counted(model: ModelConfig, learning: Collection[str] | None, gradient_enters: bool) -> tuple[float, float]:
    """See `counted`."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    if learning is not None:
        freeze(stage, learning)
    if gradient_enters:
        stage.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    tokens = torch.randint(model.vocab_size, (CHUNKS * CHUNK, ROWS))
    states = stage.initial_states(ROWS, torch.device("cpu"), torch.float32)
    losses = []
    # tables that are computed once, in the first call
    stage(tokens[:CHUNK], states, Chunk((0,) * ROWS))
    with FlopCounterMode(display=False, custom_mapping=SOLVES) as forward:
        for c in range(CHUNKS):
            part = tokens[c * CHUNK : (c + 1) * CHUNK]
            hidden, states, auxiliary = stage(part, states, Chunk((c * CHUNK,) * ROWS))
            losses += [stage.token_losses(hidden, part).sum(), *auxiliary.values()]
    with FlopCounterMode(display=False, custom_mapping=SOLVES) as backward:
        torch.stack(losses).sum().backward()
    return forward.get_total_flops() / tokens.numel(), backward.get_total_flops() / tokens.numel()
