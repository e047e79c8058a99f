"""Slices whose gradients are added up where they belong, against plain ones."""

from __future__ import annotations

import pytest
import torch

from megamem.ops.slices import slices

PLACES = {
    "side by side": [slice(0, 3), slice(3, 7), slice(7, 9)],
    "overlapping": [slice(0, 3), slice(1, 7), slice(2, 9), slice(2, 4)],
    "one": [slice(2, 5)],
    "with an empty one": [slice(0, 0), slice(4, 9)],
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("unused", [False, True])
def test_gradients_are_those_of_plain_slices(places: list[slice], unused: bool) -> None:
    """Exactly, in float64 and with whole numbers; a slice that nothing depends on adds nothing."""
    x = torch.arange(18.0, dtype=torch.float64).view(9, 2).requires_grad_()
    found = {}
    for name, taken in (("ours", slices(x, places)), ("plain", [x[place] for place in places])):
        used = taken[1:] if unused and len(taken) > 1 else taken
        total = sum((piece**2).sum() * (number + 2) for number, piece in enumerate(used))
        found[name] = [*taken, torch.autograd.grad(total, x)[0]]
    for ours, plain in zip(found["ours"], found["plain"], strict=True):
        assert torch.equal(ours, plain)
