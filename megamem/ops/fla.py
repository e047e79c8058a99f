"""Rotations, gates, gated norms and short convolutions by kernels of flash-linear-attention (Yang and Zhang, 2024).

Each function is called as torch's own, and written for version 0.6 of the package. `megamem.model.kernels` decides
whether it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Convolve = Callable[[Tensor, Tensor], Tensor]
"""See `short_convolution`."""


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `megamem.ops.rotary.apply_rotary`; x: [tokens, batch, heads, width]; width is at most 256."""
    from fla.modules.rotary import rotary_embedding

    tokens, batch, heads, width = x.shape
    # the kernel has one table for all of its rows: rows with the same angles stand side by side as further heads,
    # those with angles of their own behind one another as further tokens
    shape = (1, tokens, batch * heads, width) if cos.shape[1] == 1 else (1, tokens * batch, heads, width)
    rotated: Tensor = rotary_embedding(x.reshape(shape), cos.flatten(0, 2), sin.flatten(0, 2))
    return rotated.view(x.shape)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """See `megamem.model.mlp.gated`; [..., width] each."""
    from fla.modules.activations import swiglu

    out: Tensor = swiglu(gate, up)
    return out


def gated_head_norm(read: Tensor, weight: Tensor, gate: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """See `megamem.memory.recurrent.head_norm.gated_head_norm`; read: [B, heads, T, V], returns [T, B, heads * V]."""
    from fla.modules.layernorm_gated import rmsnorm_fn

    beside = read.permute(2, 0, 1, 3).flatten(2)
    out: Tensor = rmsnorm_fn(beside, weight, None, gate, eps, group_size=read.shape[-1], norm_before_gate=True)
    return out.to(dtype)


def short_convolution(joined: Tensor, weight: Tensor, convolve: Convolve | None = None) -> tuple[Tensor, Tensor]:
    """See `megamem.ops.short_convolution.short_convolution`; joined: [taps - 1 + T, B, heads, width].

    convolve: what takes rows [B, tokens, channels] and weights [channels, taps]; the package's kernel if not given.
    """
    before = weight.shape[-1] - 1
    # the kernel has zeros before the first token: what it makes of the tokens that came before is left out
    rows = joined.flatten(2).transpose(0, 1).contiguous()
    out = (convolve or _causal_conv1d)(rows, weight.flatten(0, 1))
    y = out[:, before:].transpose(0, 1).unflatten(2, weight.shape[:2])
    return y, joined[len(joined) - before :].clone()


def _causal_conv1d(rows: Tensor, weight: Tensor) -> Tensor:
    """Convolve rows [B, tokens, channels] with weights [channels, taps] by the package's kernel, SiLU included."""
    from fla.modules.convolution import causal_conv1d

    out: Tensor = causal_conv1d(rows, weight, activation="silu")[0]
    return out
