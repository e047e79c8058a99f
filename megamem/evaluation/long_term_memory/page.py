"""The page of an analysis: the text, shaded by attention and by memory space, in one file without scripts."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from megamem.evaluation.long_term_memory.analysis import Analysis, LayerAnalysis
from megamem.evaluation.long_term_memory.cells import Float64
from megamem.evaluation.long_term_memory.words import Word, clean

ATTENTION_COLOR, SPACE_COLOR = "221, 107, 32", "43, 108, 176"
LARGEST = 20
"""Words in the table of the largest memory space."""


@dataclass(frozen=True)
class Part:
    """A chunk of the text, each word as HTML."""

    title: str
    words: Sequence[Markup]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    word: str
    token: int
    space: str
    equal: str


@dataclass(frozen=True)
class Picture:
    """A picture inside the page."""

    text: str
    data: str
    """PNG in base64."""


def render(analysis: Analysis, layer: LayerAnalysis, threshold: float, pictures: Sequence[tuple[str, bytes]]) -> str:
    """Return the page.

    Args:
        analysis: of all layers.
        layer: the one that is shown.
        threshold: share of the attention from which on a word is shaded.
        pictures: what each shows, and its PNG.
    """
    template = files("megamem.evaluation.long_term_memory").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    beyond = layer.attention > threshold
    most = float(layer.attention.max())
    names = [word.text for word in layer.attended]
    summary = f"They are {int(beyond.sum()):,} of {len(beyond):,}; "
    summary += f"the most, {most:.3f}, gets “{names[int(layer.attention.argmax())].strip()}”."
    return environment.from_string(template).render(
        title=f"Long-term memory of {layer.title}",
        document=clean(analysis.document),
        tokens=f"{analysis.words[-1].end:,}",
        chunk=layer.chunk,
        layer=layer.title,
        predicted=f"{layer.predicted:,}",
        threshold=f"{threshold:g}",
        summary=summary,
        attended=list(
            _parts(layer.attended, layer.attention, "the attention", layer.chunk, ATTENTION_COLOR, threshold)
        ),
        context=list(_context(analysis, layer)),
        spaces=list(_parts(layer.remembered, layer.space, "the memory", layer.chunk, SPACE_COLOR, 0.0)),
        largest=list(_largest(layer)),
        pictures=[Picture(text, b64encode(data).decode("ascii")) for text, data in pictures],
    )


def _parts(
    words: Sequence[Word], shares: Float64, whole: str, chunk: int, color: str, threshold: float
) -> Iterator[Part]:
    """Yield the words in a memory chunk by chunk, those whose shares [words] of the whole are large enough shaded."""
    most = max(float(shares.max()), 1e-300)
    first = words[0].begin // chunk
    for number in range(first, -(-words[-1].end // chunk)):
        inside = [
            _word(word, float(share), float(share) / most if share > threshold else 0.0, color)
            for word, share in zip(words, shares, strict=True)
            if word.begin // chunk == number
        ]
        total = sum(float(s) for w, s in zip(words, shares, strict=True) if w.begin // chunk == number)
        yield Part(f"chunk {number}: {total:.3f} of {whole}", inside)


def _word(word: Word, share: float, strength: float, color: str) -> Markup:
    """Return a word as HTML, shaded by `strength` from 0 to 1; white space around it is not shaded."""
    text = word.text
    bare = text.strip()
    if not strength or not bare:
        return escape(text)
    before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    shaded = Markup('{}<span style="background: rgba({}, {:.2f})" title="{:.4f}">{}</span>{}')
    return shaded.format(before, Markup(color), 0.1 + 0.7 * strength, share, bare, after)


def _context(analysis: Analysis, layer: LayerAnalysis) -> Iterator[Markup]:
    """Yield what stands between the memory and the predicted token, and the word of that token, marked."""
    end = layer.attended[-1].end
    for word in analysis.words:
        text, marked = word.text, word.begin <= layer.predicted < word.end
        if word.begin > layer.predicted or (word.begin < end and not marked):
            continue
        if marked:
            before = text[: len(text) - len(text.lstrip())]
            yield Markup('{}<span class="predicted">{}</span>').format(before, text.lstrip())
        else:
            yield escape(text)


def _largest(layer: LayerAnalysis) -> Iterator[Row]:
    """Yield the words with the largest memory space."""
    for index in np.argsort(layer.space)[::-1][:LARGEST]:
        word = layer.remembered[index]
        yield Row(word.text.strip(), word.begin, f"{layer.space[index]:.4f}", f"{layer.equal_space[index]:.4f}")
