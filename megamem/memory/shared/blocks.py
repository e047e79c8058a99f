"""How a call's tokens fall into a mechanism's blocks.

Each batch row counts its own positions, so rows may be at different places of their blocks (left-padded prompts).
A call is cut into spans in which no row crosses a block border; tokens of unfinished blocks wait in an open buffer
whose columns are aligned in time across rows: a row at phase p of its block owns the buffer's last p columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.memory.base import to_device
from megamem.ops.rotary import Tables, rotary_tables, run_tables


@dataclass(frozen=True)
class Span:
    """Tokens begin..end-1 of a call, within one block of each row; `starts` are the rows' positions at `begin`."""

    begin: int
    end: int
    starts: tuple[int, ...]
    block: int

    @property
    def phases(self) -> tuple[int, ...]:
        """Per row: tokens of its unfinished block before this span; 0 in left padding."""
        return tuple(start % self.block if start > 0 else 0 for start in self.starts)

    @property
    def ends(self) -> tuple[int, ...]:
        """Per row: its position after the span."""
        return tuple(start + self.end - self.begin for start in self.starts)

    @property
    def closing(self) -> tuple[bool, ...]:
        """Per row: whether its block ends with this span."""
        return tuple(end > 0 and end % self.block == 0 for end in self.ends)

    @property
    def remaining(self) -> int:
        """Columns the open buffer must keep after this span."""
        return max(end % self.block if end > 0 else 0 for end in self.ends)


def spans(starts: tuple[int, ...], tokens: int, block: int) -> list[Span]:
    """Cut `tokens` tokens, rows starting at `starts`, wherever a row's position is a multiple of `block`."""
    phases = sorted({-start % block for start in starts})
    cuts = sorted({0, tokens, *(c for first in phases for c in range(first, tokens, block))})
    return [
        Span(begin, end, tuple(start + begin for start in starts), block)
        for begin, end in zip(cuts[:-1], cuts[1:], strict=True)
    ]


def phase_positions(span: Span, waiting: int, device: torch.device) -> Tensor:
    """Position within its block of each column [waiting + tokens, batch or 1]; negative: not of this block."""
    columns = torch.arange(-waiting, span.end - span.begin, device=device)[:, None]
    phases = span.phases
    if len(set(phases)) == 1:
        return columns + phases[0]
    return columns + to_device(phases, device)


def position_tables(starts: tuple[int, ...], tokens: int, width: int, theta: float, like: Tensor) -> Tables:
    """Rotary tables of `tokens` tokens in rows that begin at `starts`, in the dtype and on the device of `like`."""
    if len(set(starts)) == 1:
        return run_tables(starts[0], tokens, width, theta, like.dtype, like.device)
    positions = torch.arange(tokens, device=like.device)[:, None] + to_device(starts, like.device)
    return rotary_tables(positions, width, theta, like.dtype)


def phase_tables(span: Span, waiting: int, width: int, theta: float, like: Tensor) -> Tables:
    """Rotary tables of `phase_positions`, in the dtype and on the device of `like`."""
    starts = tuple(phase - waiting for phase in span.phases)
    return position_tables(starts, waiting + span.end - span.begin, width, theta, like)


def waiting_visible(span: Span, waiting: int, device: torch.device) -> Tensor | None:
    """Which waiting columns belong to a row's unfinished block: [waiting, batch] bool, or None if all do."""
    if all(phase == waiting for phase in span.phases):
        return None
    return phase_positions(span, waiting, device)[:waiting].expand(waiting, len(span.starts)) >= 0
