"""The task `niah`, a needle in a haystack: one sentence hidden in a long text, and the question for what it says.

Single-needle tasks of RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
2024), S-NIAH-1 to 3: the haystack is noise or text, the value a number or a UUID. `ruler.py` writes the text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from megamem.data.batch import IGNORED
from megamem.data.shard_store import ShardStore
from megamem.data.store import Int64
from megamem.data.tasks.base import TASKS, TaskConfig
from megamem.data.tasks.ruler import Hide, Value, hide_in_noise, hide_in_text, write_example
from megamem.errors import DataError
from tokenization.tokenizer import Tokenizer

MARGIN = 32
"""Tokens by which an example may be longer than the longest of those that are drawn to check that `length` has room."""


@TASKS.register
class NeedleConfig(TaskConfig):
    """Single-needle retrieval (S-NIAH): a number or a UUID hidden in noise or in text, predicted at the end."""

    kind: Literal["niah"] = "niah"
    """`niah`"""
    tokenizer: Path
    """Tokenizer folder; that of `haystack`."""
    haystack: str = "noise"
    """`noise`, one line again and again, or a folder of token shards whose texts hide the needle."""
    start: Literal["first", "random"] = "first"
    """Where a text begins: with the folder's `first` document in every example, as in RULER, or at a `random` place \
    of a random document, so that models trained on the task read many texts. The next documents follow."""
    value: Value = "number"
    """What the needle says: seven digits, or a UUID."""
    length: PositiveInt = 1024
    """Tokens of an example: as many lines of noise or words of text as fit, and padding behind the answer."""
    supervise: Literal["answer", "all"] = "answer"
    """Which tokens are predicted: the answer's, or all."""
    examples: PositiveInt = 100_000
    """Examples of an epoch."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the examples."""

    def open(self) -> Needle:
        """See `TaskConfig.open`.

        Raises:
            DataError: a foreign haystack, one that is too short, or a length without room for one.
        """
        return Needle(self)


class Noise:
    """A haystack of lines that are all the same."""

    fingerprint = "noise"

    def __init__(self, length: int) -> None:
        """Take the tokens of an example, which bound its lines."""
        self.length = length

    def draw(self, generator: np.random.Generator) -> tuple[int, Callable[[int], Hide]]:
        """See `Text.draw`. Nothing is drawn: noise is always the same."""
        return self.length, lambda units: partial(hide_in_noise, lines=units)


class Text:
    """A haystack of words from the documents of token shards."""

    def __init__(self, config: NeedleConfig, tokenizer: Tokenizer) -> None:
        """Open the shards that `config` names. Raises DataError where they do not fit the task."""
        self.config = config
        self.tokenizer = tokenizer
        self.store = ShardStore(config.haystack)
        if self.store.tokenizer_hash != tokenizer.hash:
            raise DataError(f"{config.haystack}: not written with the tokenizer of {config.tokenizer}")
        if (tokens := int(self.store.lengths.sum())) <= config.length:
            raise DataError(f"{config.haystack}: holds {tokens} tokens, too few for length {config.length}")
        self.fingerprint = self.store.fingerprint

    def draw(self, generator: np.random.Generator) -> tuple[int, Callable[[int], Hide]]:
        """Return how many units of haystack there are, and what hides a needle in so many of the first of them."""
        words = self._first_words if self.config.start == "first" else self._random_words(generator)
        return len(words), lambda units: partial(hide_in_text, words=words[:units])

    @cached_property
    def _first_words(self) -> list[str]:
        return self._words(0, 0)

    def _random_words(self, generator: np.random.Generator) -> list[str]:
        document = int(generator.integers(len(self.store)))
        # a text may begin within a word, which is left out
        return self._words(document, int(generator.integers(self.store.lengths[document])))[1:]

    def _words(self, document: int, start: int) -> list[str]:
        """Return the words of the text that begins at a token of a document, more than an example has room for.

        They are read from twice as many tokens as an example has: white space between words becomes one space, which
        may save a token for each. Where all documents together hold less, there are fewer words.
        """
        words: list[str] = []
        tokens = 2 * self.config.length
        for number in range(len(self.store)):
            following = (document + number) % len(self.store)
            stop = min(int(self.store.lengths[following]), start + tokens)
            words += self.tokenizer.decode(self.store.tokens(following, start, stop)).split()
            tokens -= stop - start
            start = 0
            if tokens == 0:
                break
        return words


class Needle:
    """Makes examples of S-NIAH."""

    def __init__(self, config: NeedleConfig) -> None:
        """Open tokenizer and haystack, and check that examples have room for one. Raises DataError."""
        self.config = config
        self.tokenizer = Tokenizer.load(config.tokenizer)
        noise = config.haystack == "noise"
        self.haystack = Noise(config.length) if noise else Text(config, self.tokenizer)
        self.fingerprint = f"niah-2 {self.tokenizer.hash} {self.haystack.fingerprint}"
        self.vocab_size = self.tokenizer.vocab_size
        self.tokenizer_hash: str | None = self.tokenizer.hash
        _, hide = self.haystack.draw(np.random.default_rng(0))
        # the last token of an answer is predicted and not read
        longest = max(sum(map(len, self._encode(random.Random(draw), hide(1)))) for draw in range(64)) - 1
        if config.length < longest + MARGIN:
            raise DataError(
                f"length {config.length} has no room for a haystack: with its shortest one an example takes {longest} "
                f"tokens with {config.tokenizer}; at least {longest + MARGIN}"
            )

    def make(self, generator: np.random.Generator) -> tuple[Int64, Int64]:
        """See `Task.make`."""
        seed = int.from_bytes(generator.bytes(16), "little")
        units, hide = self.haystack.draw(generator)

        def encode(used: int) -> tuple[Int64, Int64]:
            return self._encode(random.Random(seed), hide(used))

        room = self.config.length + 1
        prompt, answer = encode(most_that_fit(lambda used: sum(map(len, encode(used))), room, units))
        whole = np.full(room, self.tokenizer.eos_id)
        labels = np.full(room, IGNORED)
        end = len(prompt) + len(answer)
        whole[:end] = np.concatenate((prompt, answer))
        predicted = len(prompt) if self.config.supervise == "answer" else 0
        labels[predicted:end] = whole[predicted:end]
        return whole[:-1], labels[1:]

    def _encode(self, draws: random.Random, hide: Hide) -> tuple[Int64, Int64]:
        """Return the tokens of prompt and answer, encoded apart: a model that is asked reads the prompt alone."""
        prompt, answer = write_example(draws, self.config.value, hide)
        return self.tokenizer.encode(prompt), self.tokenizer.encode(f" {answer}")


def most_that_fit(tokens_of: Callable[[int], int], room: int, most: int) -> int:
    """Return a number of haystack units that fits and to which no further one can be added, from 1 to `most`.

    Tokens grow nearly in proportion to units: after doubling, false position needs a few tries where halving
    intervals would need ten.

    Args:
        tokens_of: tokens of an example with so many units.
        room: tokens that there may be; one unit fits.
        most: units that there are.
    """
    low, fit = 1, tokens_of(1)
    while True:
        if low == most:
            return low
        high = min(2 * low, most)
        above = tokens_of(high)
        if above > room:
            break
        low, fit = high, above
    while high - low > 1:
        between = low + (room - fit) * (high - low) // (above - fit)
        between = min(max(between, low + 1), high - 1)
        tokens = tokens_of(between)
        if tokens <= room:
            low, fit = between, tokens
        else:
            high, above = between, tokens
    return low
