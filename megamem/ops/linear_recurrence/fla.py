"""`linear_recurrence` by the Triton kernels of the package flash-linear-attention (Yang and Zhang, 2024).

Factors of products and the states between inner chunks are BF16 there; sums, decays and the last state FP32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.errors import ConfigError

Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""A function of queries, keys, values, states and gates, `linear_recurrence` or one of the package's: reads, states."""


class Kernels(NamedTuple):
    """The functions of the package that are called."""

    simple_gla: Recurrence
    delta_rule: Recurrence
    gated_delta_rule: Recurrence


def package_kernels() -> Kernels:
    """Import the package and return its functions."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla

    return Kernels(chunk_simple_gla, chunk_delta_rule, chunk_gated_delta_rule)


def fla_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    rate: Tensor | None = None,
    resets: Sequence[Sequence[int]] = (),
    *,
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor]:
    """See `linear_recurrence`; query, key and value are BF16 on CUDA, the state is FP32.

    With resets all series of tokens stand behind one another in one row, and the kernels are told where each begins.

    kernels: the package's if not given.
    """
    kernels = kernels or package_kernels()
    if value.shape[-1] % 2:
        # the kernels take even widths alone: a column of zeros more, which stays zero
        value, state = F.pad(value, (0, 1)), F.pad(state, (0, 1))
        read, after = fla_recurrence(query, key, value, state, log_decay, rate, resets, kernels=kernels)
        return read[..., :-1], after[..., :-1]
    rows, heads, groups, tokens = query.shape[:4]
    # the first and the last token of each series, by row; nothing without resets
    series = [list(pairwise((0, *row, tokens))) for row in resets] if any(resets) else []

    def one_row(x: Tensor) -> Tensor:
        """Put the rows of x [batch, tokens, ...] behind one another where there are resets."""
        return x.flatten(0, 1)[None] if series else x.contiguous()

    def tokens_first(x: Tensor) -> Tensor:
        """Reorder [batch or 1, heads, tokens, ...] to [batch, tokens, heads * groups, ...].

        The kernels have a memory for each query head, so that keys and values of a group are repeated.
        """
        x = x.expand(rows, *x.shape[1:])[:, :, None].expand(-1, -1, groups, *x.shape[2:])
        return one_row(x.flatten(1, 2).transpose(1, 2))

    queries = one_row(query.flatten(1, 2).transpose(1, 2))
    keys, values = tokens_first(key), tokens_first(value.to(key.dtype))
    first = state[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2).contiguous()
    decays = None if log_decay is None else tokens_first(log_decay)
    common: dict[str, Any] = {"scale": 1.0, "initial_state": first, "output_final_state": True}
    if series:
        # the first series of each row goes on from its state, the others begin with zeros
        common["initial_state"] = torch.cat(
            [F.pad(first[row : row + 1], (0,) * 6 + (0, len(own) - 1)) for row, own in enumerate(series)]
        )
        ends = (row * tokens + end for row, own in enumerate(series) for _, end in own)
        common["cu_seqlens_cpu"], common["cu_seqlens"] = _cumulative_lengths(tuple(ends), state.device)
    if rate is None:
        read, last = kernels.simple_gla(queries, keys, values, decays, **common)
    elif decays is None:
        read, last = kernels.delta_rule(queries, keys, values, tokens_first(rate), **common)
    else:
        read, last = kernels.gated_delta_rule(queries, keys, values, decays, tokens_first(rate), **common)
    if series:
        read = read[0].unflatten(0, (rows, tokens))
        last = torch.stack([last[end - 1] for end in accumulate(map(len, series))])
    # the memories of a group are copies of one
    after = last.unflatten(1, (heads, groups))[:, :, 0]
    return read.transpose(1, 2).unflatten(1, (heads, groups)).to(state.dtype), after


@lru_cache(maxsize=8)
def _cumulative_lengths(ends: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 0 and the ends of all series on the host and on a device, [series + 1] int64 each.

    Cached, so that all layers of a call give the kernels the same tensor: they keep what they derive from it.
    """
    with torch.inference_mode(False):
        lengths = torch.tensor((0, *ends), device="cpu")
        away = lengths.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else lengths
        return lengths, away


def fla_where_it_runs(query: Tensor, *rest: Any, otherwise: Recurrence) -> tuple[Tensor, Tensor]:
    """Return `fla_recurrence` of query [B, H, G, T, D] and `rest` where they are BF16 on CUDA, else `otherwise`."""
    runs = query.is_cuda and query.dtype == torch.bfloat16
    return (fla_recurrence if runs else otherwise)(query, *rest)


def check_recurrence(backend: str) -> None:
    """Raise ConfigError if the backend cannot run here."""
    if backend != "fla":
        return
    if importlib.util.find_spec("fla") is None:
        wanted = "`pip install flash-linear-attention` or choose torch"
        raise ConfigError(f"model.recurrence_kernel: fla is not installed; {wanted}")
    if not torch.cuda.is_available():
        raise ConfigError("model.recurrence_kernel: fla needs a CUDA device; choose torch")
