"""`megamem long-term-memory` on a run, on its export, and on what it cannot analyze."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.errors import MegamemError
from tests.integration.commands import CHUNK, run_tree, write_config
from tests.integration.ranks import Job, command
from tests.unit.data_helpers import text_of

pytestmark = pytest.mark.distributed

FILES = {"attention.png", "long_term_memory.json", "memory_space.png", "words.html"}
MIXER = {
    "kind": "infinity_former", "basis": 32, "widths": [0.02, 0.05], "samples": 32, "sticky": "random", "bins": 16,
}  # fmt: skip


def invoke(*arguments: object) -> str:
    """Standard output of a command that must succeed."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def refused(*arguments: object) -> str:
    """The line with which a command is refused."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(result.exception, MegamemError), (result.exception, result.stdout)
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a long-term memory in both layers."""
    folder = tmp_path_factory.mktemp("long-term")
    tree = run_tree(data, folder / "runs", model={"mixer": MIXER, "memory": []}, training={"steps": 2})
    config = write_config(folder / "run.yaml", tree)
    with Job(folder / "job", 1, command, "train", str(config)) as job:
        assert job.codes(90) == [0], job.output(0)
    return folder / "runs" / "run"


@pytest.fixture(scope="module")
def export(run: Path) -> Path:
    invoke("convert", "to-hf", run, run.parent / "hf", "--evaluation-tokens", 0)
    return run.parent / "hf"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "held out <1>.txt"
    file.write_text(text_of(300, 5))
    return file


def test_held_out_text_of_a_run(run: Path, tmp_path: Path) -> None:
    said = invoke("long-term-memory", run, tmp_path / "out", "--chunks", 3, "--documents", 2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert "words.html: layer 1; when token " in said
    found = json.loads((tmp_path / "out" / "long_term_memory.json").read_text())
    assert found["documents"] == 2
    assert [layer["name"] for layer in found["layers"]] == ["layers.0.mixer", "layers.1.mixer"]
    for layer in found["layers"]:
        assert layer["histogram"]["tokens"] == 2 * 3 * CHUNK
        assert len(layer["histogram"]["borders"]) == 2
        assert sum(layer["memory_space"]["space"]) == pytest.approx(1)
        assert layer["memory_space"]["space"] != layer["memory_space"]["space_at_equal_distances"]
        assert all(word.strip(" .\n") for word in layer["memory_space"]["words"])
    # the same model, read with its samples at equal distances
    invoke(
        "long-term-memory", run, tmp_path / "equal", "model.mixer.sticky=none", "model.mixer.bins=128", "--chunks", 3
    )
    for layer in json.loads((tmp_path / "equal" / "long_term_memory.json").read_text())["layers"]:
        assert layer["memory_space"]["space"] == layer["memory_space"]["space_at_equal_distances"]


def test_a_run_and_its_export_attend_alike(run: Path, export: Path, text: Path, tmp_path: Path) -> None:
    given = ["--text", text, "--layer", 0, "--token", 2 * CHUNK, "--by-token", "--json"]
    ours = json.loads(invoke("long-term-memory", run, tmp_path / "ours", *given))
    theirs = json.loads(invoke("long-term-memory", export, tmp_path / "theirs", *given))
    assert ours["document"] == str(text)
    for one, other in zip(ours["layers"], theirs["layers"], strict=True):
        assert one["attention"]["words"] == other["attention"]["words"]
        assert one["attention"]["predicted"] == 2 * CHUNK
        assert len(one["attention"]["words"]) == CHUNK
        # FP32: weights and states are the same numbers
        assert one["attention"]["attention"] == pytest.approx(other["attention"]["attention"], abs=1e-6)
        assert one["memory_space"] == other["memory_space"]
    page = (tmp_path / "ours" / "words.html").read_text()
    assert "held out &lt;1&gt;.txt" in page
    assert page.count("data:image/png;base64,") == 2


def test_bad_input(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    short = tmp_path / "short.txt"
    short.write_text("a short text")
    verb = ("long-term-memory", run)
    assert "exists already; choose another folder" in refused(*verb, tmp_path)
    for threshold in (0, 1, -0.5):
        line = refused(*verb, out, "--threshold", threshold)
        assert line.endswith(": is no share of the attention; give a number between 0 and 1")
    assert f"give a text of at least {CHUNK + 2} tokens" in refused(*verb, out, "--text", short)
    assert "cannot be read" in refused(*verb, out, "--text", tmp_path / "none.txt")
    assert "the layers that have one: 0, 1" in refused(*verb, out, "--layer", 2)
    assert "--token 3: is not predicted from a long-term memory" in refused(*verb, out, "--token", 3)
    assert "its run names no held-out text; give --text" in refused(*verb, out, "data.validation=[]")
    assert not out.exists()


def test_exports_need_a_text_and_take_no_overrides(export: Path, text: Path, tmp_path: Path) -> None:
    assert "an export has no held-out text; give --text" in refused("long-term-memory", export, tmp_path / "out")
    for extra in (["seed=1"], ["--tokenizer", tmp_path]):
        line = refused("long-term-memory", export, tmp_path / "out", *extra, "--text", text)
        assert "an export brings its configuration and tokenizer; give neither" in line
