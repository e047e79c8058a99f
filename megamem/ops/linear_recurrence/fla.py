"""`linear_recurrence` by the Triton kernels of the package flash-linear-attention (Yang and Zhang, 2024).

Factors of products and the states between inner chunks are BF16 there; sums, decays and the last state FP32.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from megamem.errors import ConfigError


def fla_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    rate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `linear_recurrence`; query, key and value are BF16 on CUDA, the state is FP32."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla

    rows, heads, groups = query.shape[:3]

    def tokens_first(x: Tensor) -> Tensor:
        """Reorder [batch or 1, heads, tokens, ...] to [batch, tokens, heads * groups, ...].

        The kernels have a memory for each query head, so that keys and values of a group are repeated.
        """
        x = x.expand(rows, *x.shape[1:])[:, :, None].expand(-1, -1, groups, *x.shape[2:])
        return x.flatten(1, 2).transpose(1, 2).contiguous()

    queries = query.flatten(1, 2).transpose(1, 2).contiguous()
    keys, values = tokens_first(key), tokens_first(value.to(key.dtype))
    first = state[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2).contiguous()
    decays = None if log_decay is None else tokens_first(log_decay)
    common = {"scale": 1.0, "initial_state": first, "output_final_state": True}
    if rate is None:
        read, last = chunk_simple_gla(queries, keys, values, decays, **common)
    elif decays is None:
        read, last = chunk_delta_rule(queries, keys, values, tokens_first(rate), **common)
    else:
        read, last = chunk_gated_delta_rule(queries, keys, values, decays, tokens_first(rate), **common)
    # the memories of a group are copies of one
    after = last.unflatten(1, (heads, groups))[:, :, 0]
    return read.transpose(1, 2).unflatten(1, (heads, groups)).to(state.dtype), after


def check_recurrence(backend: str) -> None:
    """Raise ConfigError if the backend cannot run here."""
    if backend != "fla":
        return
    if importlib.util.find_spec("fla") is None:
        wanted = "`pip install flash-linear-attention` or choose torch"
        raise ConfigError(f"model.recurrence_kernel: fla is not installed; {wanted}")
    if not torch.cuda.is_available():
        raise ConfigError("model.recurrence_kernel: fla needs a CUDA device; choose torch")
