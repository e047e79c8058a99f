"""The ledger: it counts the bytes that operations make, as long as their results live, and what they ask of a device.

A torch dispatch mode sees every operation below autograd, with its operands and results. The ledger notes the storage
of each result and, through a weak reference, when it is gone. Since only bytes are wanted, operations on large operands
are not computed: their results get the right shape and zeros that take no memory until somebody reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from megamem.planning.operations import Kind, Operation, asks_nothing, operation, touched
from megamem.planning.result_shapes import known_results, makes_no_numbers
from megamem.planning.tensors import tensors_in

T = TypeVar("T")
LARGE = 2**14
"""Bytes of operands from which floating-point results are not computed: they would take nearly all of the time."""
MAPPED = 2**17
"""Bytes from which zeros are a mapping of the system's, which costs more than to write few of them."""
_VIEWS = {torch.ops.aten._unsafe_view.default}
"""Operations that return a view without declaring it."""
_CHOICE_OPERATIONS = {
    torch.ops.aten.cat.default,
    torch.ops.aten.masked_fill.Scalar,
    torch.ops.aten._softmax.default,
    torch.ops.aten.sigmoid.default,
}
"""Operations that make the weights by which mechanisms choose what to read: the choice decides how many bytes follow.
They are computed as long as their operands are below `_CHOICE_BYTES`."""
_CHOICE_BYTES = 2**22
_ZEROS = {
    torch.ops.aten.slice_backward.default,
    torch.ops.aten.select_backward.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.zeros_like.default,
}
"""Operations whose results may be large although their operands are small."""


class Ledger(TorchDispatchMode):
    """The bytes of all storages that operations make inside the context and that still live.

    A storage counts once however many tensors view it, until the last of them is gone. Scratch memory that a kernel
    takes and gives back within one operation is not seen. Large floating-point results are not computed; what depends
    on their values (choices, counts) may come out otherwise than in a real run.
    """

    def __init__(self) -> None:
        """Begin with an empty ledger."""
        super().__init__()
        self.live = 0
        """Bytes that live now."""
        self.operations: list[Operation] = []
        """Those that a device would run, in order."""
        self.time = 0
        """Moments so far: each operation takes one, and so does `next_moment`."""
        self.sizes: list[int] = []
        """Bytes of each storage that operations made, in order."""
        self.made: list[int] = []
        """The moment in which each of them was made."""
        self.gone: list[tuple[int, int]] = []
        """The place in `sizes` of each that has gone since, and the moment at whose end it was gone, in order."""
        self._views = 0
        self._known: dict[int, _Entry] = {}

    def next_moment(self) -> None:
        """Let a moment go by, so that what is gone before it can be told from what the next operation lets go."""
        self.time += 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and importing the compiler would take a quarter of the time."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run an operation, or make room for its results, and enter them."""
        kwargs = kwargs or {}
        shares, nothing = _traits(func)
        if shares:
            # operands that were made outside cost nothing; they must be known, as a result may share their storage
            if isinstance(args[0], Tensor) and not kwargs:
                self.enter_storage(args[0], counted=False)
            else:
                for operand in tensors_in((*args, *kwargs.values())):
                    self.enter_storage(operand, counted=False)
        if nothing:
            # a view, or memory whose size the arguments say
            out: object = func(*args, **kwargs)
            self._views += 1
            if not shares:
                self._enter_results(out)
            return out
        out, asked = _run(func, args, kwargs)
        self._enter_results(out)
        if self._views:
            asked = asked.after(self._views)
            self._views = 0
        self.operations.append(asked)
        self.time += 1
        return out

    def _enter_results(self, out: object) -> None:
        """Know the storages of an operation's results."""
        if isinstance(out, Tensor):
            self.enter_storage(out)
        else:
            for result in tensors_in((out,)):
                self.enter_storage(result)

    def enter_storage(self, tensor: Tensor, counted: bool = True) -> None:
        """Know the storage of `tensor` [N, ...] from now on; if not `counted`, it costs nothing."""
        storage = tensor.untyped_storage()
        # the address of torch's own object: two Python objects may stand for one storage
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = entry = _Entry(storage, self._leave)
        entry.key, entry.place = key, None
        if counted:
            size = storage.nbytes()
            entry.place = len(self.sizes)
            self.sizes.append(size)
            self.made.append(self.time)
            self.live += size

    def place_of(self, tensor: Tensor) -> int | None:
        """Return the place in `sizes` of the storage of `tensor` [...]; None for one that operations did not make."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry.place

    def _leave(self, entry: _Entry) -> None:
        """Forget a storage that has gone."""
        del self._known[entry.key]
        if entry.place is not None:
            self.live -= self.sizes[entry.place]
            self.gone.append((entry.place, self.time))


NEVER = 2**62
"""Stands for the moment at whose end a storage is gone, where it stays."""


class Storages(NamedTuple):
    """What operations made, in order: how much, and from when to when it lived."""

    sizes: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    """Bytes of each."""
    made: npt.NDArray[np.int64]
    """The moment in which each was made."""
    gone: npt.NDArray[np.int64]
    """The moment at whose end each was gone; see `NEVER`."""

    @classmethod
    def of(cls, ledger: Ledger) -> Storages:
        """Return what is known so far."""
        gone = np.full(len(ledger.sizes), NEVER)
        places = np.array(ledger.gone, dtype=np.int64).reshape(-1, 2)
        gone[places[:, 0]] = places[:, 1]
        return cls(np.array(ledger.sizes, dtype=np.int64), np.array(ledger.made, dtype=np.int64), gone)

    def live(self, moments: int) -> npt.NDArray[np.float64]:
        """Return the bytes that live at the end of each of so many moments."""
        made, gone = (np.bincount(at[at < moments], self.sizes[at < moments], moments) for at in (self.made, self.gone))
        return np.cumsum(made - gone)


def joined(function: Callable[..., T], *given: object) -> T:
    """Return what a function returns; ledgers that watch see it as one operation, whose steps keep nothing."""

    def as_one(steps: Sequence[Operation], out: T) -> Operation:
        """Return an operation of its operands' and results' bytes alone."""
        return Operation(Kind.ELEMENTWISE, 0.0, tuple(map(touched, tensors_in((*given, out)))))

    return joined_as(as_one, function, *given)


def joined_as(as_one: Callable[[Sequence[Operation], T], Operation], function: Callable[..., T], *given: object) -> T:
    """Return what a function returns; ledgers that watch see what `as_one` makes of its steps and its result."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Ledger)]
    before = [(len(mode.operations), len(mode.made), len(mode.gone), mode.time) for mode in modes]
    out = function(*given)
    for mode, (operations, made, gone, time) in zip(modes, before, strict=True):
        mode.operations[operations:] = [as_one(mode.operations[operations:], out)]
        # all of it is made, and what it does not keep is gone, in one moment
        mode.made[made:] = [time] * (len(mode.made) - made)
        mode.gone[gone:] = [(place, time) for place, _ in mode.gone[gone:]]
        mode.time = time + 1
    return out


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with what must be known of it once it has gone."""

    __slots__ = ("key", "place")
    key: int
    place: int | None


def _map_values(change: Callable[[Any], Any], value: T) -> T:
    """Return arguments or results with `change` applied to each, inside of lists and dicts too."""
    if isinstance(value, list | tuple):
        return cast(T, type(value)([_map_values(change, each) for each in value]))
    if isinstance(value, dict):
        return cast(T, {name: _map_values(change, each) for name, each in value.items()})
    return cast(T, change(value))


@cache
def _traits(func: OpOverload) -> tuple[bool, bool]:
    """Return whether results of an operation may share storage with its operands, and whether it asks nothing."""
    schema = func._schema
    shares = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    return shares or func in _VIEWS, asks_nothing(func)


def _run(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, Operation]:
    """Return the operation's results, or only room for them where they are large floating-point numbers, and what it
    asks of a device: found out once for operands of the same shapes, of which results have the same shapes."""
    # torch has one object for each operation, for good
    key: list[Hashable] = [id(func)]
    size = _describe(args, key)
    for name, value in kwargs.items():
        key.append(name)
        size += _describe((value,), key)
    met = tuple(key)
    if (known := _operations.get(met)) is None:
        shapes = None if _is_computed(func, size) else _result_shapes(func, args, kwargs)
        out = _results(shapes, func, args, kwargs)
        asked = operation(func, args, kwargs, out)
        # what the values decide is found out each time
        if not _DECIDED_BY_VALUES.intersection(func.tags):
            _operations[met] = shapes, asked
        return out, asked
    return _results(known[0], func, args, kwargs), known[1]


def _is_computed(func: OpOverload, size: int) -> bool:
    """Return whether an operation on operands of so many bytes is computed: a small one, or one that makes a choice."""
    return (size < LARGE and func not in _ZEROS) or (func in _CHOICE_OPERATIONS and size < _CHOICE_BYTES)


def _results(shapes: object, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Return results that shapes, see `_result_shapes`, tell."""
    if shapes is None:
        return func(*args, **kwargs)
    if shapes is _IN_PLACE:
        return kwargs.get("out", args[0])
    return room(shapes) if isinstance(shapes, Tensor) else _map_values(room, shapes)


_DECIDED_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_operations: dict[Hashable, tuple[object, Operation]] = {}
"""What results look like, see `_result_shapes`, and what operations ask of a device, by operation and shapes."""
_IN_PLACE = object()
"""Stands for the result of an operation that writes to its first operand, or to `out`, and returns it."""


def _result_shapes(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Return the results on the meta device, `_IN_PLACE`, or None if the operation must be computed."""
    schema = func._schema
    if schema.is_mutable:
        # only operations that write to nothing but one floating-point operand may be left out: the first, or `out`
        written = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        target = kwargs.get("out", args[0])
        known = written in (["out"], [schema.arguments[0].name])
        return _IN_PLACE if known and isinstance(target, Tensor) and target.is_floating_point() else None
    # a view shares its operand's storage: it must be made of that operand
    if any(result.alias_info is not None for result in schema.returns):
        return None
    # integers and booleans are indices and masks, whose values count
    if makes_no_numbers(func, args):
        return None
    if (told := known_results(func, args, kwargs)) is not None:
        return told
    try:
        shaped: object = func(*_map_values(_on_meta, args), **_map_values(_on_meta, kwargs))
    except NotImplementedError:
        return None
    return shaped if all(result.is_floating_point() for result in tensors_in((shaped,))) else None


def _describe(values: Sequence[object], key: list[Hashable]) -> int:
    """Add to `key` what of arguments decides the shapes of results, and return the bytes of the tensors among them."""
    size = 0
    for value in values:
        if isinstance(value, Tensor):
            key += (value.shape, value.stride(), value.dtype)
            size += value.nbytes
        elif isinstance(value, list | tuple):
            key.append(len(value))
            size += _describe(value, key)
        else:
            # numbers that are equal and of different types make different results
            key += cast(tuple[Hashable, Hashable], (type(value), value))
    return size


def _on_meta(value: object) -> object:
    """Return an argument on the meta device, where tensors have a shape and no values."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def room(value: T) -> T:
    """Return zeros like a tensor, of any shape, which cost nothing until they are read; other values as they are.

    Large ones have a mapping of their own, whose pages the system makes at the first read: an allocator would fill with
    zeros what it has used before.
    """
    if not isinstance(value, Tensor):
        return value
    shape, stride = value.shape, value.stride()
    if (size := value.untyped_storage().nbytes()) < MAPPED:
        return cast(T, torch.empty_strided(shape, stride, dtype=value.dtype).zero_())
    mapped = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return cast(T, torch.frombuffer(mapped, dtype=value.dtype).as_strided(shape, stride))
