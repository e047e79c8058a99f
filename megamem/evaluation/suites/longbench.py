"""LongBench: questions about long texts, summaries, examples to follow, code.

Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding", 2024. Prompts, lengths of
answers and scores are those of lm-eval's tasks. The data come from the hub, or from files of the published archive,
`longbench/NAME.jsonl` in the folder of data. The tasks are those of Table 4 in "Memory Caching"; "Language Model Memory
and Memory Models for Language" reports means over their kinds, two of retrieval among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megamem.evaluation.suites.base import (
    Document,
    Setting,
    Suite,
    SuiteTask,
    definitions,
    local_task,
    open_definition,
    read_documents,
)

if TYPE_CHECKING:
    from lm_eval.api.task import Task

FOLDER = "longbench"
TASKS = (
    "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
    "trec", "triviaqa", "samsum", "lcc", "repobench-p",
)  # fmt: skip


def in_lm_evals_form(document: Document) -> Document:
    """Return a document of the published archive with the names that lm-eval's prompts use."""
    return {**document, "question": document.get("question", document.get("input"))}


def longbench_task(name: str, setting: Setting) -> Task:
    """Open one of the tasks.

    Raises: DataError saying what to put where, DependencyError naming packages that its scores need.
    """
    file, definition, task = setting.data / FOLDER / f"{name}.jsonl", f"longbench/{name}.yaml", f"longbench_{name}"
    if file.is_file():
        documents = [in_lm_evals_form(each) for each in read_documents(file)]
        return local_task(definition, task, {"test": documents}, f"{file}: documents may lack a field of LongBench's")
    where = f"put {name}.jsonl of LongBench's data.zip in {file.parent}"
    return open_definition(definitions() / definition, task, where)


def _lines(_: Sequence[int]) -> Sequence[SuiteTask]:
    """Return a line for each task."""
    return [SuiteTask(f"longbench_{name}", "score", partial(longbench_task, name)) for name in TASKS]


LONGBENCH = Suite("longbench", _lines, whole=True)
