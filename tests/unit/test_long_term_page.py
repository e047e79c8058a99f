"""The files of an analysis: a page that is well formed whatever the text says, numbers, pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from megamem.errors import DataError
from megamem.evaluation.long_term_memory.analysis import Analysis, LayerAnalysis
from megamem.evaluation.long_term_memory.attention import BINS, Histogram
from megamem.evaluation.long_term_memory.page import render
from megamem.evaluation.long_term_memory.picture import draw_memory_space
from megamem.evaluation.long_term_memory.report import write_analysis
from megamem.evaluation.long_term_memory.words import Word

HOSTILE = ["<b>bold", " &amp;", ' "quoted"', " '{{ x }}'", "\n</div>", " nul\x00\x1b", " lone\ud800", " $a^$", " ]]>"]


def analysis_of(texts: Sequence[str], sticky: str = "random") -> tuple[Analysis, LayerAnalysis]:
    """Each text is a word of one token; two chunks of four tokens are in the memory, and the ninth is predicted."""
    words = tuple(Word(number, number + 1, text) for number, text in enumerate(texts))
    shares = np.array([0.3, 0.05, 0.1, 0.02, 0.2, 0.2, 0.06, 0.07])
    layer = LayerAnalysis(
        name="layers.1.mixer",
        title="layer 1",
        sticky=sticky,
        chunk=4,
        histogram=Histogram(np.linspace(0.5, 1.5, BINS), 0.01, (0.5,), 4),
        predicted=8,
        attended=words[:8],
        attention=shares,
        remembered=words[:8],
        space=shares[::-1].copy(),
        equal_space=np.full(8, 0.125),
        borders=(4,),
    )
    return Analysis(1, "a <document> & more", words, (layer,)), layer


def parsed(page: str) -> ElementTree.Element:
    """The page as a tree. Raises where a tag is not closed or a character not allowed."""
    assert page.startswith("<!doctype html>\n")
    return ElementTree.fromstring(page.removeprefix("<!doctype html>\n"))


def test_the_page_is_well_formed_and_says_what_the_text_says() -> None:
    tree = parsed(render(*analysis_of(HOSTILE), 0.05, [("a <picture>", b"PNG")]))
    attended, _, now, *spaces = tree.findall(".//div")
    assert "".join(attended.itertext()) == "".join(HOSTILE[:4])
    assert "".join(now.itertext()) == " ]]>"
    assert now.find("span").get("class") == "predicted"
    assert "".join(spaces[1].itertext()) == "\n</div> nul\ufffd\ufffd lone\ufffd $a^$"
    assert tree.findtext(".//p") == "a <document> & more: 9 tokens, read in chunks of 4."
    assert tree.find(".//img").get("src") == "data:image/png;base64,UE5H"
    assert tree.find(".//img").get("alt") == "a <picture>"


def test_nothing_is_fetched_or_run() -> None:
    tree = parsed(render(*analysis_of(HOSTILE), 0.05, []))
    assert not tree.findall(".//script")
    assert not tree.findall(".//link")
    policy = next(m.get("content") for m in tree.iter("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_words_beyond_the_threshold_are_shaded_and_no_others() -> None:
    texts = [f" word{number}" for number in range(9)]
    tree = parsed(render(*analysis_of(texts), 0.06, []))
    first, second, _, *spaces = tree.findall(".//div")
    shaded = {span.text: span.get("style") for part in (first, second) for span in part.findall("span")}
    assert list(shaded) == ["word0", "word2", "word4", "word5", "word7"]
    # from 0.1 to 0.8, in proportion to the largest
    assert shaded["word0"].endswith(", 0.80)")
    assert shaded["word2"].endswith(f", {0.1 + 0.7 / 3:.2f})")
    assert "They are 5 of 8; the most, 0.300, gets “word0”." in tree.findall(".//p")[1].text
    assert len(spaces[0].findall("span")) == 4
    rows = [[cell.text for cell in row] for row in tree.findall(".//tr")][1:]
    assert rows[0] == ["word7", "7", "0.3000", "0.1250"]
    assert [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)


@pytest.mark.parametrize("sticky", ["none", "random"])
def test_all_files_are_written(tmp_path: Path, sticky: str) -> None:
    analysis, layer = analysis_of([f" ${word}" for word in "abcdefghi"], sticky)
    write_analysis(tmp_path / "new" / "out", analysis, layer, 0.05)
    folder = tmp_path / "new" / "out"
    assert {path.name for path in folder.iterdir()} == {
        "attention.png", "long_term_memory.json", "memory_space.png", "words.html",
    }  # fmt: skip
    written = json.loads((folder / "long_term_memory.json").read_text())["layers"][0]
    assert written["memory_space"]["space"] == layer.space.tolist()
    assert written["attention"]["words"][:2] == [" $a", " $b"]
    assert written["histogram"]["borders"] == [0.5]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    with pytest.raises(DataError, match="out: exists already; choose another folder"):
        write_analysis(folder, analysis, layer, 0.05)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="out: cannot be written"):
        write_analysis(tmp_path / "file" / "out", *analysis_of(HOSTILE), 0.05)


def test_a_memory_without_space_can_be_drawn() -> None:
    _, layer = analysis_of(HOSTILE, "spread")
    layer.space[:] = 0.0
    assert draw_memory_space(layer).startswith(b"\x89PNG")
