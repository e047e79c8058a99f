"""Micro-batches of rows for training, and held-out documents for evaluation.

Letters: T tokens of a row, C chunks of a row, R rows.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenization.text_size import TextSize

IGNORED = -100
"""Label of a position whose next token is unknown or padding."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    `tokens[t]` is read and `labels[t]` is to be predicted: the token that follows, or what a task wants predicted. In
    joined documents the first token of the next one follows the end of a document.
    """

    tokens: Tensor
    """[T, R] int64, tokens first (Megatron layout). Padding is token 0."""
    labels: Tensor
    """[T, R] int64. `IGNORED` at padding, and where a task predicts nothing."""
    starts: npt.NDArray[np.int64]
    """[C, R] position of each chunk's first token since the memory was reset; 0 = reset here. Stays on the host."""
    sample_ids: tuple[int, ...]
    """Number of each row's sample, `step * global_rows + row`. With streams, `row` is the lane."""
    begins: npt.NDArray[np.bool_] | None = None
    """[T, R] where the memory is reset, at any token (`data.reset: exact`): a document, a sequence or a lane's part of
    an epoch begins here. None where memories are reset at chunk borders only, as `starts` says. Stays on the host."""
    padding: int = 0
    """Positions of all rows that no document fills."""

    @property
    def positions(self) -> int:
        """The number of positions of all rows, padding included."""
        return self.tokens.numel()

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with tokens and labels on `device`; the copy does not block where they are pinned."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )

    def pin_memory(self) -> "Batch":
        """Return the same batch in page-locked host memory."""
        return replace(self, tokens=self.tokens.pin_memory(), labels=self.labels.pin_memory())


@dataclass(frozen=True)
class EvaluationDocument:
    """One held-out document in whole chunks, padded at its end."""

    name: str
    """The document's name in its source."""
    tokens: Tensor
    """[T] int64, T a whole number of chunks. Padding is token 0."""
    labels: Tensor
    """[T] int64, the next token, or what a task wants predicted; `IGNORED` at padding and where nothing is."""
    predicted_tokens: int
    """Number of tokens before the padding. Each of a text has a label; of a task's, some have."""
    text_size: TextSize | None
    """Bytes, characters and words of the predicted tokens' text. None without a tokenizer."""

    @property
    def predicts_all(self) -> bool:
        """True where every token has a label, as those of most tasks have not."""
        return bool((self.labels[: self.predicted_tokens] != IGNORED).all())
