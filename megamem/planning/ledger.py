"""Counts the bytes that operations make, for as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**14
"""Bytes of operands from which on floating-point results are not computed: they would take nearly all of the time."""
_VIEWS = {torch.ops.aten._unsafe_view.default}
"""Operations that return a view and do not say so."""
_CHOOSE = {
    torch.ops.aten.cat.default,
    torch.ops.aten.masked_fill.Scalar,
    torch.ops.aten._softmax.default,
    torch.ops.aten.sigmoid.default,
}
"""What shares of memories are made of, which decide how much is read; computed up to a size that costs little."""
_CHOICES = 2**22
"""Bytes of it."""
_ZEROS = {
    torch.ops.aten.slice_backward.default,
    torch.ops.aten.select_backward.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.zeros_like.default,
}


class Ledger(TorchDispatchMode):
    """Bytes of all storages that operations make inside and that still live.

    A storage counts once however many tensors view it, until the last of them is gone. Scratch memory that a kernel
    takes and gives back within one operation is not seen. Large floating-point results are not computed; what is made
    of them (choices, counts) may come out otherwise than with their true values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.course: list[int] = []
        """`live` after each operation."""
        self._known: dict[int, _Entry] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to import and ask the compiler, of which nothing runs here: it would take a quarter of the time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, or make room for its results, and enter their storages; operands were there before."""
        kwargs = kwargs or {}
        size = 0
        for operand in _tensors((*args, *kwargs.values())):
            self.enter_storage(operand, counted=False)
            size += operand.nbytes
        out = _run(func, args, kwargs, size)
        for result in _tensors((out,)):
            self.enter_storage(result)
        self.course.append(self.live)
        return out

    def enter_storage(self, tensor: Tensor, counted: bool = True) -> None:
        """Know the storage of `tensor` from now on; not `counted`: at no cost."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            entry = _Entry(storage, self._leave)
            entry.key, entry.size = key, storage.nbytes() if counted else 0
            self._known[key] = entry
            self.live += entry.size

    def _leave(self, entry: _Entry) -> None:
        del self._known[entry.key]
        self.live -= entry.size


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A storage that lives, and what to know of it when it has gone."""

    __slots__ = ("key", "size")
    key: int
    size: int


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Among arguments or results of an operation, which come alone or in lists. (pytree takes ten times as long.)"""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results, each changed."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, each) for each in value])
    if isinstance(value, dict):
        return {name: _mapped(change, each) for name, each in value.items()}
    return change(value)


def _run(func: Any, args: Any, kwargs: Any, size: int) -> Any:
    """The operation's results; only room for them where operands are large and results are floating-point numbers.

    size: bytes of operands.
    """
    if (size < LARGE and func not in _ZEROS) or func in _VIEWS or (func in _CHOOSE and size < _CHOICES):
        return func(*args, **kwargs)
    key = func, *map(_description, args), *((name, _description(value)) for name, value in kwargs.items())
    if key not in _results:
        _results[key] = _shapes(func, args, kwargs)
    found = _results[key]
    if found is None:
        return func(*args, **kwargs)
    if found is _IN_PLACE:
        return args[0]
    return _mapped(room, found)


_IN_PLACE = object()
_results: dict[Any, Any] = {}
"""Of operations with operands of given shapes: results on the meta device; None if they must be computed."""


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    schema = func._schema
    if schema.is_mutable:
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        alone = written[0] and not any(written[1:])
        return _IN_PLACE if alone and isinstance(args[0], Tensor) and args[0].is_floating_point() else None
    if any(result.alias_info is not None for result in schema.returns):
        return None
    try:
        shaped = func(*_mapped(_without_values, args), **_mapped(_without_values, kwargs))
    except NotImplementedError:
        return None
    return shaped if all(result.is_floating_point() for result in _tensors((shaped,))) else None


def _description(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_description, value))
    return type(value), value


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def room(value: Any) -> Any:
    """Zeros of a tensor's shape, which the system makes when they are first read: they cost nothing until then.

    A mapping of its own for each: an allocator would fill with zeros what it has used before.
    """
    if not isinstance(value, Tensor):
        return value
    if not value.numel():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    mapped = mmap(-1, value.untyped_storage().nbytes(), flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=value.dtype).as_strided(value.shape, value.stride())
