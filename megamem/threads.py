"""Work in a thread of its own, for who may not wait for it to the end: a store or a disk may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(threading.Thread, Generic[T]):
    """A function at work in a thread that ends with the process: there is no other way to end it."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Begin to do `work`."""
        super().__init__(daemon=True)
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Do the work: the body of the thread."""
        try:
            self._results.append(self._work())
        except BaseException as error:  # raised again by who asks for the result
            self._error = error

    def result(self) -> T:
        """Return what the work, which has ended, has returned, or raise what it has raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]
