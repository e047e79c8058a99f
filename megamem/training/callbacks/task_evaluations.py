"""The callback that asks the model suites of evaluation tasks while it trains and at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.suites.base import Setting
from megamem.evaluation.suites.registry import SUITES
from megamem.evaluation.suites.result import SuiteResult, suite_table, write_suite
from megamem.evaluation.suites.run import OpenSuite, choose_suites, open_suite
from megamem.runs.sinks.base import LogRecord, Sink
from megamem.training.loop import Callback, Trainer
from tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megamem.pipeline.base import StepResult, TrainingEngine


class TaskEvaluations(Callback):
    """Suites of tasks every `every` steps, written as a record of their own, and at the end.

    All ranks open the same documents and ask them at the same steps: data-parallel ranks share them.
    """

    def __init__(
        self, engine: TrainingEngine, tokenizer: Tokenizer, sinks: Sequence[Sink], watch: Callable[[str], None]
    ) -> None:
        """Open the suites, before the first step: what is missing is told then.

        Args:
            engine: whose model is asked.
            tokenizer: the model's.
            sinks: where records go; none on ranks other than 0.
            watch: told what is being done, often enough for a watchdog to see progress.
        Raises: DataError where a suite has no data, DependencyError without lm-eval, ConfigError as `choose_suites`.
        """
        self.engine, self.tokenizer, self.sinks, self.watch = engine, tokenizer, sinks, watch
        self.config = engine.config.evaluation.tasks
        self.suites = {limit: self._open(limit) for limit in {self._limit, self.config.final_limit}}
        """The open suites by the limit of documents."""

    @property
    def _limit(self) -> int | None:
        """Documents of each task while training; those at the end where there is no evaluation before."""
        return self.config.limit if self.config.every else self.config.final_limit

    def _open(self, limit: int | None) -> list[OpenSuite]:
        """Open the suites for a limit of documents."""
        setting = Setting(
            lambda text: self.tokenizer.encode(text).tolist(),
            lambda tokens: self.tokenizer.decode(list(tokens)),
            self.config.folder,
            self.config.lengths,
            limit,
            self.config.only,
        )
        chosen = choose_suites(self.config.suites, SUITES, self.config.only, self.config.lengths)
        return [open_suite(suite, setting) for suite in chosen]

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`. An evaluation is a pause: its time is not the training's."""
        if not self.config.every or trainer.step % self.config.every:
            return
        with trainer.pause(f"tasks after step {trainer.step}"):
            found = self._run(self.config.limit, trainer.step)
        for suite in found:
            record: LogRecord = {"step": trainer.step, "tokens": trainer.tokens, **suite.figures()}
            for sink in self.sinks:
                sink.write(record)

    def final(self, trainer: Trainer, console: Console) -> dict[str, float | str | None]:
        """Ask the trained model, keep the results in the run's folder, show them, and return their figures."""
        figures: dict[str, float | str | None] = {}
        for suite in self._run(self.config.final_limit, trainer.step):
            figures.update(suite.figures())
            if trainer.topology.rank == 0:
                write_suite(trainer.config.run_folder, suite)
                console.print(suite_table(suite))
        return figures

    def _run(self, limit: int | None, step: int) -> list[SuiteResult]:
        """Ask all suites. A collective call."""
        from megamem.evaluation.harness import HarnessModel
        from megamem.evaluation.suites.base import UNBOUNDED

        evaluator = Evaluator(self.engine.stage, self.engine.topology, self.engine.config.evaluation.rows)
        found = []
        for opened in self.suites[limit]:
            name = opened.suite.name

            def progress(done: int, of: int, name: str = name) -> None:
                """Tell the watchdog."""
                self.watch(f"suite {name}, batch {done} of {of}")

            window = UNBOUNDED if opened.suite.whole else self.engine.config.data.sequence_length
            model = HarnessModel(evaluator, self.tokenizer, window, progress)
            result = opened.run(model, self.engine.config.name, step)
            found.append(replace(result, seconds=round(result.seconds, 1)))
        return found
