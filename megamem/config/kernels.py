"""The kernels that a model is computed with: what they compute is the same, but for rounding."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from megamem.config.base import ConfigModel


class KernelsConfig(ConfigModel):
    """Kernels of attention and of recurrences."""

    attention_kernel: Literal["sdpa", "flex", "flash_attn", "eager"] = "sdpa"
    """Kernel of every softmax attention. `flash_attn` needs the package; `eager` is for tests."""
    recurrence_kernel: Literal["auto", "torch", "fla"] = "auto"
    """Kernel of linear_attention, retnet, delta_net and ssd. `fla`, of the package flash-linear-attention, computes in
    BF16 on CUDA; everything else torch computes all the same. `auto` is `fla` in runs that could use it where it is \
    installed and near enough to exact results on random operands, tried at the start."""
    deep_memory_kernel: Literal["torch", "triton"] = "torch"
    """What computes the networks of dla, titans and memora. `triton` writes and reads a group of inner chunks in one \
    kernel each on CUDA, and what kept networks answer together, and needs the package; what does not fit (single \
    matrices and inner chunks, heads wider than 128) torch computes all the same."""
    deep_memory_precision: Literal["tf32", "tf32x3", "ieee"] = "tf32"
    """How the kernel `triton` multiplies FP32 numbers: with 10 bits of their mantissas, with three products of such \
    numbers, which come near to FP32, or without tensor cores. Sums and what is kept are FP32 always."""
    deep_memory_group: PositiveInt | None = None
    """Inner chunks of dla, titans and memora that are read together: their backward pass starts from the weights \
    before the first of them, and computes the others anew. Shorter groups keep more weights and need less room at \
    once. Null is 16, of memora 8."""
