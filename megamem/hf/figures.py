"""Figures of a model on held-out text, for the card of its export."""

from __future__ import annotations

from megamem.config.run import RunConfig
from megamem.data.feeder import evaluation_documents
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.reading import Progress
from megamem.model.stage import Stage
from tokenization.text_size import TextCounter
from tokenization.tokenizer import Tokenizer


def held_out_figures(
    stage: Stage, config: RunConfig, max_tokens: int, progress: Progress | None = None
) -> dict[str, float]:
    """Loss, perplexity and bits per byte on the first `max_tokens` tokens of the run's held-out documents.

    progress: called with (calls of the model made, calls of all).
    """
    report = Evaluator(stage, rows=config.evaluation.rows).losses(
        evaluation_documents(
            config.data, chunk_size=config.model.chunk_size, sequence_length=config.evaluation.sequence_length
        ),
        max_tokens=max_tokens,
        progress=progress,
        counter=TextCounter(Tokenizer.load(config.data.tokenizer).token_bytes()) if config.data.tokenizer else None,
    )
    figures = {"held-out tokens": float(report.tokens), "loss (nats per token)": report.loss}
    figures["perplexity"] = report.perplexity
    if report.bits_per_byte is not None:
        figures["bits per byte"] = report.bits_per_byte
    if report.beyond_first_chunk_loss is not None:
        figures["loss beyond the first chunk"] = report.beyond_first_chunk_loss
    return figures
