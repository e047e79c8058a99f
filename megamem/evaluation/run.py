"""The evaluation at the end of a run, and of `megamem evaluate`: all figures, their table's data, the picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from megamem.config.run import RunConfig
from megamem.data.batch import EvaluationDocument
from megamem.evaluation.baselines import lzma_baseline
from megamem.evaluation.corruption import corrupted
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.losses import LEAST_CHUNKS, LossReport, cut_documents
from megamem.evaluation.objective import as_predicted
from megamem.evaluation.probe import MemoryReport, memory_report
from megamem.evaluation.reading import Progress
from megamem.evaluation.report import PICTURE, write_report
from megamem.evaluation.result import EvaluationResult
from megamem.evaluation.sliding import SlidingReport
from megamem.model.objective import build_objective
from tokenization.text_size import TextCounter
from tokenization.tokenizer import Tokenizer

Watch = Callable[[str], None]
"""Told in a few words what is being done, often enough for a watchdog to see progress."""


def final_evaluation(
    evaluator: Evaluator,
    documents: Callable[[], Iterable[EvaluationDocument]],
    tokenizer: Tokenizer | None,
    config: RunConfig,
    *,
    folder: Path | None = None,
    console: Console | None = None,
    watch: Watch | None = None,
) -> EvaluationResult:
    """All figures of docs/evaluation.md. A collective call: every rank makes it.

    Args:
        documents: gives the held-out documents, the same on each rank.
        tokenizer: for the size of documents that are cut and for the LZMA baseline; without it both are None.
        folder: where rank 0 writes evaluation.json and the picture; nothing is written if not given. The training
            curve is read from metrics.jsonl in it.
        console: for the progress bar, shown on rank 0 only.
        watch: called after each call of the model and while LZMA is waited for, with what is being done.
    Returns: the same on all ranks but for LZMA's figures and the picture, which only rank 0 has.
    Raises: DataError without a held-out document; ConfigError where the stride does not divide the chunk.
    """
    counter = None if tokenizer is None else TextCounter(tokenizer.token_bytes())
    chosen, *others = (
        final_documents(documents(), config, counter, reading) for reading in range(config.training.objective.readings)
    )
    main = evaluator.is_rank_0
    with ThreadPoolExecutor(1) as pool:  # LZMA holds no lock of the interpreter while it compresses
        lzma = pool.submit(lzma_baseline, chosen, tokenizer) if main and tokenizer is not None else None
        passing = Passes(console if main else None, watch)
        forgotten = evaluator.reader.forgetting_long_term(config.evaluation.forget_long_term)
        with corrupted(evaluator.stage, config.evaluation.corruption), forgotten, passing as passes:
            figures = _figures(evaluator, chosen, config, counter, passes)
            further = _further_losses(evaluator, others, config, passes)
        while lzma and not wait([lzma], timeout=1).done:
            if watch is not None:
                watch("evaluation, LZMA baseline")
        result = EvaluationResult(
            losses=figures.losses,
            memory=figures.memory,
            sliding=figures.sliding,
            further=further,
            lzma=lzma.result() if lzma else None,
            tokens_per_second=figures.losses.tokens / figures.seconds,
            chunk_size=config.model.chunk_size,
            tokenizer=None if tokenizer is None else tokenizer.vocabulary_hash,
            picture=str(folder / PICTURE) if main and folder is not None else None,
        )
    if main and folder is not None:
        write_report(folder, result.to_dict(), config.name)
    return result


def final_documents(
    documents: Iterable[EvaluationDocument], config: RunConfig, counter: TextCounter | None, reading: int = 0
) -> list[EvaluationDocument]:
    """Return what the evaluation at the end of a run reads of its held-out documents, as its objective has them.

    See `as_predicted`, `cut_documents`. reading: number of the objective's reading.
    """
    bound, predicted = config.evaluation.final_max_tokens, as_predicted(documents, config, counter, reading)
    return cut_documents(predicted, config.model.chunk_size, bound, counter, _depth(config))


def validations_read_the_same(config: RunConfig) -> bool:
    """Return whether validations while training read what the evaluation at the end reads."""
    bounds, last = config.evaluation, config.phases[-1]
    return bounds.max_tokens == bounds.final_max_tokens and _depth(last) == LEAST_CHUNKS


def _depth(config: RunConfig) -> int:
    """Chunks below which documents are not cut: at least what a training sequence has."""
    return max(LEAST_CHUNKS, config.chunks)


@dataclass(frozen=True)
class _Figures:
    losses: LossReport
    memory: MemoryReport
    sliding: SlidingReport | None
    """Sliding-window losses of documents that predict every token: read from a later token on, others may lack what
    they ask about. None where every chunk is forgotten."""
    seconds: float
    """Seconds of the plain pass."""


def _figures(
    evaluator: Evaluator,
    documents: Sequence[EvaluationDocument],
    config: RunConfig,
    counter: TextCounter | None,
    passes: Passes,
) -> _Figures:
    begin, forget = time.perf_counter(), config.evaluation.forget_every_chunk
    alone = forget or not config.model.architecture.causal
    losses = evaluator.losses(documents, forget=forget, progress=passes.named("held-out loss"))
    seconds = time.perf_counter() - begin
    if alone:  # nothing is left to take away, and no window to slide
        return _Figures(losses, memory_report(losses, losses), None, seconds)
    memory = evaluator.memory_use(documents, trained=losses, progress=passes.named("memory off"))
    sliding = None
    if texts := [document for document in documents if document.predicts_all]:
        sliding = evaluator.sliding_losses(
            texts,
            stride=config.evaluation.sliding_stride,
            max_tokens=config.evaluation.sliding_max_tokens,
            counter=counter,
            least=_depth(config),
            progress=passes.named("sliding window"),
        )
    return _Figures(losses, memory, sliding, seconds)


def _further_losses(
    evaluator: Evaluator, texts: Sequence[Sequence[EvaluationDocument]], config: RunConfig, passes: Passes
) -> dict[str, LossReport]:
    """Return the losses of documents in the objective's readings behind the first one, by the name of their loss."""
    _, *further = build_objective(config.training.objective, config.model).readings
    names = [objective.names[0] for objective, _ in further]
    forget = config.evaluation.forget_every_chunk
    return {
        name: evaluator.losses(documents, forget=forget, progress=passes.named(f"{name} loss"))
        for name, documents in zip(names, texts, strict=True)
    }


class Passes:
    """Progress of the passes: a bar on the console, words for the watchdog."""

    def __init__(self, console: Console | None, watch: Watch | None = None) -> None:
        """Show bars on `console`, tell `watch`; nothing is shown or told where they are None."""
        named = TextColumn("{task.description:<15}", markup=False)
        columns = (named, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Bar(*columns, console=console) if console else None
        self.watch = watch

    def __enter__(self) -> Passes:
        (self.bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        (self.bar or nullcontext()).__exit__(*error)

    def named(self, name: str, passes: int = 1) -> Progress:
        """Return the `progress` of a pass, or of several of as many calls each, which have one bar."""
        task = self.bar.add_task(name, total=None, start=False) if self.bar else None
        ended = 0

        def progress(done: int, total: int) -> None:
            nonlocal ended
            if self.watch is not None:
                self.watch(f"evaluation, {name}: call {done} of {total}")
            if self.bar is not None and task is not None:
                if done == 1 and not ended:
                    self.bar.reset(task, total=passes * total)
                self.bar.update(task, completed=ended * total + done)
            ended = (ended + (done == total)) % passes

        return progress
