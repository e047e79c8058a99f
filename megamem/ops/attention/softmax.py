"""Softmax attention to a past that every query sees, and causally to the queries' own keys.

    keys =  [ past 1 | past 2 | ... | own ]
             seen by every query      causal: query i sees own keys 0..i

Every mixer with attention calls this. Memory tokens, a cache of earlier chunks and the unfinished block of
token-by-token decoding are all pasts. Kernels (`model.attention_kernel`): `eager` computes the scores as a tensor (for
tests), `sdpa` is torch's fused kernel (on the CPU one call per part, merged exactly, see
`megamem.ops.attention.merged`), `flex` is FlexAttention, `flash_attn` the package of that name. A past that is visible
in part goes to `sdpa` with a mask, whichever of the fused kernels is configured. With dropout of shares every backend
computes the scores as a tensor: no fused kernel takes such a mask.

Letters of shapes: T queries, K keys, B batch rows, H query heads, G key/value heads, D width of a head. Queries come as
[T, B, H, D], keys and values as [K, B, G, D]; kernels want [B, H, T, D].
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.errors import ConfigError
from megamem.ops.attention.merged import merged_attention
from megamem.ops.dropout import Dropout

Drop = Callable[[Tensor], Tensor]
"""A function that drops some of the shares [B, H, T, K] of attention."""
FLEX_SHAPES = 64
"""Number of shapes that FlexAttention may be compiled for: chunks of a document, with and without a graph."""


@dataclass(frozen=True)
class Past:
    """Keys and values that every query may see, unless `visible` says otherwise."""

    key: Tensor
    """[K, B, G, D]"""
    value: Tensor
    """[K, B, G, D]"""
    visible: Tensor | None = None
    """Which keys are seen, bool: [B] (whole rows), [K, B], or [B, H, T, K] (each query its own); None: all."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Sequence[Past] = (),
    backend: str = "sdpa",
    dropout: Dropout | None = None,
) -> Tensor:
    """Attend from each query to the past and, causally, to the queries' own keys; scores are divided by sqrt(D).

    Args:
        query: [T, B, H, D].
        key, value: the own ones, [T, B, G, D].
        past: what lies before them.
        backend: one of `model.attention_kernel`.
        dropout: drops shares; its place is that of the first query.
    Returns: [T, B, H, D] in the query's dtype.
    """
    past = [part for part in past if part.key.shape[0]]
    if dropout is not None:
        drop = partial(dropout.shares, causal=True)
        return _masked(query, key, value, past, fused=backend != "eager", drop=drop)
    masked = any(part.visible is not None for part in past)
    if backend == "eager" or masked:
        return _masked(query, key, value, past, fused=backend != "eager")
    # torch's CPU kernel has no causal mask for more keys than queries: one call per part
    if backend == "sdpa" and past and query.device.type == "cpu":
        seen_whole = [(_heads_first(part.key), _heads_first(part.value)) for part in past]
        repeat = _repeated(query.shape[2] // key.shape[2])
        return _heads_last(merged_attention(_heads_first(query), [*seen_whole, (repeat(key), repeat(value))]))
    if past:
        key = torch.cat([*(part.key for part in past), key])
        value = torch.cat([*(part.value for part in past), value])
    return _BACKENDS[backend](query, key, value)


def unmasked_attention(
    query: Tensor, parts: Sequence[Past], backend: str = "sdpa", dropout: Dropout | None = None
) -> Tensor:
    """Attend from each query to everything visible in `parts`, in one softmax; scores are divided by sqrt(D).

    It is meant for few queries: every backend but `eager` is torch's fused kernel here.

    Args: query [T, B, H, D]; parts, backend and dropout as in `attention`.
    Returns: [T, B, H, D] in the query's dtype.
    """
    if backend == "eager" or dropout is not None or any(part.visible is not None for part in parts):
        none = parts[0].key[:0]
        drop = None if dropout is None else partial(dropout.shares, causal=False)
        return _masked(query, none, none, parts, fused=backend != "eager", drop=drop)
    repeat = _repeated(query.shape[2] // parts[0].key.shape[2])
    keys, values = (torch.cat(columns) for columns in zip(*((p.key, p.value) for p in parts), strict=True))
    return _heads_last(_scaled_dot_product(_heads_first(query), repeat(keys), repeat(values)))


def _heads_first(x: Tensor) -> Tensor:
    """Reorder [T, B, H, D] to [B, H, T, D]."""
    return x.permute(1, 2, 0, 3)


def _heads_last(x: Tensor) -> Tensor:
    """Reorder [B, H, T, D] to [T, B, H, D]."""
    return x.permute(2, 0, 1, 3)


def _repeated(groups: int) -> Callable[[Tensor], Tensor]:
    """Return a function from keys or values [K, B, G, D] to [B, H, K, D], each repeated for its group of queries."""

    def repeat(x: Tensor) -> Tensor:
        x = _heads_first(x)
        return x if groups == 1 else x.repeat_interleave(groups, dim=1)

    return repeat


def past_attention(query: Tensor, past: Past, backend: str = "sdpa", dropout: Dropout | None = None) -> Tensor:
    """Attend from each query [T, B, H, D] to the past alone; every query must see at least one of its keys.

    backend, dropout: as in `attention`. Returns: [T, B, H, D] in the query's dtype.
    """
    mask = None if past.visible is None else _seen(past, query)
    drop = None if dropout is None else partial(dropout.shares, causal=False)
    return _rectangle(query, past.key, past.value, mask, fused=backend != "eager", drop=drop)


def _seen(part: Past, query: Tensor) -> Tensor:
    """Return `part.visible` as boolean [B, H or 1, T, K], for query [T, B, H, D]."""
    tokens, batch = query.shape[:2]
    seen = torch.ones((), dtype=torch.bool, device=query.device) if part.visible is None else part.visible
    if seen.ndim == 4:
        return seen
    return seen.expand(part.key.shape[0], batch).T[:, None, None].expand(batch, 1, tokens, -1)


def _mask(query: Tensor, own: int, past: Sequence[Past]) -> Tensor:
    """Return where a query [T, B, H, D] may look among the keys of the past and `own` ones: bool [B, H or 1, T, K]."""
    tokens, batch = query.shape[:2]
    causal = torch.ones(tokens, own, dtype=torch.bool, device=query.device).tril(own - tokens)
    parts = [*(_seen(part, query) for part in past), causal[None, None]]
    heads = max(part.shape[1] for part in parts)
    return torch.cat([part.expand(batch, heads, tokens, -1) for part in parts], dim=-1)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, past: Sequence[Past], fused: bool, drop: Drop | None = None
) -> Tensor:
    """Attend with an explicit mask; query [T, B, H, D], own key and value [T, B, G, D], result like the query."""
    mask = _mask(query, key.shape[0], past)
    key = torch.cat([*(part.key for part in past), key])
    value = torch.cat([*(part.value for part in past), value])
    return _rectangle(query, key, value, mask, fused, drop)


def _rectangle(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, fused: bool, drop: Drop | None = None
) -> Tensor:
    """Attend where the mask allows it, everywhere if it is None.

    query [T, B, H, D]; key, value [K, B, G, D]; mask [B, H or 1, T, K] bool; drop: of the shares [B, H, T, K]; result
    like the query.
    """
    groups = query.shape[2] // key.shape[2]
    q, k, v = _heads_first(query), _repeated(groups)(key), _repeated(groups)(value)
    if fused and drop is None:
        return _heads_last(_scaled_dot_product(q, k, v, attn_mask=mask))
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    compute = query.dtype if fused else exact
    scores = (q.to(compute) @ k.to(compute).transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    shares = scores.softmax(dim=-1, dtype=exact).to(compute)
    if drop is not None:
        shares = drop(shares)
    return _heads_last((shares @ v.to(compute)).to(query.dtype))


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with torch's fused kernel from query [T, B, H, D] to key, value [K, B, G, D], causal to the last key."""
    groups = query.shape[2] // key.shape[2]
    q, k, v = _heads_first(query), _repeated(groups)(key), _repeated(groups)(value)
    if q.shape[2] == k.shape[2]:
        return _heads_last(_scaled_dot_product(q, k, v, is_causal=True))
    from torch.nn.attention.bias import causal_lower_right

    return _heads_last(_scaled_dot_product(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2])))


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """Call torch's attention with q [B, H, T, D] and k, v [B, H, K, D].

    On CUDA its fused kernels need widths in multiples of 8: a head of 90 is padded to 96.
    """
    return _padded(q, k, v, **mask) if q.is_cuda else F.scaled_dot_product_attention(q, k, v, **mask)


def _padded(q: Tensor, k: Tensor, v: Tensor, multiple: int = 8, **mask: Any) -> Tensor:
    """Call torch's attention with D filled up by zeros, which change neither scores nor the first D channels.

    q [B, H, T, D]; k, v [B, H, K, D]; result like q.
    """
    width = q.shape[-1]
    if width % multiple:
        q, k, v = (F.pad(x, (0, -width % multiple)) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=width**-0.5, **mask)[..., :width]


@lru_cache(maxsize=64)
def _flex_mask(tokens: int, keys: int, device: torch.device) -> object:
    """Return FlexAttention's mask for `tokens` queries whose last one stands at the last of `keys` keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    past = keys - tokens

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return column <= row + past

    return create_block_mask(visible, None, None, tokens, keys, device=str(device))


@lru_cache(maxsize=1)
def _flex_kernel(compiled: bool) -> Callable[..., Tensor]:
    """Return FlexAttention, compiled or plain."""
    from torch.nn.attention.flex_attention import flex_attention

    if not compiled:
        return flex_attention
    # each length of the past is a shape of its own; with more shapes than the limit, attention would compute all scores
    limits: Any = importlib.import_module("torch._dynamo").config
    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"
    setattr(limits, name, max(getattr(limits, name), FLEX_SHAPES))
    return torch.compile(flex_attention, dynamic=False)


def _flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with FlexAttention from query [T, B, H, D] to key, value [K, B, G, D], causal to the last key."""
    mask = _flex_mask(query.shape[0], key.shape[0], query.device)
    kernel = _flex_kernel(query.is_cuda)
    q, k, v = (_heads_first(x) for x in (query, key, value))
    return _heads_last(kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]))


def _flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with flash-attn from query [T, B, H, D] to key, value [K, B, G, D], causal to the last key."""
    from flash_attn import flash_attn_func

    # it wants [B, T, H, D]; its causal mask is aligned to the last key, as ours
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    out: Tensor = flash_attn_func(q, k, v, causal=True)
    return out.transpose(0, 1)


_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": _sdpa,
    "flex": _flex,
    "flash_attn": _flash,
}


def check_backend(backend: str) -> None:
    """Raise ConfigError if the backend cannot run here."""
    if backend != "flash_attn":
        return
    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            "model.attention_kernel: flash_attn is not installed; `pip install flash-attn` or choose sdpa, flex"
        )
    if not torch.cuda.is_available():
        raise ConfigError("model.attention_kernel: flash_attn needs a CUDA device; choose sdpa, flex or eager")
