"""First-in-first-out queues of the keys and values that finished blocks leave behind.

A queue [capacity, batch, heads, head_dim] has its newest entry last and zeros where nothing has come yet. Each row has
as many entries as its document's finished blocks have left, which follows from its position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.memory.base import to_device
from megamem.memory.shared.blocks import BlockSlice
from megamem.memory.shared.gate import gated
from megamem.ops.attention.softmax import Past, past_attention
from megamem.ops.dropout import Dropout


def entry_counts(block_slice: BlockSlice, per_block: int, capacity: int) -> list[int]:
    """Return how many entries each row's queue has before the slice, if every block leaves `per_block`."""
    return [min(tokens // block_slice.block * per_block, capacity) for tokens in block_slice.finished_tokens]


def queued(keys: Tensor, values: Tensor, entries: list[int]) -> Past:
    """Return the newest entries of a queue, masked to the number that each row has.

    keys, values: [capacity, batch, heads, head_dim]; entries: by row. Places that are empty in every row are cut off.
    """
    longest = max(entries)
    keys, values = (x[x.shape[0] - longest :] for x in (keys, values))
    if all(count == longest for count in entries):
        return Past(keys, values)
    # the newest entry has age 1
    ages = torch.arange(longest, 0, -1, device=keys.device)[:, None]
    return Past(keys, values, ages <= to_device(entries, keys.device))


def distances(block_slice: BlockSlice, entries: int, device: torch.device) -> Tensor:
    """Return how many tokens a queue's newest entries stand before the queries, if each token leaves one entry.

    Returns: int64 [batch, 1, tokens, entries], or [1, ...] where all rows agree; the newest entry last.
    """
    offsets = block_slice.offsets
    if len(set(offsets)) == 1:
        offsets = offsets[:1]
    ages = torch.arange(entries, 0, -1, device=device)
    queries = torch.arange(block_slice.tokens, device=device)[:, None]
    return (to_device(offsets, device)[:, None, None] + queries + ages)[:, None]


def seen_where(past: Past, where: Tensor) -> Past:
    """Return the past of which a query sees what it saw and `where`, bool [batch or 1, 1, tokens, keys], is true.

    past: with `visible` None or [keys, batch].
    """
    visible = where if past.visible is None else where & past.visible.T[:, None, None]
    return Past(past.key, past.value, visible)


def readable(keys: Tensor, values: Tensor, entries: list[int]) -> Past:
    """Return `queued` with a key for every row: rows without entries see zeros, as a softmax needs something to see.

    keys, values: [capacity, batch, heads, head_dim]; entries: by row.
    """
    return queued(keys, values, [count or max(entries) for count in entries])


def gated_reading(
    output: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    entries: list[int],
    gate: Tensor,
    backend: str,
    dropout: Dropout | None,
) -> Tensor:
    """Return g A_queue + (1 - g) output; `output` alone in rows whose queue has no entries yet.

    Args:
        output: what else the heads put out, [tokens, batch, heads, head_dim].
        query: like `output`, scaled and before rotation.
        keys, values: the queue's, [capacity, batch, kv_heads, head_dim].
        entries: by row.
        gate: `MemoryGate()`, [heads, head_dim or 1].
        backend: one of `model.attention_kernel`.
        dropout: drops shares of the queue.
    Returns: like `output`.
    """
    # without entries the gate mixes the output with itself: ZeRO 3 needs a gradient from each backward pass
    retrieved = past_attention(query, readable(keys, values, entries), backend, dropout) if any(entries) else output
    return gated(retrieved, output, gate, entries)


def push(queue: Tensor, new: Tensor, closing: tuple[bool, ...]) -> Tensor:
    """Append entries to a queue and drop its oldest ones, in the rows whose block closes.

    Args:
        queue: [capacity, batch, heads, head_dim].
        new: [entries, batch, heads, head_dim].
        closing: by row, see `BlockSlice.closing`.
    Returns: like `queue`.
    """
    pushed = min(new.shape[0], queue.shape[0])
    # concatenation copies; a view would keep the whole block alive
    appended = torch.cat((queue[pushed:], new[-pushed:]))
    if all(closing):
        return appended
    rows = to_device(closing, queue.device, torch.bool)[:, None, None]
    return torch.where(rows, appended, queue)
