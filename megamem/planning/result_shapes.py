"""What results of common operations look like, told from their operands without torch.

Torch tells it too, on its meta device. But most of its functions for that are written in Python, and the first call of
one imports torch's compiler, which takes as long as everything else that a plan measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from megamem.planning.tensors import tensors_in

_aten = torch.ops.aten
_ELEMENTWISE = {
    *(_aten.add, _aten.sub, _aten.mul, _aten.div, _aten.neg, _aten.pow, _aten.exp, _aten.expm1, _aten.rsqrt),
    *(_aten.reciprocal, _aten.clamp_min, _aten.gelu, _aten.gelu_backward, _aten.silu_backward),
    *(_aten.sigmoid_backward, _aten.tanh_backward, _aten.softplus, _aten.softplus_backward, _aten.addcmul),
    *(_aten.silu, _aten.sigmoid),
}
_LIKE_THE_FIRST = {
    *(_aten.cumsum, _aten.tril, _aten._softmax, _aten._log_softmax, _aten._softmax_backward_data),
    *(_aten._log_softmax_backward_data, _aten.masked_fill),
}
"""Operations with a contiguous result of the first operand's shape, whatever the strides of that are."""
_REDUCED = {_aten.mean.dim, _aten.sum.dim_IntList, _aten.logsumexp.default, _aten.linalg_vector_norm.default}
"""Operations over dimensions of the first operand."""
_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm}
"""Matrix products of the last two operands."""
_CHOICES = {
    *(_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge),
    *(_aten.bitwise_not, _aten.bitwise_and, _aten.bitwise_or, _aten.logical_not, _aten.logical_and, _aten.logical_or),
}
"""Operations that return true and false whatever they are given."""


def makes_no_numbers(func: OpOverload, args: Sequence[object]) -> bool:
    """Return whether results are known to be masks or indices, not floating-point numbers. args: operands [...]."""
    packet = func.overloadpacket
    if packet in _ELEMENTWISE or packet in _LIKE_THE_FIRST:
        # roots and exponents of integers are floating-point numbers
        keeps = packet in (_aten.add, _aten.sub, _aten.mul, _aten.neg, _aten.tril, _aten.cumsum)
        numbers = any(isinstance(each, float) for each in args)
        return keeps and not numbers and not any(each.is_floating_point() for each in tensors_in(args))
    return packet in _CHOICES


def known_results(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Return an operation's results on the meta device; None where no rule is certain to say what torch says.

    args: operands, tensors of any shape [...].
    """
    # conversions are left to torch
    if "dtype" in kwargs:
        return None
    packet = func.overloadpacket
    if packet is _aten.where:
        return elementwise(list(tensors_in(args)), list(tensors_in(args[1:])))
    if packet in _ELEMENTWISE:
        return elementwise(list(tensors_in(args)))
    if packet in _LIKE_THE_FIRST:
        return _like_the_first(func, args)
    if packet is _aten.log_sigmoid_forward:
        return elementwise([cast(Tensor, args[0])]), elementwise([cast(Tensor, args[0])])
    if packet is _aten.log_sigmoid_backward:
        # the third is scratch of the forward pass, of another shape on some devices
        return elementwise(list(tensors_in(args[:2])))
    if func in _REDUCED:
        return _reduced(func, args, kwargs)
    if packet in (_aten.cat, _aten.stack):
        return _joined(func, args, kwargs)
    if packet in _PRODUCTS:
        left, right = list(tensors_in(args))[-2:]
        return _new([*left.shape[:-1], right.shape[-1]], left.dtype) if left.is_floating_point() else None
    if packet in (_aten.slice_backward, _aten.select_backward):
        # zeros of the whole's shape, with the gradient in its place
        return _new(cast(Sequence[int], args[1]), cast(Tensor, args[0]).dtype)
    if packet in (_aten.zeros_like, _aten.flip) and not kwargs.get("memory_format"):
        return elementwise([cast(Tensor, args[0])])
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        query = cast(Tensor, args[0])
        rows, heads, tokens, _ = query.shape
        sums = _new([rows, heads, tokens], torch.float32, [heads * tokens, 1, heads])
        return elementwise([query]), sums
    if packet in (_aten.native_layer_norm, _aten.native_layer_norm_backward):
        return _layer_norm(func, args)
    if packet is _aten.diag_embed and len(args) == 1 and not kwargs:
        diagonal = cast(Tensor, args[0])
        return _new([*diagonal.shape, diagonal.shape[-1]], diagonal.dtype) if diagonal.is_floating_point() else None
    return None


def elementwise(operands: Sequence[Tensor], values: Sequence[Tensor] | None = None) -> Tensor | None:
    """Return the result of an elementwise operation on tensors whose shapes fit to each other [...].

    values: those of the operands that decide the dtype; all if not given.
    """
    values = operands if values is None else values
    # tensors of no dimension decide it, as numbers do, only where there are no others
    deciding = [each.dtype for each in values if each.dim()] or [each.dtype for each in values]
    dtype = reduce(torch.promote_types, deciding)
    if not dtype.is_floating_point:
        return None
    whole = [each for each in operands if each.dim()]
    shape = [1] * max((each.dim() for each in whole), default=0)
    for each in whole:
        for place, size in enumerate(reversed(each.shape), start=1):
            shape[-place] = size if shape[-place] == 1 else shape[-place]
    return _new(shape, dtype, elementwise_strides(shape, whole))


def elementwise_strides(shape: Sequence[int], operands: Sequence[Tensor]) -> list[int]:
    """Return the strides of an elementwise result: dense, with dimensions in the order of the operands' strides.

    They are those that torch's TensorIterator chooses. shape: of the result; operands: [...], which broadcast to it.
    """
    if all(list(each.shape) == shape for each in operands):
        if all(each.is_contiguous() for each in operands):
            return _dense(shape, range(len(shape)))
        first = operands[0].stride()
        if all(each.stride() == first for each in operands) and _is_dense(operands[0]):
            return list(first)
    strides = [_expanded(each, shape) for each in operands]
    order = list(range(len(shape)))[::-1]
    # an insertion sort from the last dimension on, in which dimensions that nothing tells apart keep their order
    for last in range(1, len(order)):
        moving = last
        for other in range(last)[::-1]:
            sign = _slower(order[other], order[moving], shape, strides)
            if sign < 0:
                break
            if sign > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
    return _dense(shape, order[::-1])


def _expanded(operand: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides of an operand [...] that is expanded to a shape: 0 where it has one number for many."""
    missing = len(shape) - operand.dim()
    own = zip(operand.shape, shape[missing:], operand.stride(), strict=True)
    return [0] * missing + [0 if size == 1 != whole else stride for size, whole, stride in own]


def _slower(one: int, other: int, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """Return 1 where dimension `one` has the longer stride in the first operand that tells, -1 where `other` has."""
    for own in strides:
        if own[one] == 0 or own[other] == 0:
            continue
        if own[one] != own[other]:
            return 1 if own[one] > own[other] else -1
        if shape[one] > shape[other]:
            return 1
    return 0


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor [...] has no gaps and no numbers that stand for many."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _dense(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return strides without gaps. order: dimensions, that of the longest stride first."""
    strides, step = [0] * len(shape), 1
    for dimension in order[::-1]:
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return strides


def _new(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """Return a tensor of this shape on the meta device, contiguous if no strides are given."""
    strides = _dense(shape, range(len(shape))) if strides is None else strides
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")


def _like_the_first(func: OpOverload, args: Sequence[object]) -> Tensor | None:
    """Return a contiguous result of the shape [...] and the dtype of the first operand."""
    x = cast(Tensor, args[0])
    # a softmax may convert: its last argument says so, that of its backward pass is the dtype
    converts = args[-1] is True or any(isinstance(each, torch.dtype) and each != x.dtype for each in args)
    # a mask may have more dimensions than what it masks
    wider = any(each.shape != x.shape and each.dim() > x.dim() for each in tensors_in(args))
    return None if converts or wider or not x.is_floating_point() else _new(x.shape, x.dtype)


def _reduced(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
    """Return a mean, norm or the like over dimensions of the first operand [...]."""
    x = cast(Tensor, args[0])
    given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    dims = given.get("dim")
    if not x.is_floating_point() or not isinstance(dims, list | tuple) or not dims:
        return None
    over = {dim % x.dim() for dim in dims}
    kept = [1 if dim in over else size for dim, size in enumerate(x.shape) if given.get("keepdim") or dim not in over]
    return _new(kept, x.dtype)


def _joined(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
    """Return tensors [..., n, ...] joined along a dimension, or stacked along a new one: contiguous."""
    parts = cast(Sequence[Tensor], args[0])
    dim = cast(int, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    if func.overloadpacket is _aten.stack:
        parts = [each.unsqueeze(dim) for each in parts]
    first = parts[0]
    alike = all(each.dtype == first.dtype and each.dim() == first.dim() for each in parts)
    if not alike or not first.is_floating_point() or all(map(_is_image, parts)):
        return None
    shape = list(first.shape)
    shape[dim] = sum(each.shape[dim] for each in parts)
    return _new(shape, first.dtype)


def _is_image(tensor: Tensor) -> bool:
    """Return whether the strides of a tensor [B, C, ...] are like those of images with their channels last."""
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    least = 1
    for dim in (1, *range(2, tensor.dim())[::-1], 0):
        if tensor.stride(dim) < least:
            return False
        least = tensor.stride(dim) * tensor.shape[dim]
    return True


def _layer_norm(func: OpOverload, args: Sequence[object]) -> object:
    """Return the results, all contiguous, of a layer norm's forward or backward pass on rows [..., n]."""
    backward = func.overloadpacket is _aten.native_layer_norm_backward
    x = cast(Tensor, args[1] if backward else args[0])
    over = len(cast(Sequence[int], args[2] if backward else args[1]))
    if len({each.dtype for each in tensors_in(args)}) > 1:
        return None
    if backward:
        weight, bias = cast(Sequence[Tensor | None], args[5:7])
        asked = zip((x, weight, bias), cast(Sequence[bool], args[7]), strict=True)
        return tuple(_new(each.shape, each.dtype) if want and each is not None else None for each, want in asked)
    # mean and 1 / deviation of each row, in FP32 of numbers that are shorter
    rows = [*x.shape[: x.dim() - over], *[1] * over]
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _new(x.shape, x.dtype), _new(rows, kept), _new(rows, kept)
