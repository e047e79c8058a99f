"""The suite of in-context recall: a passage, then the beginning of a sentence that only the passage can end.

Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff", 2024 (SWDE, FDA, SQuAD),
and "Just read twice: closing the recall gap for recurrent language models", 2024 (Natural Questions, TriviaQA, DROP).
The model writes on greedily up to a line's end, 48 tokens at most, and is right where its text contains an answer,
whatever the case of letters. Contexts are cut to a number of tokens around the answer, as in the second paper; where an
answer's place is not asked about (DROP, TriviaQA), from the start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megamem.evaluation.suites.base import (
    Document,
    Setting,
    Suite,
    SuiteTask,
    generated_task,
    hub_documents,
    read_documents,
)

if TYPE_CHECKING:
    from lm_eval.api.task import Task

NEW_TOKENS = 48
RESERVED = 50
"""Tokens of a context's length that are left for the answer."""
FOLDER = "recall"
"""Folder of the data below `Setting.data`: NAME.jsonl."""


@dataclass(frozen=True)
class RecallSet:
    """One data set, and the form of its documents."""

    hub: str
    """Its name in the hub."""
    keyed: bool = False
    """Whether a document asks for the value of a key (`key`, `value`) at the end of its `text`."""
    around_answer: bool = True
    """Whether contexts are cut around the answer, or behind their beginning."""


SETS = {
    "swde": RecallSet("hazyresearch/based-swde-v2", keyed=True),
    "fda": RecallSet("hazyresearch/based-fda", keyed=True),
    "squad": RecallSet("hazyresearch/based-squad"),
    "triviaqa": RecallSet("hazyresearch/based_triviaqa", around_answer=False),
    "drop": RecallSet("hazyresearch/based_drop", around_answer=False),
    "nq": RecallSet("hazyresearch/based_nq_2048"),
}
"""In the order of Table 3 in "Memory Caching"."""
_MARKS = re.compile(r"\[(PAR|DOC|TLE)\]")
_SUMMARY = "Summary of information above"


def answers_of(document: Document) -> list[str]:
    """Return the answers of a document, of which one must be contained: those of a question, or a key's value."""
    if "answers" in document:
        return [str(answer).strip() for answer in document["answers"]]
    return [str(document["value"]).strip()]


def cut_context(text: str, answers: Sequence[str], around: bool, length: int, setting: Setting) -> str:
    """Return at most `length` - 50 tokens of a text: half of them before the first answer, or its beginning.

    The same tokens as in "Just read twice": the window begins half its length before the answer.
    """
    most = length - RESERVED
    tokens = setting.encode(text)
    if len(tokens) <= most:
        return text
    places = [found.start() for answer in answers if (found := re.search(re.escape(answer), text, re.IGNORECASE))]
    at = len(setting.encode(text[: min(places)])) if around and places else 0
    begin = max(at - most // 2, 0)
    return setting.decode(tokens[begin : begin + most])


def prompt_of(document: Document, form: RecallSet, length: int | None, setting: Setting) -> str:
    """Return what the model reads: the context, a full stop, and the beginning of the sentence that it ends."""
    answers = answers_of(document)
    if "context" in document:
        context, question = str(document["context"]).strip(), str(document["question"]).strip()
    elif form.keyed:
        context, question = str(document["text"]), f"{document['key']}:"
        context = context.split(_SUMMARY)[0]
        question = question[:1].upper() + question[1:]
    else:  # passage and cloze sentence in one
        text = str(document["text"]).strip()
        return text if length is None else cut_context(text, answers, form.around_answer, length, setting).strip()
    if length is not None:
        context = cut_context(context, answers, form.around_answer, length, setting)
    context = _MARKS.sub("", context).strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)].strip()
    return f"{context.strip('.')}. {question}"


def contains(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return 1 where a text contains one of the answers, whatever the case of letters."""
    text = results[0].lower()
    return {"contains": float(any(answer.lower() in text for answer in document["answers"]))}


def recall_task(name: str, line: str, length: int | None, setting: Setting) -> Task:
    """Open a data set's task: from `recall/NAME.jsonl` in the folder of data, else from the hub.

    Args:
        name: of the set.
        line: name of the task.
        length: tokens of a context; whole if None.
    Raises: DataError saying what to put where.
    """
    form, file = SETS[name], setting.data / FOLDER / f"{name}.jsonl"
    if file.is_file():
        documents = read_documents(file)
    else:
        documents = hub_documents(form.hub, "validation", name, f"put its documents, one JSON object a line, in {file}")
    asked = [
        {"prompt": prompt_of(document, form, length, setting), "answers": answers_of(document)}
        for document in documents[: setting.limit]
    ]
    return generated_task(line, asked, _FORM)


_FORM: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{answers[0]}}",
    "process_results": contains,
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
    "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
}


def _lines(setting: Setting) -> Sequence[SuiteTask]:
    """Return a line for each data set and length."""
    lengths: Sequence[int | None] = setting.lengths or RECALL.lengths
    lines = []
    for name in SETS:
        for length in lengths:
            line = f"{name}_{length}"
            lines.append(SuiteTask(line, "contains", partial(recall_task, name, line, length)))
    return lines


RECALL = Suite("recall", "in-context recall, contexts cut to so many tokens", _lines, lengths=(2048,), whole=True)
