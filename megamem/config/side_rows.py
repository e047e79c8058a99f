"""Rows that go up through a model's layers beside the tokens of a chunk, as mixers declare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SideRows:
    """One set of rows, which all layers that take side rows share."""

    count: int
    """How many there are, the same in every chunk."""
    place: Literal["begin", "end"]
    """`begin`: they come in front of the tokens of the call that begins a chunk; a layer changes them for the next one
    that takes them, and the topmost such layer only reads them. `end`: they come behind the tokens of the call that
    ends a chunk, and go through all of each layer that takes them."""
    source: Literal["learned", "tokens"]
    """What they are at the bottom of the model: learned vectors, or the embeddings of the newest tokens before the
    chunk, zeros where the document has no such tokens."""

    @property
    def before(self) -> int:
        """Rows in front of a chunk's first token."""
        return self.count if self.place == "begin" else 0

    @property
    def behind(self) -> int:
        """Rows behind a chunk's last token."""
        return self.count if self.place == "end" else 0


def check_side_rows(kinds: Sequence[str], side_rows: Sequence[SideRows | None], architecture: str) -> None:
    """Raise ValueError where layers do not agree on the side rows they share, or nobody would carry them.

    kinds, side_rows: of each layer's mixer; architecture: the kind of the model's.
    """
    taken: dict[SideRows, int] = {}
    for layer, rows in enumerate(side_rows):
        if rows is not None:
            taken.setdefault(rows, layer)
    if len({(rows.place, rows.source) for rows in taken}) > 1:
        given = " and ".join(f"those of {kinds[layer]} (layer {layer})" for layer in taken.values())
        raise ValueError(f"layers share one set of side rows, but are given {given}; use one of these kinds")
    if len(taken) > 1:
        given = " and ".join(f"{rows.count} (layer {layer})" for rows, layer in taken.items())
        raise ValueError(f"layers share one set of side rows, but are given {given}; use one number for all")
    if taken and architecture != "decoder":
        (layer,) = taken.values()
        raise ValueError(
            f"architecture {architecture} carries no side rows, which {kinds[layer]} (layer {layer}) takes up the "
            "layers; use architecture decoder"
        )
