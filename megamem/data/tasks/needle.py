"""The task `niah`, a needle in a haystack: one sentence hidden in a long text, and the question for what it says.

Single-needle tasks of RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
2024), S-NIAH-1 to 3: the haystack is noise or text, the value a number or a UUID. The parts of an example are encoded
one by one, so that the haystack fills it to the token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from megamem.data.batch import IGNORED
from megamem.data.shard_store import ShardStore
from megamem.data.store import Int64
from megamem.data.tasks.base import TASKS, TaskConfig
from megamem.errors import DataError
from tokenization.tokenizer import Tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
DEPTHS = 40
"""Places a needle may have in a text, evenly spaced."""
LEAST_HAYSTACK = 32
"""Tokens of the shortest haystack; more than the longest key and value add to those that were drawn for the check."""
_ADJECTIVES = """
able ancient bitter blue bold brave bright broad calm careful cheap clean clever cold common cool curious damp dark
deep dry eager early easy empty fair famous fast fierce fine firm flat fond free fresh full gentle glad good grand
great green grey happy hard heavy high honest hot huge humble idle keen kind large late lazy light little lone long
loud low lucky mad mild narrow neat new noble odd old open pale plain polite poor proud pure quick quiet rare ready
red rich ripe rough round sad safe sharp short shy silent simple slow small smooth soft sour steady steep still
strange strong sweet swift tall tame thick thin tidy tiny true vast warm weak wet white wide wild wise young
"""
ADJECTIVES = _ADJECTIVES.split()
_NOUNS = """
anchor apple arrow barn basket bell bird blanket boat bone book bottle bowl branch bread bridge brook brush bucket
candle castle chain chair cherry circle clock cloud coat coin corner cradle crown cup desk door dragon drum eagle farm
feather fence field finger fire flag flower forest fork fox garden gate glass glove goat grain hammer harbor hat hill
honey horse house island jar judge key kettle king kite knife ladder lake lamp lantern leaf letter lion lock map
market meadow mirror moon mountain needle nest night oak ocean orchard owl paper path pear pencil piano pillow planet
pond potato queen rabbit rain ring river road robin roof rope rose sail salt school shadow sheep shell ship shoe spoon
spring star stone storm street sword table temple thread tiger tower train tree tunnel valley village violin wagon
wall water wheel whistle wind window winter wolf
"""
NOUNS = _NOUNS.split()


@TASKS.register
class NeedleConfig(TaskConfig):
    """Single-needle retrieval (S-NIAH): a number or a UUID hidden in noise or in text, predicted at the end."""

    kind: Literal["niah"] = "niah"
    """`niah`"""
    tokenizer: Path
    """Tokenizer folder; that of `haystack`."""
    haystack: str = "noise"
    """`noise`, one sentence again and again, or a folder of token shards whose texts hide the needle."""
    value: Literal["number", "uuid"] = "number"
    """What the needle says: seven digits, or a UUID."""
    length: PositiveInt = 1024
    """Tokens of an example."""
    supervise: Literal["answer", "all"] = "answer"
    """Which tokens are predicted: the answer's, or all."""
    examples: PositiveInt = 100_000
    """Examples of an epoch."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the examples."""

    def open(self) -> Needle:
        """See `TaskConfig.open`.

        Raises:
            DataError: a foreign haystack, one without a text long enough, or a length without room for one.
        """
        return Needle(self)


class Haystack:
    """Stretches of tokens to hide a needle in."""

    def __init__(self, config: NeedleConfig, tokenizer: Tokenizer) -> None:
        """Open the haystack that `config` names. Raises DataError where it does not fit the task."""
        self.noise: Int64 | None = None
        self.store: ShardStore | None = None
        if config.haystack == "noise":
            self.noise = tokenizer.encode(NOISE)
            self.fingerprint = "noise"
            return
        self.store = ShardStore(config.haystack)
        if self.store.tokenizer_hash != tokenizer.hash:
            raise DataError(f"{config.haystack}: not written with the tokenizer of {config.tokenizer}")
        self.documents = np.flatnonzero(self.store.lengths > config.length)
        if not len(self.documents):
            raise DataError(f"{config.haystack}: no document is longer than length {config.length}")
        self.fingerprint = self.store.fingerprint
        stops = [".", ".\n", "\n", '."']
        self.ends = np.unique([token[-1] for stop in stops if len(token := tokenizer.encode(stop))])

    def draw(self, generator: np.random.Generator, tokens: int) -> tuple[Int64, int]:
        """Return so many tokens, and the number of the one that the needle precedes.

        The needle stands between two lines of noise, or at the end of a sentence.
        """
        if self.noise is not None:
            text = np.resize(self.noise, tokens)
            lines = tokens // len(self.noise)
            return text, int(generator.integers(lines + 1)) * len(self.noise)
        assert self.store is not None
        document = int(generator.choice(self.documents))
        start = int(generator.integers(self.store.lengths[document] - tokens))
        text = self.store.tokens(document, start, start + tokens)
        depth = round(tokens * int(generator.integers(DEPTHS)) / (DEPTHS - 1))
        borders = np.flatnonzero(np.isin(text, self.ends)) + 1
        before = borders[borders <= depth]
        return text, int(before[-1]) if len(before) else 0


class Needle:
    """Makes examples of S-NIAH."""

    def __init__(self, config: NeedleConfig) -> None:
        """Open tokenizer and haystack, and check that examples have room for one. Raises DataError."""
        self.config = config
        self.tokenizer = Tokenizer.load(config.tokenizer)
        self.haystack = Haystack(config, self.tokenizer)
        self.fingerprint = f"niah-1 {self.tokenizer.hash} {self.haystack.fingerprint}"
        self.vocab_size = self.tokenizer.vocab_size
        self.tokenizer_hash: str | None = self.tokenizer.hash
        generator = np.random.default_rng(0)
        longest = max(sum(map(len, self._framing(generator))) for _ in range(64)) - 1
        if config.length < longest + LEAST_HAYSTACK:
            raise DataError(
                f"length {config.length} has no room for a haystack: needle, question and answer alone take "
                f"{longest} tokens with {config.tokenizer}; at least {longest + LEAST_HAYSTACK}"
            )

    def make(self, generator: np.random.Generator) -> tuple[Int64, Int64]:
        """See `Task.make`."""
        opening, needle, question, answer = self._framing(generator)
        # the last token of the answer is predicted and not read
        room = self.config.length + 1 - sum(map(len, (opening, needle, question, answer)))
        text, depth = self.haystack.draw(generator, room)
        whole = np.concatenate((opening, text[:depth], needle, text[depth:], question, answer))
        labels = whole[1:].copy()
        if self.config.supervise == "answer":
            labels[: -len(answer)] = IGNORED
        return whole[:-1], labels

    def _framing(self, generator: np.random.Generator) -> tuple[Int64, Int64, Int64, Int64]:
        """Return the tokens of what surrounds the haystack: opening, needle, question, answer."""
        key = f"{generator.choice(ADJECTIVES)}-{generator.choice(NOUNS)}"
        value, kind = self._value(generator), self.config.value
        opening = self.tokenizer.encode(
            f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.\n"
        )
        needle = self.tokenizer.encode(f" One of the special magic {kind}s for {key} is: {value}. ")
        question = self.tokenizer.encode(
            f"\nWhat is the special magic {kind} for {key} mentioned in the provided text? "
            f"The special magic {kind} for {key} mentioned in the provided text is"
        )
        answer = self.tokenizer.encode(f" {value}")
        return opening, needle, question, answer

    def _value(self, generator: np.random.Generator) -> str:
        """Draw what the needle says."""
        if self.config.value == "number":
            return str(generator.integers(1_000_000, 10_000_000))
        digits = "".join(f"{byte:02x}" for byte in generator.bytes(16))
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
