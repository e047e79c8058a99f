"""Tensors among the arguments and results of operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Return the tensors among arguments or results of an operation, which come alone or in lists.

    (torch's pytree would take ten times as long.)
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
