"""BABILong: the sentences of a bAbI story, in their order, among those of a long book.

Kuratov et al., "BABILong: Testing the Limits of LLMs with Long Context Reasoning-in-a-Haystack", 2024, tasks qa1 to
qa5. Prompts, examples and scores are those of lm-eval's tasks `babilong_qa1` to `5`; stories are drawn here
(`babi.py`), and the book is what the folder of haystacks holds, where the paper takes PG-19.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megamem.data.tasks.ruler import split_sentences
from megamem.errors import DataError
from megamem.evaluation.suites.babi import STORIES, Story
from megamem.evaluation.suites.base import Document, Setting, Suite, SuiteTask, local_task
from megamem.evaluation.suites.ruler import largest, read_haystack

if TYPE_CHECKING:
    from lm_eval.api.task import Task

LENGTHS = (0, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of story and book; 0: the story alone."""
EXAMPLES = 100
"""Stories of each task and length, as in the paper's tables."""
SEED = 0


def documents(name: str, length: int, count: int, sentences: Sequence[str], setting: Setting) -> list[Document]:
    """Return stories hidden in a book, as lm-eval has them: `input`, `question` and `target`.

    Args:
        name: of bAbI's task.
        length: tokens of story and book; the story alone if 0.
        count: how many.
        sentences: those of the book, of which each story has a stretch.
    Raises: DataError where a story does not fit.
    """
    draws, found = random.Random(f"{SEED}-{name}-{length}"), []
    tokens = [len(setting.encode(f" {sentence}")) for sentence in sentences] if length else []
    for _ in range(count):
        story = STORIES[name](draws)
        text = hide(draws, story, sentences, tokens, length, setting) if length else " ".join(story.facts)
        found.append({"input": text, "question": story.question, "target": story.answer})
    return found


def hide(
    draws: random.Random, story: Story, sentences: Sequence[str], tokens: Sequence[int], length: int, setting: Setting
) -> str:
    """Return at most `length` tokens: a stretch of a book, as long as fits, with the story's sentences in it.

    tokens: those of each of the book's sentences, for a first guess. Raises DataError where the story does not fit.
    """
    facts, room = story.facts, length - len(setting.encode(" ".join(story.facts)))
    if room < 0:
        raise DataError(f"babilong: {length} tokens have no room for a story of {len(facts)} sentences")
    begin, total, most = draws.randrange(len(sentences)), 0, 0
    while most < len(sentences) and total <= room:
        total += tokens[(begin + most) % len(sentences)]
        most += 1
    few = 32
    most = min(most + few // 2, len(sentences))
    book = [sentences[(begin + index) % len(sentences)] for index in range(most)]
    at = sorted(draws.random() for _ in facts)

    def mixed(count: int) -> str:
        """Return so many sentences of the book with the facts between them."""
        parts, before = [], 0
        for place, fact in zip(at, facts, strict=True):
            here = round(place * count)
            parts += [*book[before:here], fact]
            before = here
        return " ".join([*parts, *book[before:count]])

    # sentences beside each other have about the tokens they have alone: only the last few are tried
    few = min(few, most)
    kept = most - few + largest(lambda more: len(setting.encode(mixed(most - few + more))) <= length, few)
    while kept and len(setting.encode(mixed(kept))) > length:
        kept = kept * 9 // 10
    return mixed(kept)


def story_task(name: str, line: str, length: int, setting: Setting) -> Task:
    """Make one of the tasks at one length."""
    count = EXAMPLES if setting.limit is None else min(EXAMPLES, setting.limit)
    sentences = split_sentences(" ".join(read_haystack(setting))) if length else []
    return local_task(
        f"babilong/babilong_{name}.yaml", line, {name: documents(name, length, count, sentences, setting)}
    )


def _lines(lengths: Sequence[int]) -> Sequence[SuiteTask]:
    """Return a line for each task and length."""
    lines = []
    for name in STORIES:
        for length in lengths:
            line = f"babilong_{name}_{length}"
            lines.append(SuiteTask(line, "acc", partial(story_task, name, line, length)))
    return lines


BABILONG = Suite("babilong", _lines, lengths=LENGTHS, whole=True)
