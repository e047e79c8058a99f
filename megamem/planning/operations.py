"""What an operation asks of a device: arithmetic of some kind, bytes to move, and a kernel to launch.

Matrix products and attention are counted by torch's own formulas (`torch.utils.flop_counter`). Everything else counts
by its bytes: an operand is read once, a result is written once, and a number that stands for many (a dimension of
stride 0) moves once. Views and tensors whose values are still to come move nothing and launch nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from megamem.planning.tensors import tensors_in


class Kind(IntEnum):
    """The unit of a device that does an operation's arithmetic; each has a rate of its own."""

    ELEMENTWISE = 0
    """No matrix product: its bytes and its launch are what takes time."""
    MATMUL_FP32 = 1
    MATMUL_BF16 = 2
    MATMUL_TF32 = 3
    """Products of blocks inside a kernel of our own, of FP32 numbers with 10 bits of their mantissas."""
    MATMUL_BF16_BLOCKS = 4
    """Products of blocks inside a kernel of our own, of BF16 numbers."""
    ATTENTION = 5
    """A fused attention kernel's forward pass."""
    ATTENTION_BACKWARD = 6


class Operation(NamedTuple):
    """An operation as a device sees it."""

    kind: Kind
    flops: float
    moved: tuple[float, ...]
    """Bytes read and written, by operand and result."""
    programs: float = 0.0
    """Programs of a kernel that has only so many, one on a multiprocessor; 0: as many as the device takes."""
    divisible: float = 1.0
    """Blocks of a program's work that several could share, if the device has room for more."""
    meetings: float = 0.0
    """How often programs that share one's work wait for each other."""
    terms: float = 0.0
    """Bytes of results that each of them writes for itself and that are added up after."""
    products: float = 0.0
    """Number of matrix products of one size that the arithmetic is in; 0: not known."""
    functions: float = 0.0
    """Results that are exponentials, or made of them: a core takes longer over them than over their bytes."""
    views: float = 0.0
    """Views made since the operation before: they ask nothing of a device, but time of the host."""

    def after(self, views: int) -> Operation:
        """Return the operation after so many views. (`_replace` takes several times as long.)"""
        return Operation._make((*self[:-1], float(views)))


_aten = torch.ops.aten
_ATTENTION = {_aten._scaled_dot_product_flash_attention_for_cpu.default}
_ATTENTION_BACKWARD = {_aten._scaled_dot_product_flash_attention_for_cpu_backward.default}
_FUNCTIONS = {
    f"aten::{name}"
    for name in (
        "exp", "expm1", "log", "log1p", "sigmoid", "tanh", "softplus", "softplus_backward", "log_sigmoid_forward",
        "log_sigmoid_backward", "silu", "silu_backward", "gelu", "gelu_backward", "_softmax", "_log_softmax",
        "_log_softmax_backward_data", "logsumexp",
    )
}  # fmt: skip
"""Operations whose results are exponentials or made of them; so in place."""
_NOTHING = {
    _aten._unsafe_view.default,
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.lift_fresh.default,
    _aten._reshape_alias.default,
}
"""Operations that run nothing on a device and do not say so themselves."""
_SHAPED = {
    getattr(_aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like")
}
"""Operations of whose first operand only the shape or the dtype is asked."""


def operation(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> Operation:
    """Return what an operation, one that `asks_nothing` does not name, asks of a device.

    It follows from shapes, strides and dtypes of operands and results, and from arguments that are no tensors.
    """
    # what is written to `out` is not read before, and what only gives a shape is not read at all
    read = () if func in _SHAPED else (*args, *(value for name, value in kwargs.items() if name != "out"))
    moved = (*map(touched, tensors_in(read)), *map(touched, tensors_in((out,))))
    if func in _ATTENTION or func in _ATTENTION_BACKWARD:
        return _attention(func, args, moved)
    packet = func._overloadpacket
    if func._schema.name.endswith("_"):  # in place: the same arithmetic
        packet = getattr(_aten, func._schema.name.removeprefix("aten::").removesuffix("_"), packet)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        first = next(iter(tensors_in(args)))
        kind = Kind.MATMUL_BF16 if first.dtype == torch.bfloat16 else Kind.MATMUL_FP32
        shape = next(iter(tensors_in((out,)))).shape
        return Operation(kind, float(flops), moved, products=float(shape[:-2].numel()))
    if func._schema.name.removesuffix("_") in _FUNCTIONS:
        results = next(iter(tensors_in((out,)))).numel()
        return Operation(Kind.ELEMENTWISE, 0.0, moved, functions=float(results))
    return Operation(Kind.ELEMENTWISE, 0.0, moved)


def _attention(func: OpOverload, args: Sequence[object], moved: tuple[float, ...]) -> Operation:
    """Return a fused attention kernel's forward or backward pass; half of a causal one's products are left out."""
    backward = func in _ATTENTION_BACKWARD
    tensors = tuple(tensors_in(args))
    query, key, value = tensors[1:4] if backward else tensors[:3]
    # after the tensors come the dropout probability and whether scores are causal
    causal = tuple(args)[7:8] == (True,) if backward else tuple(args)[4:5] == (True,)
    pairs = query[..., 0].numel() * key.shape[-2] / (2 if causal else 1)
    # forward: scores, and sums of values; backward: scores anew, and four products with gradients
    width, out = query.shape[-1], value.shape[-1]
    products = 3 * width + 2 * out if backward else width + out
    return Operation(Kind.ATTENTION_BACKWARD if backward else Kind.ATTENTION, 2.0 * pairs * products, moved)


@cache
def asks_nothing(func: OpOverload) -> bool:
    """Return whether an operation asks nothing of a device: it makes a view, or memory without values."""
    return func in _NOTHING or _is_view(func)


def _is_view(func: OpOverload) -> bool:
    """Return whether an operation's results share their operands' memory and nothing is written."""
    schema = func._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)


def touched(x: Tensor) -> float:
    """Return the bytes of x [...] that exist: dimensions of stride 0 repeat one number."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return float(count * x.itemsize)
