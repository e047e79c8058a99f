"""What a suite is: tasks with one metric each, in lm-eval's form, and where their data come from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megamem.config.evaluation import TasksConfig
from megamem.errors import DataError, DependencyError

if TYPE_CHECKING:
    from lm_eval.api.task import Task

Document = dict[str, Any]
"""One document of a task, as lm-eval has it."""
UNBOUNDED = 1 << 30
"""Tokens of a window where contexts are read whole."""


@dataclass(frozen=True)
class Setting:
    """What tasks are built for: a tokenizer, and what the user asked for."""

    encode: Callable[[str], Sequence[int]]
    """Token ids of a text, by the model's tokenizer."""
    decode: Callable[[Sequence[int]], str]
    """Text of token ids."""
    data: Path = TasksConfig().folder
    """Folder of `megamem tasks fetch`, and of data sets of one's own."""
    lengths: tuple[int, ...] = ()
    """Tokens of contexts, where a suite has such lengths; the suite's own if empty."""
    limit: int | None = None
    """Documents of each task; all if None."""
    only: tuple[str, ...] = ()
    """Tasks whose names begin with one of these; all if empty."""
    max_length: int | None = None
    """Tokens of a window, where the user gave them."""

    @property
    def differs(self) -> str:
        """What this asks less or otherwise than the whole suite, such as `only-arc-limit-20`; nothing if empty."""
        parts = {
            "only": "-".join(self.only), "lengths": "-".join(map(str, self.lengths)), "max-length": self.max_length,
            "limit": self.limit,
        }  # fmt: skip
        return "-".join(f"{name}-{value}" for name, value in parts.items() if value)


@dataclass(frozen=True)
class SuiteTask:
    """One line of a suite's table."""

    name: str
    """Name of the line; that of lm-eval's task where there is one."""
    metric: str
    """lm-eval's name of the metric."""
    build: Callable[[Setting], Task]
    """Opens the task. Raises DataError in one line where its data are missing."""
    scale: float = 100.0
    """What the metric is shown as a multiple of: percent, or 1 for perplexities."""


@dataclass(frozen=True)
class Suite:
    """Tasks that a paper's table puts side by side."""

    name: str
    tasks: Callable[[Sequence[int]], Sequence[SuiteTask]]
    """Its tasks for contexts of so many tokens."""
    lengths: tuple[int, ...] = ()
    """Tokens of contexts where none are given; empty where texts have their own, and nothing else is asked for."""
    averaged: bool = True
    """Whether the mean over its tasks is a figure."""
    whole: bool = False
    """Whether contexts are read whole, however long, where no window is given."""
    repeats: bool = False
    """Whether each length asks the same documents, so that tasks of several lengths are not independent."""


def definitions() -> Path:
    """Return lm-eval's folder of task definitions. Raises DependencyError where lm-eval is not installed."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise DependencyError("suites and tasks need lm-eval; pip install 'megamem[eval]'")
    return Path(spec.origin).parent / "tasks"


def open_definition(file: Path, name: str, where: str) -> Task:
    """Open a task by its YAML file.

    Args:
        file: task file of lm-eval, or one that includes it.
        name: of the task.
        where: what to put where if its data cannot be had, for the message.
    Raises: DataError where the data cannot be had or name no answer, DependencyError where the definition needs other
        packages.
    """
    from lm_eval.tasks import TaskManager

    try:
        (task,) = TaskManager(include_defaults=False).load([str(file)])["tasks"].values()
    except ImportError as error:
        raise DependencyError(f"{name}: {one_line(error)}") from None
    except Exception as error:  # `datasets` and its hub raise all kinds for data that are not there
        raise DataError(
            f"{name}: its data cannot be opened in a folder or from the hub ({type(error).__name__}); {where}"
        ) from None
    _check_answer(task, name, where)
    return task


def _check_answer(task: Task, name: str, where: str) -> None:
    """Raise DataError where the first document's right answer is none of its choices.

    lm-eval would count every answer as wrong then: a data set without labels, or with a column of another name.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    document = task.task_docs[0]  # as opened: `eval_docs` would prepare all documents once more
    choices = task.doc_to_choice(document)
    found = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    for answer in found if isinstance(found, list) else [found]:
        if answer not in (range(len(choices)) if isinstance(answer, int) else choices):
            raise DataError(f"{name}: its data name no right answer: {answer!r} is none of {choices}; {where}")


def local_task(
    definition: str, name: str, splits: Mapping[str, Sequence[Document]], where: str = "", **changes: object
) -> Task:
    """Return lm-eval's task with documents of our own.

    Args:
        definition: file below lm-eval's folder of tasks: prompt, metric and normalization are taken from there.
        name: of the task.
        splits: documents by the name of the split that the definition evaluates.
        where: what may be wrong with the documents, for messages.
        changes: other keys of the definition that differ.
    """
    with tempfile.TemporaryDirectory(prefix="megamem-task-") as scratch:
        files = {}
        for split, documents in splits.items():
            files[split] = str(Path(scratch) / f"{split}.jsonl")
            Path(files[split]).write_text("".join(f"{json.dumps(document)}\n" for document in documents))
        settings = {
            "include": str(definitions() / definition), "task": name, "dataset_path": "json", "dataset_name": None,
            "custom_dataset": None, **changes,
            "dataset_kwargs": {"data_files": files, "cache_dir": scratch, "keep_in_memory": True},
        }  # fmt: skip
        file = Path(scratch) / f"{name}.yaml"
        file.write_text(yaml.safe_dump(settings, sort_keys=False))
        return open_definition(file, name, where)


def generated_task(name: str, documents: Sequence[Document], form: Mapping[str, object]) -> Task:
    """Return a task of our own. form: keys of lm-eval's task files."""
    definitions()
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    rows = Dataset.from_list(list(documents))
    settings = {"task": name, "test_split": "test", "custom_dataset": lambda **_: {"test": rows}}
    return ConfigurableTask(config={**settings, **form})


def read_documents(file: Path) -> list[Document]:
    """Return the documents of a file with one JSON object a line. Raises DataError naming file and line."""
    documents: list[Document] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # other ends of lines may stand within a text
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({one_line(error)})") from None
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line) if line.strip() else None
        except ValueError:
            value = line
        if value is None:
            continue
        if not isinstance(value, dict):
            raise DataError(f"{file}:{number}: is no JSON object; a document is one object on a line of its own")
        documents.append(value)
    if not documents:
        raise DataError(f"{file}: holds no document")
    return documents


def hub_documents(path: str, split: str, name: str, where: str) -> list[Document]:
    """Return the documents of a data set of the hub. Raises DataError saying what to put where if it cannot be had."""
    definitions()
    from datasets import load_dataset

    try:
        return [dict(document) for document in load_dataset(path, split=split)]
    except Exception as error:  # `datasets` and its hub raise all kinds for data that are not there
        raise DataError(f"{name}: {path} cannot be had from the hub ({type(error).__name__}); {where}") from None


def one_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
