"""Products of matrices that are written, or added, where they are needed: no copy, and no pass to add them up.

Shapes: any axes in front of the last two, which can be seen as one (`flat_view`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.ops.flat_view import flat_view


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a b to `out`; out: [..., n, k]; a: [..., n, m]; b: [..., m, k]."""
    torch.bmm(_flat(a), _flat(b), out=_same(out))


def negative_product(a: Tensor, b: Tensor) -> Tensor:
    """Return -a b [..., n, k]; a: [..., n, m]; b: [..., m, k]."""
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    negative_product_into(out, a, b)
    return out


def negative_product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write -a b to `out`; out: [..., n, k]; a: [..., n, m]; b: [..., m, k]."""
    torch.baddbmm(b.new_zeros(()), _flat(a), _flat(b), beta=0, alpha=-1, out=_same(out))


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a b to x, and return it; x: [..., n, k]; a: [..., n, m]; b: [..., m, k]."""
    _same(x).baddbmm_(_flat(a), _flat(b))
    return x


def subtract_product(x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write x - a b to `out`, which may be x, and return it; x: [..., n, k]; a: [..., n, m]; b: [..., m, k]."""
    torch.baddbmm(_flat(x), _flat(a), _flat(b), alpha=-1, out=_same(out))
    return out


def _flat(x: Tensor) -> Tensor:
    """Return x [..., n, k] as [all, n, k], a copy if it must be."""
    return x.flatten(0, -3)


def _same(x: Tensor) -> Tensor:
    """Return x [..., n, k] as [all, n, k], the same numbers: what is written to it is written to x."""
    return flat_view(x, 0, x.ndim - 3)
