"""Levels that are passed on and move, against a loop over steps that autograd goes back through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamem.ops.level_scan import Moves, level_scan

BATCH, HEADS, STEPS, LEVELS, KEYS, VALUES = 2, 3, 5, 3, 4, 2


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("passing", ["matrix", "number", "number of all rows", "nothing"])
def test_steps_and_their_gradients(passing: str, moving: bool) -> None:
    """Float64 and numbers of the order of ten: 1e-12. Gradients come transposed, as they do from what reads levels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    first, writes = normal(BATCH, HEADS, LEVELS, VALUES, KEYS), normal(BATCH, HEADS, STEPS, 2, VALUES, KEYS)
    shape = {"matrix": (BATCH, KEYS, KEYS), "number": (BATCH, 1, 1), "number of all rows": (1, 1, 1)}.get(passing)
    transition = None if shape is None else normal(shape[0], HEADS, STEPS, *shape[1:])
    chosen = torch.randint(2, (STEPS, BATCH, 1, LEVELS, LEVELS), generator=generator).double()
    moves = Moves(
        [own if moving and n % 2 else None for n, own in enumerate(chosen)],
        [[n % LEVELS, (n + 1) % LEVELS] for n in range(STEPS)],
    )

    def one_by_one() -> tuple[Tensor, Tensor]:
        now, series = first, []
        for n in range(STEPS):
            series.append(now)
            if transition is not None:
                own = transition[:, :, n, None]
                now = now + (now @ own.mT if passing == "matrix" else own * now)
            if (matrix := moves.matrices[n]) is not None:
                now = torch.einsum("bxy,bhyvd->bhxvd", matrix[:, 0], now)
            added = [torch.zeros_like(now[:, :, 0]) for _ in range(LEVELS)]
            for i, level in enumerate(moves.written[n]):
                added[level] = added[level] + writes[:, :, n, i]
            now = now + torch.stack(added, dim=2)
        return torch.stack(series, dim=2), now

    found, expected = level_scan(transition, writes, first, moves), one_by_one()
    leaves = [first, writes, *([] if transition is None else [transition])]
    weigh = [normal(*x.shape).mT.contiguous().mT for x in expected]
    for ours, theirs in zip(
        (*found, *torch.autograd.grad(found, leaves, weigh)),
        (*expected, *torch.autograd.grad(expected, leaves, weigh)),
        strict=True,
    ):
        assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max().clamp(min=1.0)
