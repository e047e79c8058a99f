"""Which requests share their first tokens, so that these are read once for all of them.

A task asks many things about one text: the choices of a question, the questions about a passage. Their token sequences
begin alike. Groups of such sequences are found by sorting them, and groups of about the same length are put together
into batches whose rows all stand at the same place: no row has padding before its tokens, whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SHARE = 1 / 4
"""Share of a sequence that it must have in common with others to be read with them."""
TRIMMED = 1 / 8
"""Share of a group's common tokens that may be read again for each sequence so that groups lie in one batch."""
TRIMMED_TOKENS = 8
"""Tokens that may be read again in any case."""


@dataclass(frozen=True)
class Group:
    """Sequences that begin alike."""

    members: tuple[int, ...]
    """Indices of the sequences."""
    shared: int
    """Number of first tokens that are the same in all of them."""


@dataclass(frozen=True)
class Batch:
    """Sequences that are read side by side from position `shared` on."""

    members: tuple[int, ...]
    """Indices of the sequences."""
    sources: tuple[int, ...]
    """The index, for each of them, of the sequence whose first `shared` tokens are read for it."""
    shared: int
    """Number of first tokens that are read once for all members with the same source."""

    @property
    def prefixes(self) -> tuple[int, ...]:
        """The sources, each once."""
        return tuple(dict.fromkeys(self.sources))

    def part(self, rank: int, ranks: int) -> Batch:
        """Return the share of one of several data-parallel ranks; the others' first member where none is left.

        Shares are stretches of neighbors, so that members with one source mostly stay together.
        """
        each = -(-len(self.members) // ranks)
        own = slice(rank * each, (rank + 1) * each)
        members = self.members[own]
        return Batch(members or self.members[:1], self.sources[own] if members else self.sources[:1], self.shared)


def plan_batches(
    sequences: Sequence[Sequence[int]], most: Sequence[int], rows: int, spread: int | None = None
) -> list[Batch]:
    """Return batches that hold each sequence once.

    Args:
        sequences: token ids.
        most: of how many first tokens of each sequence the logits are not asked for.
        rows: sequences of a batch, at most.
        spread: difference in tokens between the longest and the shortest sequence of a batch, at most.
    """
    groups = find_groups(sequences, most)
    pieces = [piece for group in groups for piece in _pieces(group, sequences, rows, spread)]
    pieces.sort(key=lambda piece: (-piece.shared, len(sequences[piece.members[0]])))
    batches: list[Batch] = []
    for piece in pieces:
        joined = _joined(batches[-1], piece, sequences, rows, spread) if batches else None
        if joined is not None:
            batches[-1] = joined
        else:
            batches.append(piece)
    return batches


def find_groups(sequences: Sequence[Sequence[int]], most: Sequence[int]) -> list[Group]:
    """Return groups of sequences that begin alike, each sequence in one group; see `plan_batches`."""
    lists = [list(sequence) for sequence in sequences]
    arrays = [np.asarray(sequence, np.int64) for sequence in lists]
    groups: list[Group] = []
    for index in sorted(range(len(lists)), key=lambda i: lists[i]):
        if groups:
            group = groups[-1]
            count, first = len(group.members), arrays[group.members[0]]
            shared = min(group.shared, most[index], common_prefix(first, arrays[index]))
            # more tokens are saved with it than without
            saves = count * shared > (count - 1) * group.shared
            if saves and shared >= LEAST_SHARE * len(lists[index]):
                groups[-1] = Group((*group.members, index), shared)
                continue
        groups.append(Group((index,), most[index]))
    return groups


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many first entries two arrays of integers have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _pieces(group: Group, sequences: Sequence[Sequence[int]], rows: int, spread: int | None) -> list[Batch]:
    """Cut a group into batches of its own."""
    source = group.members[0]
    pieces: list[list[int]] = []
    for index in sorted(group.members, key=lambda i: (len(sequences[i]), i)):
        fits = pieces and len(pieces[-1]) < rows
        if fits and (spread is None or len(sequences[index]) - len(sequences[pieces[-1][0]]) <= spread):
            pieces[-1].append(index)
        else:
            pieces.append([index])
    return [Batch(tuple(piece), (source,) * len(piece), group.shared) for piece in pieces]


def _joined(
    batch: Batch, piece: Batch, sequences: Sequence[Sequence[int]], rows: int, spread: int | None
) -> Batch | None:
    """Return a batch with a piece added, which shares no more tokens; None where they do not go together."""
    if len(batch.members) + len(piece.members) > rows:
        return None
    if batch.shared - piece.shared > max(TRIMMED * batch.shared, TRIMMED_TOKENS):
        return None
    members = (*batch.members, *piece.members)
    lengths = [len(sequences[index]) for index in members]
    if spread is not None and max(lengths) - min(lengths) > spread:
        return None
    return Batch(members, (*batch.sources, *piece.sources), piece.shared)
