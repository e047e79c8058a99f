"""The text of RULER's single-needle tasks, S-NIAH-1 to 3, from given random draws.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024. The sentences, their
places and the order of the draws are those of RULER's generator, which lm-eval's tasks `niah_single_1` to `3` contain:
the same draws give the same text. Two lists differ: keys are made of words of our own, and sentences end by a rule.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Literal
from uuid import UUID

Value = Literal["number", "uuid"]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""A line of noise."""
DEPTHS = [round(100 * place / 39) for place in range(40)]
"""Places that a needle may have in a text, in percent of its sentences."""
_SENTENCE = re.compile(r"""\S.*?(?:[.!?]["'”’)\]]*(?=\s|$)|$)""", re.DOTALL)
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
KEYS = sorted(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)
"""What a needle may be asked for by."""
Hide = Callable[[random.Random, str], str]
"""Hides a needle in a haystack: takes the draws and the needle, returns the whole text."""


def write_example(draws: random.Random, value: Value, hide: Hide) -> tuple[str, str]:
    """Return the prompt of an example, up to the answer, and the answer without the space before it.

    Args:
        draws: what is random; key, value and place are drawn in this order.
        value: what the needle says.
        hide: puts the needle into the haystack.
    """
    key = draws.choice(KEYS)
    answer = draw_value(draws, value)
    context = hide(draws, f"One of the special magic {value}s for {key} is: {answer}.")
    return (
        f"A special magic {value} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {value} afterwards.\n{context}\n"
        f"What is the special magic {value} for {key} mentioned in the provided text? "
        f"The special magic {value} for {key} mentioned in the provided text is"
    ), answer


def draw_value(draws: random.Random, value: Value) -> str:
    """Draw a number of seven digits or a UUID of version 4."""
    if value == "number":
        return str(draws.randint(10**6, 10**7 - 1))
    return str(UUID(int=draws.getrandbits(128), version=4))


def hide_in_noise(draws: random.Random, needle: str, lines: int) -> str:
    """Return so many lines of noise with the needle on a line of its own before one of them, drawn evenly."""
    text = [NOISE] * lines
    text.insert(draws.sample(range(lines), 1)[0], needle)
    return "\n".join(text)


def hide_in_text(draws: random.Random, needle: str, words: Sequence[str]) -> str:
    """Return the words of a text with the needle between two of its sentences, at one of `DEPTHS`."""
    sentences = split_sentences(" ".join(words))
    place = int(len(sentences) * (draws.sample(DEPTHS, 1)[0] / 100))
    return " ".join((" ".join(sentences[:place]), needle, " ".join(sentences[place:])))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, without the space between them.

    A sentence ends with a full stop, exclamation or question mark, closing quotes and brackets included, before a
    space. RULER asks NLTK's trained splitter, which knows abbreviations and has to be fetched.
    """
    return _SENTENCE.findall(text)
