"""The figures of the documentation: the committed files are what the code draws, from the code that they show."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.figures import FIGURES
from docs.figures.recurrent_memory import TOKENS, rows
from docs.figures.schedules import CHUNKS, MICRO_BATCHES, STAGES
from megamem.model.architectures.recurrent_memory import RecurrentMemoryConfig
from megamem.pipeline.schedule import bubble

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.mark.parametrize("name", FIGURES)
def test_committed_figures_are_what_the_code_draws(name):
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == FIGURES[name](), "run `make docs`"


def test_no_other_figures_are_committed():
    assert {path.stem for path in PICTURES.glob("*.svg")} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_everything_lies_inside_the_picture(name):
    root = ElementTree.fromstring(FIGURES[name]())
    width, height = (float(root.get(side)) for side in ("width", "height"))
    assert root.find("{*}title").text
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, across, down = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + across <= width
        assert y + down <= height
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        # a letter of such fonts is at most 0.6 of its size wide on average
        length = 0.6 * float(text.get("font-size")) * len(text.text)
        left = float(text.get("x")) - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor")] * length
        assert left >= 0, text.text
        assert left + length <= width, text.text


@pytest.mark.parametrize(
    ("name", "micro_batches"), [("schedule", MICRO_BATCHES), ("schedule_interleaved", MICRO_BATCHES + STAGES // 2)]
)
def test_schedules_show_every_chunk_and_the_formula_s_bubble(name, micro_batches):
    """A forward and a backward of each chunk on each stage; 1F1B beside the first schedule has no chunks."""
    svg = FIGURES[name]()
    assert f"bubble {bubble(STAGES, MICRO_BATCHES, CHUNKS):.1%}" in svg
    assert len(re.findall(r">\d<", svg)) == 2 * STAGES * CHUNKS * micro_batches


def test_memory_rows_are_the_configuration_s():
    labels = [label for label, _ in rows(RecurrentMemoryConfig(memory_tokens=2), 1)]
    assert labels == ["m0", "m1", "t4", "t5", "t6", "t7", "w0", "w1"]
    labels = [label for label, _ in rows(RecurrentMemoryConfig(memory_tokens=1, form="overwrite"), 0)]
    assert labels == ["m", *(f"t{i}" for i in range(TOKENS - 1)), "m"]
