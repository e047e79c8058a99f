"""Several axes of a tensor as one, for what is written into it."""

from __future__ import annotations

import math

from torch import Tensor


def flat_view(x: Tensor, first: int, last: int) -> Tensor:
    """Return x [..., a, ..., b, ...] as [..., a * ... * b, ...], over the same memory: what is written there is in x.

    first, last: the axes of sizes a and b, counted from the front.

    Raises:
        RuntimeError: the strides of x do not allow it. `flatten` would return a copy then, and what is written to that
            would be lost.
    """
    return x.view(*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :])
