"""The callback that asks the model suites of evaluation tasks while it trains and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from megamem.config.evaluation import TasksConfig
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.suites.base import Setting
from megamem.evaluation.suites.registry import SUITES
from megamem.evaluation.suites.result import SuiteResult, suite_table, write_suite
from megamem.evaluation.suites.run import OpenSuite, choose_suites, open_suite_everywhere
from megamem.runs.sinks.base import LogRecord, Sink
from megamem.training.loop import Callback, Trainer
from tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megamem.pipeline.base import StepResult, TrainingEngine

Suites = Mapping[int | None, Sequence[OpenSuite]]
"""Open suites by the limit of documents of each task."""


def open_suites(config: TasksConfig, tokenizer: Tokenizer, group: ProcessGroup) -> Suites:
    """Open the suites that are asked while training and at the end. A collective call of all ranks of `group`.

    To be called before a watchdog runs: texts of 128K tokens take minutes, as does a hub that does not answer.

    Args:
        config: what is asked, `evaluation.tasks`.
        tokenizer: the model's.
        group: all ranks.
    Raises: on all ranks, DataError where a suite has no data on a rank or other data than on rank 0, DependencyError
        without lm-eval, ConfigError as `choose_suites`.
    """

    def opened(limit: int | None) -> list[OpenSuite]:
        """Open the suites for a limit of documents."""
        setting = Setting(
            lambda text: tokenizer.encode(text).tolist(),
            lambda tokens: tokenizer.decode(list(tokens)),
            config.folder,
            config.lengths,
            limit,
            config.only,
        )
        chosen = choose_suites(config.suites, SUITES, config.only, config.lengths)
        return [open_suite_everywhere(suite, setting, group) for suite in chosen]

    # at the end, and before it where that is asked for: in one order on all ranks
    limits = [config.final_limit, *([config.limit] if config.every and config.limit != config.final_limit else [])]
    return {limit: opened(limit) for limit in limits}


def missing_tasks(suites: Suites) -> list[str]:
    """Return a line for each task that cannot be asked."""
    whys = {name: why for opened in suites.values() for suite in opened for name, why in suite.missing.items()}
    return [f"missing: {name}: {why}" for name, why in whys.items()]


class TaskEvaluations(Callback):
    """Suites of tasks every `every` steps, written as a record of their own, and at the end.

    All ranks have the same documents and ask them at the same steps: data-parallel ranks share them.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        suites: Suites,
        tokenizer: Tokenizer,
        sinks: Sequence[Sink],
        watch: Callable[[str], None],
    ) -> None:
        """Ask suites that are open.

        Args:
            engine: whose model is asked.
            suites: as `open_suites` opens them.
            tokenizer: the model's.
            sinks: where records go; none on ranks other than 0.
            watch: told what is being done, often enough for a watchdog to see progress.
        """
        self.engine, self.suites, self.tokenizer, self.sinks, self.watch = engine, suites, tokenizer, sinks, watch
        self.config = engine.config.evaluation.tasks
        self._last: tuple[tuple[int, int | None], list[SuiteResult]] | None = None
        """The step and the limit of documents of the last evaluation, and what it found."""

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
        keep = partial(write_suite, trainer.config.run_folder) if trainer.topology.rank == 0 else None
        for suite in self._run(self.config.final_limit, trainer.step, keep):
            figures.update(suite.figures())
            if keep is not None:
                console.print(suite_table(suite))
        return figures

    def _run(
        self, limit: int | None, step: int, keep: Callable[[SuiteResult], object] | None = None
    ) -> list[SuiteResult]:
        """Ask all suites, unless these weights were asked just now. A collective call.

        keep: given what is known of a suite after each of its tasks.
        """
        if self._last is not None and self._last[0] == (step, limit):
            if keep is not None:
                for result in self._last[1]:
                    keep(result)
            return self._last[1]
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
            result = opened.run(model, self.engine.config.name, step, keep)
            found.append(replace(result, seconds=round(result.seconds, 1)))
            if keep is not None:
                keep(found[-1])
        self._last = (step, limit), found
        return found
