"""What an evaluation of held-out text finds: all figures of docs/evaluation.md in one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megamem.evaluation.baselines import LzmaReport
from megamem.evaluation.losses import LossReport
from megamem.evaluation.probe import MemoryReport
from megamem.evaluation.sliding import SlidingReport

Figure = float | int | str | None


@dataclass(frozen=True)
class EvaluationResult:
    """The figures of one evaluation, as reports and as single numbers."""

    losses: LossReport
    """Losses of the model as trained, overall and by document, chunk and position."""
    memory: MemoryReport
    """Losses with the memory off, and what the memory gives."""
    sliding: SlidingReport | None
    """Sliding-window losses of documents that predict every token; None without any."""
    further: Mapping[str, LossReport]
    """Losses in the objective's readings behind the first one, by the name of their loss."""
    lzma: LzmaReport | None
    """LZMA on the same text; None without a tokenizer, and on ranks other than 0."""
    tokens_per_second: float
    """Speed of the plain pass over all ranks."""
    chunk_size: int
    """Tokens of the model's chunks."""
    tokenizer: str | None
    """`Tokenizer.vocabulary_hash` of the text's; None without a tokenizer."""
    picture: str | None
    """Path of the picture, where one was drawn."""

    def figures(self) -> dict[str, Figure]:
        """Return the single numbers by the names that docs/evaluation.md explains."""
        losses, memory, sliding = self.losses, self.memory, self.sliding
        return {
            "val_loss": losses.loss,
            "val_perplexity": losses.perplexity,
            "val_bits_per_byte": losses.bits_per_byte,
            "val_bits_per_character": losses.bits_per_character,
            "val_word_perplexity": losses.word_perplexity,
            "val_word_perplexity_with_line_ends": losses.word_perplexity_with_line_ends,
            "val_tokens": losses.tokens,
            "val_accuracy": losses.accuracy,
            "val_exact_match": losses.exact_match,
            **further_figures(self.further),
            "lzma_bits_per_byte": self.lzma.bits_per_byte if self.lzma else None,
            "first_chunk_loss": losses.first_chunk_loss,
            "beyond_first_chunk_loss": memory.beyond_first_chunk_loss,
            "memory_off_beyond_first_chunk_loss": memory.memory_off_beyond_first_chunk_loss,
            "memory_off_loss": memory.memory_off_loss,
            "memory_gain": memory.gain,
            "sliding_perplexity": sliding.perplexity if sliding else None,
            "sliding_plain_perplexity": sliding.plain_perplexity if sliding else None,
            "sliding_tokens": sliding.tokens if sliding else None,
            "evaluation_tokens_per_second": self.tokens_per_second,
            "chunk_size": self.chunk_size,
            "picture": self.picture,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: the figures, and the reports under the names of their fields."""
        return {
            **self.figures(),
            "tokenizer": self.tokenizer,
            "losses": self.losses.to_dict(),
            "memory": self.memory.to_dict(),
            "sliding": self.sliding.to_dict() if self.sliding else None,
            "further": {name: report.to_dict() for name, report in self.further.items()},
            "lzma": self.lzma.to_dict() if self.lzma else None,
        }


def further_figures(reports: Mapping[str, LossReport]) -> dict[str, float]:
    """Return loss and accuracy in further readings, such as `val_copy_loss`. reports: by the name of their loss."""
    return {
        f"val_{name}_{figure}": value
        for name, report in reports.items()
        for figure, value in (("loss", report.loss), ("accuracy", report.accuracy))
    }
