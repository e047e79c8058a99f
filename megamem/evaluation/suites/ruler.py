"""RULER's retrieval tasks: needles in noise, in text, or among needles, at contexts of 4K to 128K tokens.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024. Prompts, sizes and
scores are those of lm-eval's tasks of the same names: the same draws give the same text, as a test asserts, but for the
lists of keys and the ends of sentences (`megamem/data/tasks/ruler.py`) and the text in the place of its essays. Each
length is a task of its own, so that there is no figure where nothing was asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from megamem.data.tasks.ruler import DEPTHS, KEYS, NOISE, draw_value, split_sentences
from megamem.errors import DataError
from megamem.evaluation.suites.base import Document, Setting, Suite, SuiteTask, generated_task, one_line

if TYPE_CHECKING:
    from lm_eval.api.task import Task

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
EXAMPLES = 500
NEW_TOKENS = 128
SEED = 42
"""RULER's own."""
HAYSTACK = "haystack"
"""Folder of texts below `Setting.data`."""


@dataclass(frozen=True)
class NeedleForm:
    """One of RULER's retrieval tasks."""

    haystack: Literal["noise", "text", "needles"]
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    """Keys that stand in the text."""
    values: int = 1
    """Values of each key."""
    queries: int = 1
    """Keys that are asked for."""


FORMS = {
    "niah_single_1": NeedleForm("noise"),
    "niah_single_2": NeedleForm("text"),
    "niah_single_3": NeedleForm("text", value="uuid"),
    "niah_multikey_1": NeedleForm("text", keys=4),
    "niah_multikey_2": NeedleForm("needles"),
    "niah_multikey_3": NeedleForm("needles", key="uuid", value="uuid"),
    "niah_multivalue": NeedleForm("text", values=4),
    "niah_multiquery": NeedleForm("text", keys=4, queries=4),
}
"""By lm-eval's names."""


def write_needles(draws: random.Random, form: NeedleForm, units: int, words: Sequence[str]) -> Document:
    """Return an example: `prompt` up to the answer, `question` (its last part) and `answers`.

    Args:
        draws: what is random, in RULER's order.
        form: which task it is.
        units: words of text, or lines of noise or of needles.
        words: those of the text.
    """
    keys, values, needles = [], [], []
    for _ in range(form.keys):
        keys.append(draws.choice(KEYS) if form.key == "word" else draw_value(draws, "uuid"))
        values.append([draw_value(draws, form.value) for _ in range(form.values)])
        needles += [needle(form, keys[-1], value) for value in values[-1]]
    random.Random(SEED).shuffle(needles)
    context = _hide(draws, form, needles, units, words)
    asked = draws.sample(range(form.keys), form.queries)
    names = [keys[index] for index in asked]
    query = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
    one = form.queries * form.values == 1
    kind = form.value if one else f"{form.value}s"
    some, are, what = ("A", "is", "What is") if one else ("Some", "are", "What are all")
    prompt = (
        f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n{context}\n"
        f"{what} the special magic {kind} for {query} mentioned in the provided text?"
    )
    begun = f"The special magic {kind} for {query} mentioned in the provided text {are}"
    return {"prompt": prompt, "question": begun, "answers": [value for index in asked for value in values[index]]}


def needle(form: NeedleForm, key: str, value: str) -> str:
    """Return the sentence that says a key's value."""
    return f"One of the special magic {form.value}s for {key} is: {value}."


def _hide(draws: random.Random, form: NeedleForm, needles: Sequence[str], units: int, words: Sequence[str]) -> str:
    """Return the haystack with the needles in it."""
    if form.haystack == "text":
        sentences = _sentences(tuple(words[:units]))
        places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in draws.sample(DEPTHS, len(needles)))]
        parts = []
        for before, place, each in zip(places, places[1:], needles, strict=False):
            parts += [" ".join(sentences[before:place]), each]
        return " ".join([*parts, " ".join(sentences[places[-1] :])])
    lines = [NOISE] * units
    if form.haystack == "needles":
        for index in range(units):
            key = draws.choice(KEYS) if form.key == "word" else draw_value(draws, "uuid")
            lines[index] = needle(form, key, draw_value(draws, form.value))
    for index, each in zip(sorted(draws.sample(range(units), len(needles)), reverse=True), needles, strict=True):
        lines.insert(index, each)
    return "\n".join(lines)


@cache
def _sentences(words: tuple[str, ...]) -> list[str]:
    """Return the sentences of a text that is the same in all examples of a length."""
    return split_sentences(" ".join(words))


def examples(form: NeedleForm, length: int, count: int, words: Sequence[str], setting: Setting) -> list[Document]:
    """Return examples of at most `length` tokens, 128 of them left for the answer.

    The haystack is as large as fits in steps of RULER's: 500 words, or 25 lines (5 below 4,096 tokens).

    Raises: DataError for a length without room.
    """
    step = 500 if form.haystack == "text" else 25 if length >= 4096 else 5
    needles = form.keys * form.values

    def tokens(document: Document) -> int:
        """Return how many tokens an example needs."""
        return len(setting.encode(document["prompt"])) + NEW_TOKENS

    def fits(steps: int) -> bool:
        """Return whether a haystack of so many steps fits in."""
        document = write_needles(random.Random(SEED), form, steps * step, words)
        more = len(setting.encode(" ".join(document["answers"])))
        return tokens(document) + more <= length

    most = -(-len(words) // step) if form.haystack == "text" else length // step
    units = max(largest(fits, most) * step, needles)
    draws, found = random.Random(SEED), []
    for _ in range(count):
        used, document = units, write_needles(draws, form, units, words)
        while tokens(document) > length:
            used -= step
            if used < needles:
                raise DataError(
                    f"ruler: {length} tokens have no room for a haystack; give a larger --lengths, or "
                    "evaluation.tasks.lengths"
                )
            document = write_needles(draws, form, used, words)
        found.append(document)
    return found


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that fits, 0 if none does; numbers below one that fits fit too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def read_haystack(setting: Setting) -> list[str]:
    """Return the words of the texts in the folder `haystack`. Raises DataError saying what to put there."""
    folder = setting.data / HAYSTACK
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise DataError(
            f"haystack: no texts to hide needles or stories in; put them as *.txt in {folder} "
            f"(`megamem tasks fetch {setting.data}` puts a novel there; RULER takes Paul Graham's essays)"
        )
    words: list[str] = []
    for file in files:
        try:
            words += file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read as UTF-8 text ({one_line(error)})") from None
    return words


def score(document: Document, results: Sequence[str]) -> dict[str, float]:
    """Return the share of answers that the text contains, whatever the case of letters."""
    text = results[0].lower()
    found = [answer.lower() in text for answer in document["answers"]]
    return {"contains": sum(found) / len(found)}


def needle_task(name: str, line: str, length: int, setting: Setting) -> Task:
    """Make one of RULER's tasks at one length."""
    form = FORMS[name]
    words = read_haystack(setting) if form.haystack == "text" else []
    count = EXAMPLES if setting.limit is None else min(EXAMPLES, setting.limit)
    return generated_task(line, examples(form, length, count, words, setting), FORM)


FORM: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}} {{question}}",
    "doc_to_target": "{{answers}}",
    "process_results": score,
    "generation_kwargs": {"until": [], "max_gen_toks": NEW_TOKENS, "do_sample": False},
    "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
}


def _lines(lengths: Sequence[int]) -> Sequence[SuiteTask]:
    """Return a line for each task and length."""
    lines = []
    for name in FORMS:
        for length in lengths:
            line = f"{name}_{length}"
            lines.append(SuiteTask(line, "contains", partial(needle_task, name, line, length)))
    return lines


RULER = Suite("ruler", _lines, lengths=LENGTHS, whole=True, repeats=True)
