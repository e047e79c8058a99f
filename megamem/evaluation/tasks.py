"""lm-eval's tasks on a model that has lm-eval's interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megamem.errors import ConfigError, DataError, DependencyError
from megamem.evaluation.suites.base import one_line

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

RESAMPLES = 1000
"""Draws of lm-eval's standard errors of figures that are no means, such as perplexities."""


def run_tasks(
    names: Sequence[str], open_model: Callable[[], LM], include_path: Path | None = None, limit: int | None = None
) -> dict[str, dict[str, object]] | None:
    """Return lm-eval's results by task; None on ranks other than the first of a host, to which it gives none.

    Args:
        names: tasks of lm-eval, or of files in `include_path`.
        open_model: opens the model, once the names are known to be tasks.
        include_path: folder with task files of one's own.
        limit: documents of each task; all if None.

    Raises: DependencyError without lm-eval, ConfigError naming a task that does not exist, DataError where one cannot
        be opened.
    """
    try:
        from lm_eval import simple_evaluate
    except ImportError:
        raise DependencyError("--tasks needs lm-eval; pip install 'megamem[eval]'") from None
    manager = _known_tasks(names, include_path)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(f"--tasks {unknown[0]}: no such task; --include-path names a folder with tasks of your own")
    loaded: list[object] = []
    for name in names:
        try:
            found = manager.load([name])
        except Exception as error:  # data that are not there, packages and settings that tasks ask for: of all kinds
            raise DataError(
                f"--tasks {name}: cannot be opened ({one_line(error)}); --suite has tasks of its own"
            ) from None
        group = found.get("groups", {}).get(name)
        loaded += [group] if group is not None else found["tasks"].values()
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would start processes for errors by resampling
    found = simple_evaluate(
        model=open_model(), tasks=loaded, task_manager=manager, limit=limit, bootstrap_iters=RESAMPLES
    )
    if found is None:
        return None
    results: dict[str, dict[str, object]] = found["results"]
    return results


def _known_tasks(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return lm-eval's index of tasks: of a folder of one's own alone, where all of `names` are single tasks of it.

    Its own 14,000 tasks take half a minute to find.
    """
    from lm_eval.tasks import TaskManager

    if include_path is None:
        return TaskManager()
    own = TaskManager(include_path=str(include_path), include_defaults=False)
    # groups may name tasks of lm-eval
    return own if set(names) <= set(own.all_subtasks) else TaskManager(include_path=str(include_path))
