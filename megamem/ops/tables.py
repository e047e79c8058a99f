"""Tables of constants that layers share: made once, for real, and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Generic, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def real_constants() -> Iterator[None]:
    """Compute what outlives a call, whoever watches the call's operations or computes others in their place.

    A dispatch mode such as the planner's ledger leaves zeros where results are large; a table of zeros must not be kept
    for calls without it. What is first made under `inference_mode` must be usable in training.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


class KeptTable(Generic[P, T]):
    """A function whose results are kept by its arguments."""

    def __init__(self, make: Callable[P, T], maxsize: int) -> None:
        """Keep at most `maxsize` results of `make`, the last used ones."""

        @wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> T:
            with real_constants():
                return make(*args, **kwargs)

        self._kept = lru_cache(maxsize=maxsize)(made)
        self.__doc__ = make.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the table for these arguments, which is made at the first call."""
        return self._kept(*args, **kwargs)  # type: ignore[arg-type]

    def cache_clear(self) -> None:
        """Forget all tables."""
        self._kept.cache_clear()


def kept_table(maxsize: int) -> Callable[[Callable[P, T]], KeptTable[P, T]]:
    """Return a decorator for functions that make tables of constants; see `KeptTable`."""
    return lambda make: KeptTable(make, maxsize)
