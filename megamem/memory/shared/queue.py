"""First-in-first-out queues of keys and values that finished blocks leave behind.

A queue [capacity, batch, heads, width] has its newest entry last and zeros where nothing has come yet. Each row has as
many entries as its document's finished blocks have left, which its position tells.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.memory.base import to_device
from megamem.memory.shared.blocks import Span
from megamem.ops.attention.softmax import Past


def entry_counts(span: Span, per_block: int, capacity: int) -> list[int]:
    """Per row: entries in its queue when the span begins, if every block leaves `per_block`."""
    blocks = (max(start - phase, 0) // span.block for start, phase in zip(span.starts, span.phases, strict=True))
    return [min(count * per_block, capacity) for count in blocks]


def queued(keys: Tensor, values: Tensor, entries: list[int]) -> Past:
    """The newest `entries` of a queue, per row; nobody sees the places that are empty everywhere."""
    longest = max(entries)
    keys, values = (x[x.shape[0] - longest :] for x in (keys, values))
    if all(count == longest for count in entries):
        return Past(keys, values)
    ages = torch.arange(longest, 0, -1, device=keys.device)[:, None]
    return Past(keys, values, ages <= to_device(entries, keys.device))


def readable(keys: Tensor, values: Tensor, entries: list[int]) -> Past:
    """As `queued`; rows without entries see zeros, since a softmax needs a key to look at."""
    return queued(keys, values, [count or max(entries) for count in entries])


def gated(memory: Tensor, local: Tensor, gate: Tensor, entries: list[int]) -> Tensor:
    """gate memory + (1 - gate) local, [tokens, batch, heads, width]; local alone in rows without entries."""
    mixed = torch.lerp(local, memory, gate.to(local.dtype))
    if all(entries) or not any(entries):
        return mixed
    filled = to_device([count > 0 for count in entries], local.device, torch.bool)
    return torch.where(filled[:, None, None], mixed, local)


def push(queue: Tensor, new: Tensor, closing: tuple[bool, ...]) -> Tensor:
    """Append `new` [entries, ...] and drop the oldest, in the rows that `closing` says."""
    pushed = min(new.shape[0], queue.shape[0])
    moved = torch.cat((queue[pushed:], new[-pushed:]))  # a copy always: a view would keep the block alive
    if all(closing):
        return moved
    ends = to_device(closing, queue.device, torch.bool)[:, None, None]
    return torch.where(ends, moved, queue)
