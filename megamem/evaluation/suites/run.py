"""Runs a suite: its tasks are opened, asked one after the other, and scored with standard errors."""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megamem.errors import ConfigError, DataError, DependencyError, MegamemError
from megamem.evaluation.losses import perplexity
from megamem.evaluation.suites.base import Setting, Suite, SuiteTask, definitions
from megamem.evaluation.suites.result import NOT_ASKED, SuiteResult, TaskScore, mean_and_error, ratio_and_error

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task
    from torch.distributed import ProcessGroup

FEWSHOT_SEED = 1234
"""lm-eval's default."""
_LOGS = ("lm_eval", "datasets")


@dataclass(frozen=True)
class OpenSuite:
    """A suite whose tasks are open: their data are there, or it is known why they are not."""

    suite: Suite
    tasks: tuple[tuple[SuiteTask, Task], ...]
    missing: Mapping[str, str]
    """Why tasks are not there, by name."""
    setting: Setting

    def documents(self) -> dict[str, str]:
        """Return by task how many documents it asks, and a hash of the first and the last of them."""
        found = {}
        for line, task in self.tasks:
            asked = task.eval_docs
            ends = repr((asked[0], asked[len(asked) - 1])).encode()
            found[line.name] = f"{len(asked)} {sha256(ends).hexdigest()}"
        return found

    def run(
        self, model: LM, name: str, step: int | None = None, keep: Callable[[SuiteResult], object] | None = None
    ) -> SuiteResult:
        """Ask a model and return its scores. A collective call where the model lies on several ranks.

        Args:
            model: with lm-eval's interface.
            name: of the model, for people.
            step: optimizer steps it has learned for.
            keep: given the scores so far after each task but the last, so that hours of work outlive a failure.
        """
        begin, setting = time.perf_counter(), self.setting
        result = SuiteResult(
            suite=self.suite.name,
            model=name,
            scores=(),
            missing={**self.missing, **{line.name: NOT_ASKED for line, _ in self.tasks}},
            limit=setting.limit,
            differs=setting.differs,
            averaged=self.suite.averaged and not setting.only,
            independent=not self.suite.repeats or len(setting.lengths or self.suite.lengths) < 2,
            seconds=0.0,
            step=step,
        )
        for line, task in self.tasks:
            if keep is not None and result.scores:
                keep(result)
            score = _score(line, _ask(model, task, setting.limit))
            result = replace(
                result,
                scores=(*result.scores, score),
                missing={name: why for name, why in result.missing.items() if name != line.name},
                seconds=time.perf_counter() - begin,
            )
        return result


def open_suite_everywhere(suite: Suite, setting: Setting, group: ProcessGroup) -> OpenSuite:
    """Open the tasks of a suite on all ranks: each reads the data itself, and all have to ask the same.

    A collective call of all ranks of `group`. Raises what `open_suite` raises on any rank, on all of them and naming
    the rank; DataError too where a rank has other tasks or documents than rank 0.
    """
    opened: OpenSuite | None = None
    found: dict[str, str] | MegamemError
    try:
        opened = open_suite(suite, setting)
        found = opened.documents()
    except MegamemError as error:
        found = error
    everywhere: list[tuple[str, dict[str, str] | MegamemError]] = [("", {})] * group.size()
    dist.all_gather_object(everywhere, (platform.node(), found), group=group)
    first_host, first = everywhere[0]
    for rank, (host, theirs) in enumerate(everywhere):
        if isinstance(theirs, MegamemError):
            raise type(theirs)(f"rank {rank} on {host}: {theirs}" if group.size() > 1 else str(theirs))
        assert isinstance(first, dict)
        if other := sorted(name for name in first.keys() | theirs.keys() if first.get(name) != theirs.get(name)):
            raise DataError(
                f"suite {suite.name}: rank {rank} on {host} does not have the documents of {other[0]} that rank 0 on "
                f"{first_host} has; give all hosts the same data and packages"
            )
    assert opened is not None
    return opened


def open_suite(suite: Suite, setting: Setting) -> OpenSuite:
    """Open the tasks of a suite on this process.

    Raises: DataError where not one of them has its data and the packages that its scores need, DependencyError without
        lm-eval, ConfigError where no task has one of the names of `setting.only`.
    """
    setting = setting if suite.lengths else replace(setting, lengths=())
    lines = suite.tasks(setting.lengths or suite.lengths)
    lines = [line for line in lines if not setting.only or line.name.startswith(setting.only)]
    if not lines:
        raise ConfigError(f"suite {suite.name}: no task begins with {' or '.join(setting.only)}")
    tasks: list[tuple[SuiteTask, Task]] = []
    missing: dict[str, str] = {}
    with quiet():
        for line in lines:
            try:
                task = line.build(setting)
                if line.metric not in task.aggregation():
                    raise DataError(f"{line.name}: its metric_list lacks {line.metric}, the suite's metric")
                writes = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 0)
                if setting.max_length is not None and writes >= setting.max_length:
                    raise DataError(
                        f"{line.name}: writes {writes} tokens; --max-length {setting.max_length} has no room"
                    )
                tasks.append((line, task))
            except (DataError, DependencyError) as error:
                missing[line.name] = str(error)
    if not tasks:
        raise DataError(f"suite {suite.name}: no task can be asked; {next(iter(missing.values()))}")
    return OpenSuite(suite, tuple(tasks), missing, setting)


def choose_suites(
    names: Sequence[str], suites: Mapping[str, Suite], only: Sequence[str] = (), lengths: Sequence[int] = ()
) -> list[Suite]:
    """Return suites by their names.

    Args:
        names: of the suites.
        suites: all there are.
        only: beginnings of the names of tasks that are wanted; all if empty.
        lengths: tokens of contexts; each suite's own if empty.
    Raises: ConfigError naming a suite that does not exist, or what no task of these suites begins with.
    """
    if unknown := [name for name in names if name not in suites]:
        raise ConfigError(f"suite {unknown[0]}: no such suite; there are {', '.join(suites)}")
    chosen = [suites[name] for name in names]
    tasks = [line.name for suite in chosen for line in suite.tasks(lengths or suite.lengths)]
    if unknown := [begin for begin in only if not any(task.startswith(begin) for task in tasks)]:
        of = ", ".join(names)
        raise ConfigError(
            f"--only (evaluation.tasks.only) {unknown[0]}: no task of {of} begins so; there is {tasks[0]}"
        )
    return chosen


def _ask(model: LM, task: Task, limit: int | None) -> Sequence[Mapping[str, Any]]:
    """Return lm-eval's records of each document of a task."""
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(FEWSHOT_SEED)
    with quiet():
        # lm-eval's own standard errors of perplexities start processes; `_score` has its own
        loaded = TaskManager(include_defaults=False).load([task])
        # every rank has the model's rank 0 for lm-eval, which gives results to that rank alone
        found = evaluate(lm=model, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    task._instances = None  # its requests: prompts of the whole task, which an open task need not keep
    samples: Sequence[Mapping[str, Any]] = found["samples"][task.task_name]
    # a task with several ways to read an answer has a record of each; the first is the one that is scored
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]


def _score(line: SuiteTask, samples: Sequence[Mapping[str, Any]]) -> TaskScore:
    """Return the figure of a task and its standard error from the values of its documents."""
    values = [sample[line.metric] for sample in samples]
    if line.metric == "perplexity":  # log-probabilities: exp(-mean)
        mean, error = mean_and_error([float(value) for value in values])
        value = perplexity(-mean)
        error = None if error is None else value * error
    elif line.metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):  # pairs with what they are divided by
        mean, error = ratio_and_error(*zip(*values, strict=True))
        bits = line.metric == "bits_per_byte"
        value = -mean / math.log(2) if bits else perplexity(-mean)
        error = None if error is None else error * (1 / math.log(2) if bits else value)
    else:
        mean, error = mean_and_error([float(value) for value in values])
        value, error = line.scale * mean, None if error is None else line.scale * error
    return TaskScore(line.name, line.metric, value, error, len(values))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what lm-eval and `datasets` say below an error, and bars of the latter, quiet inside a `with` statement."""
    definitions()  # says what to install
    from datasets import disable_progress_bars, enable_progress_bars

    loggers = [logging.getLogger(name) for name in _LOGS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
