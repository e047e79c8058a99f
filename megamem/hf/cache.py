"""What a model has read so far, as transformers' generation passes it along: memory states, no list of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from megamem.memory.base import Chunk, StateSpec, state_tensors
from megamem.pipeline.reader import RowGroup, select_rows


class MegamemCache(Cache):
    """The states of all layers, open chunks included, and where each row stands in its document."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.specs: dict[str, StateSpec] = {}
        """The states as the model declares them, by component."""
        self.groups: list[RowGroup] = []
        """The states of all rows; none before the first call."""
        self.padding: tuple[int, ...] = ()
        """Left padding of each row."""
        self.seen = 0
        """Tokens read, padding included."""
        self.ended = False
        """Whether rows were padded on the right: nothing can follow then."""

    def place(self) -> Chunk:
        """Where the next token lies in each row's document."""
        return Chunk(tuple(self.seen - padding for padding in self.padding))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys a mask would span, were there one."""
        return self.seen + query_length, 0

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first call."""
        return len(self.padding) or -1

    @property
    def is_compileable(self) -> bool:
        """Shapes change from call to call."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything has been read."""
        return bool(self.groups)

    @property
    def is_croppable(self) -> bool:
        """A memory does not forget single tokens."""
        return False

    @property
    def bytes(self) -> int:
        """What the states take."""
        return sum(tensor.nbytes for group in self.groups for tensor in state_tensors(group.states))

    def reset(self) -> None:
        """Forget everything."""
        self.groups, self.padding, self.seen, self.ended = [], (), 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row beam_idx[i] was; beam_idx: [rows] int64."""
        self.groups = select_rows(self.specs, self.groups, beam_idx.tolist())
        if self.padding:
            self.padding = tuple(self.padding[row] for row in beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [rows] int64."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.reorder_cache(torch.arange(len(self.padding)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: a memory does not forget single tokens."""
        raise ValueError("a memory state cannot be cut back by tokens; assisted generation does not go with it")


def padding_of(mask: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], bool]:
    """Left padding of each row of an attention mask, and whether any row is padded on the right.

    Raises: ValueError for a hole or a row without tokens.
    """
    left, right = [], False
    for index, row in enumerate(mask):
        tokens = sum(row)
        if not tokens:
            raise ValueError(f"attention_mask: row {index} has no token")
        begin = list(row).index(1)
        if not all(row[begin : begin + tokens]):
            raise ValueError(f"attention_mask: row {index} has a hole; padding may stand before or after the tokens")
        left.append(begin)
        right |= begin + tokens < len(row)
    return tuple(left), right
