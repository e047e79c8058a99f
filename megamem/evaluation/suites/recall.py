"""The suite of in-context recall: a passage, then the beginning of a sentence that only the passage can end.

Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff", 2024 (SWDE, FDA, SQuAD),
and "Just read twice: closing the recall gap for recurrent language models", 2024 (Natural Questions, TriviaQA, DROP).
The model writes on greedily up to a line's end, 48 tokens at most, and is right where its text contains an answer,
whatever the case of letters. Contexts are cut to a number of tokens around what is asked about, as in the second
paper; in DROP and TriviaQA, behind their beginning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megamem.errors import DataError
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
    cloze: bool = False
    """Whether the published documents have passage and cloze sentence in `text`, besides a plain question."""


SETS = {
    "swde": RecallSet("hazyresearch/based-swde-v2", keyed=True),
    "fda": RecallSet("hazyresearch/based-fda", keyed=True),
    "squad": RecallSet("hazyresearch/based-squad", cloze=True),
    "triviaqa": RecallSet("hazyresearch/based_triviaqa", around_answer=False),
    "drop": RecallSet("hazyresearch/based_drop", around_answer=False),
    "nq": RecallSet("hazyresearch/based_nq_2048"),
}
"""In the order of Table 3 in "Memory Caching"."""
_MARKS = re.compile(r"\[(PAR|DOC|TLE)\]")
_SUMMARY = "Summary of information above"


def answers_of(document: Document) -> list[str]:
    """Return the answers of a document, of which one must be contained: those of a question, or a key's value.

    Raises: DataError where `answers` is no list: letters of a text would count as answers.
    """
    answers = document["answers"] if "answers" in document else [document["value"]]
    if not isinstance(answers, list):
        raise DataError(f"answers: {str(answers)[:60]!r} is no list of texts")
    return [answer for answer in (str(each).strip() for each in answers) if answer]


def cut_context(text: str, places: Sequence[int], around: bool, length: int, setting: Setting) -> str:
    """Return at most `length` - 50 tokens of a text.

    The same tokens as in "Just read twice": half of them before the place that is asked about, and the text's end where
    that is not known; or the text's beginning.

    Args:
        text: the context.
        places: characters at which what is asked about begins, of which the first counts.
        around: whether half of the tokens are from before that place; the text's beginning if not.
        length: tokens of the context and of what is written behind it.
        setting: whose tokenizer counts.
    """
    most = length - RESERVED
    tokens = setting.encode(text)
    if len(tokens) <= most:
        return text
    if not around:
        return setting.decode(tokens[:most])
    if not places:
        return setting.decode(tokens[-most:])
    begin = max(len(setting.encode(text[: min(places)])) - most // 2, 0)
    return setting.decode(tokens[begin : begin + most])


def places_of(document: Document, text: str, form: RecallSet) -> list[int]:
    """Return where in a text what a document asks about begins: its key or value, or the first answer that it holds."""
    wanted = [str(document["key"])] if form.keyed and "key" in document else []
    found = [re.search(re.escape(word), text, re.IGNORECASE) for word in (*wanted, *answers_of(document))]
    places = [match.start() for match in found if match]
    return places if form.keyed else places[:1]


def prompt_of(document: Document, form: RecallSet, length: int, setting: Setting) -> str:
    """Return what the model reads: the context, a full stop, and the beginning of the sentence that it ends.

    A question that begins with the end of a line stands on lines of its own.
    """
    if "context" in document and not (form.cloze and "text" in document):
        context, question = str(document["context"]).strip(), str(document["question"]).rstrip()
    elif form.keyed:
        context, question = str(document["text"]), f"{document['key']}:"
        context = context.split(_SUMMARY)[0]
        question = question[:1].upper() + question[1:]
    else:  # passage and cloze sentence in one
        context, question = str(document["text"]).strip(), None
    context = cut_context(context, places_of(document, context, form), form.around_answer, length, setting)
    if question is None:
        return context.strip()
    context = _MARKS.sub("", context).strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)].strip()
    return context + question if question.startswith("\n") else f"{context.strip('.')}. {question.strip()}"


def contains(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return 1 where a text contains one of the answers, whatever the case of letters."""
    text = results[0].lower()
    return {"contains": float(any(answer.lower() in text for answer in document["answers"]))}


def _can_be_asked(document: Document, form: RecallSet) -> bool:
    """Return whether a document has an answer; keys and their values need two letters, as in "Just read twice"."""
    least = 2 if form.keyed else 1
    words = [*answers_of(document), *([str(document["key"])] if "key" in document else [])]
    return bool(answers_of(document)) and all(len(word) >= least for word in words)


def recall_task(name: str, line: str, length: int, setting: Setting) -> Task:
    """Open a data set's task: from `recall/NAME.jsonl` in the folder of data, else from the hub.

    Args:
        name: of the set.
        line: name of the task.
        length: tokens of a context and of what is written behind it.
    Raises: DataError saying what to put where, or which field a document lacks.
    """
    form, file = SETS[name], setting.data / FOLDER / f"{name}.jsonl"
    if length <= RESERVED:
        raise DataError(
            f"recall: {length} tokens have no room for a context; give --lengths, or evaluation.tasks.lengths, above "
            f"{RESERVED}"
        )
    if file.is_file():
        documents = read_documents(file)
    else:
        documents = hub_documents(form.hub, "validation", name, f"put its documents, one JSON object a line, in {file}")
    try:
        asked = [
            {"prompt": prompt_of(document, form, length, setting), "answers": answers_of(document)}
            for document in [each for each in documents if _can_be_asked(each, form)][: setting.limit]
        ]
    except (KeyError, DataError) as error:
        what = f"a document without {error}" if isinstance(error, KeyError) else error
        raise DataError(f"{name}: {file if file.is_file() else form.hub}: {what}") from None
    if not asked:
        raise DataError(f"{name}: {file if file.is_file() else form.hub}: no document has an answer to ask for")
    return generated_task(line, asked, _FORM)


_FORM: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{answers[0]}}",
    "process_results": contains,
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
    "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
}


def _lines(lengths: Sequence[int]) -> Sequence[SuiteTask]:
    """Return a line for each data set and length."""
    lines = []
    for name in SETS:
        for length in lengths:
            line = f"{name}_{length}"
            lines.append(SuiteTask(line, "contains", partial(recall_task, name, line, length)))
    return lines


RECALL = Suite("recall", _lines, lengths=(2048,), whole=True, repeats=True)
