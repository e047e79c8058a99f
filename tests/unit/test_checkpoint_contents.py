"""Checkpoints whose hashes are right and that are none all the same: named in one line, and passed over by fallback."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from checkpoints.folder import MANIFEST, Checkpoint, folder_name, mark_complete, open_checkpoint
from checkpoints.read import read_tensor
from checkpoints.records import DataType, _tile
from checkpoints.resume import choose_checkpoint
from checkpoints.verify import verify
from megamem.cli.main import app
from megamem.config.checkpoint import CheckpointConfig
from megamem.errors import CheckpointError
from megamem.files import sha256_file
from megamem.tensor_files import DTYPES, write_tensors
from tests.saved_run import saved_run

RANKS = [f"rank-0000{rank}.safetensors" for rank in range(2)]
Change = Callable[[dict[str, Any]], object]


def write(folder: Path, step: int = 20, change: Change = lambda parts: None) -> Checkpoint:
    """A checkpoint of two ranks with a [4, 3] weight, half of it on each, changed before it is hashed."""
    weight = torch.arange(12.0).view(4, 3)
    parts: dict[str, Any] = {
        "run": saved_run(step),
        "index": {
            "master/weight": {
                "dtype": "float32",
                "shape": [4, 3],
                "pieces": [[[0, 0], [2, 3], RANKS[0]], [[2, 0], [2, 3], RANKS[1]]],
            }
        },
        "tensors": [{"master/weight@0,0": weight[:2]}, {"master/weight@2,0": weight[2:]}],
        "manifest": {"format": 1},
    }
    change(parts)
    partial = folder / (folder_name(step) + ".partial")
    partial.mkdir(parents=True)
    for name in ("run", "index"):
        text = parts[name] if isinstance(parts[name], str) else json.dumps(parts[name])
        (partial / f"{name}.json").write_text(text)
    for name, tensors in zip(RANKS, parts["tensors"], strict=True):
        write_tensors(partial / name, tensors)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(partial.iterdir())
    }
    parts["manifest"].setdefault("files", files | parts.get("files", {}))
    mark_complete(partial, folder / folder_name(step), {})
    checkpoint = open_checkpoint(folder / folder_name(step))
    (checkpoint.path / MANIFEST).write_text(json.dumps(parts["manifest"]))
    (checkpoint.path / "COMPLETE").write_text(sha256_file(checkpoint.path / MANIFEST) + "\n")
    return checkpoint


def piece(parts: dict[str, Any], number: int) -> Any:
    return parts["index"]["master/weight"]["pieces"][number]


def entry(parts: dict[str, Any]) -> Any:
    return parts["index"]["master/weight"]


WRONG: dict[str, tuple[Change, str]] = {
    "unknown format": (
        lambda p: p["manifest"].update(format=2),
        "manifest.json: format is 2: this version of megamem reads 1",
    ),
    "format of another type": (
        lambda p: p["manifest"].update(format="1"),
        "manifest.json: format is '1': Input should",
    ),
    "files as a list": (
        lambda p: p["manifest"].update(files=[]),
        "manifest.json: files is []: Input should be an object",
    ),
    "no size": (
        lambda p: p.update(files={"index.json": {"sha256": "0" * 64}}),
        "manifest.json: files.index.json.bytes is missing",
    ),
    "a name outside": (
        lambda p: p.update(files={"../run.json": {"bytes": 1, "sha256": "0" * 64}}),
        "manifest.json: files.../run.json is '../run.json': String should match",
    ),
    "no object": (lambda p: p.update(index="[]"), "index.json: does not hold what it should"),
    "no JSON": (lambda p: p.update(run='{"step": 20'), "run.json: cannot be read (EOF while parsing"),
    "deep JSON": (lambda p: p.update(run="[" * 10**5), "run.json: cannot be read (recursion limit exceeded"),
    "no shape": (lambda p: entry(p).pop("shape"), "index.json: master/weight.shape is missing"),
    "shape of text": (lambda p: entry(p).update(shape="4 3"), "index.json: master/weight.shape is '4 3': Input should"),
    "negative size": (
        lambda p: piece(p, 1)[1].__setitem__(0, -2),
        "index.json: master/weight.pieces.1.1.0 is -2: Input should be greater",
    ),
    "unknown type": (
        lambda p: entry(p).update(dtype="save"),
        "index.json: master/weight.dtype is 'save': Input should be 'float64'",
    ),
    "a file outside": (
        lambda p: piece(p, 1).__setitem__(2, "../step-00000010/rank-00001.safetensors"),
        "index.json: master/weight.pieces.1.2 is '../step-00000010/rank-00001.safetensors': String should",
    ),
    "a file that is not named": (
        lambda p: piece(p, 1).__setitem__(2, "rank-00007.safetensors"),
        "index.json: a piece of master/weight is in rank-00007.safetensors, which manifest.json does not name",
    ),
    "a piece missing": (
        lambda p: entry(p)["pieces"].pop(),
        "index.json: master/weight has 12 values, its pieces 6; one is missing or too many",
    ),
    "a piece twice": (
        lambda p: entry(p)["pieces"].append(piece(p, 0)),
        "index.json: master/weight has 12 values, its pieces 18; one is missing or too many",
    ),
    "pieces over each other": (
        lambda p: piece(p, 1)[0].__setitem__(0, 1),
        "index.json: pieces of master/weight overlap",
    ),
    "a piece beyond": (
        lambda p: piece(p, 1)[0].__setitem__(0, 3),
        "index.json: master/weight has shape [4, 3], but a piece in rank-00001.safetensors at [3, 0] of sizes [2, 3]",
    ),
    "too few axes": (
        lambda p: piece(p, 1)[0].pop(),
        "index.json: master/weight has shape [4, 3], but a piece in rank-00001.safetensors at [2] of sizes [2, 3]",
    ),
    "a piece not in its file": (
        lambda p: p["tensors"][1].clear(),
        "rank-00001.safetensors: master/weight@2,0 is missing, which index.json says it holds",
    ),
    "a piece of another shape": (
        lambda p: p["tensors"][1].update({"master/weight@2,0": torch.zeros(3, 2)}),
        "rank-00001.safetensors: master/weight@2,0 is F32 [3, 2], but F32 [2, 3] in index.json",
    ),
    "a piece of another type": (
        lambda p: p["tensors"][1].update({"master/weight@2,0": torch.zeros(2, 3).int()}),
        "rank-00001.safetensors: master/weight@2,0 is I32 [2, 3], but F32 [2, 3] in index.json",
    ),
    "another step": (lambda p: p["run"].update(step=10), "run.json: step is 10, that of step-00000010"),
    "step of text": (lambda p: p["run"].update(step="20"), "run.json: step is '20': Input should be a valid integer"),
    "no counts": (lambda p: p["run"].pop("bad_steps"), "run.json: bad_steps is missing"),
    "counts of another kind": (
        lambda p: p["run"].update(bad_steps={"total": 0, "streak": 3}),
        "run.json: bad_steps.streak is 3: Input should be a valid array",
    ),
    "loss of text": (lambda p: p["run"].update(val_loss="low"), "run.json: val_loss is 'low': Input should"),
    "no configuration": (
        lambda p: p["run"].update(config={"name": "a"}),
        "run.json: config is {'name': 'a'}: no configuration of a run, checkpoint.resume is missing",
    ),
    "phases of numbers": (lambda p: p["run"].update(phases=[1]), "run.json: phases.0 is 1: Input should be an object"),
}


def test_a_checkpoint_that_is_one(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    verify(checkpoint)
    assert torch.equal(read_tensor(checkpoint, "master/weight"), torch.arange(12.0).view(4, 3))


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_named_and_passed_over(tmp_path: Path, kind: str) -> None:
    """Before anything is built or trained; the whole one before it stays and is taken where that is asked for."""
    write(tmp_path, 10)
    change, said = WRONG[kind]
    checkpoint = write(tmp_path, 20, change)
    with pytest.raises(CheckpointError) as caught:
        verify(checkpoint)
    assert str(caught.value).startswith(f"{checkpoint.path}/{said}")
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"; --fallback goes on from the newest undamaged one$"):
        choose_checkpoint(CheckpointConfig(), tmp_path)
    with pytest.raises(CheckpointError):
        choose_checkpoint(CheckpointConfig(resume=str(checkpoint.path)), tmp_path / "new")
    chosen, (line,) = choose_checkpoint(CheckpointConfig(fallback=True), tmp_path)
    assert chosen is not None
    assert chosen.step == 10
    assert line == f"skipped step-00000020: {caught.value}"


def test_a_list_of_checkpoints_goes_past_one_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20, WRONG["step of text"][0])
    found = CliRunner().invoke(app, ["checkpoint", "ls", str(tmp_path), "--json"])
    assert found.exception is None
    assert [(row["step"], row["tokens"]) for row in json.loads(found.stdout)] == [(10, 640), (20, None)]


def test_a_tensor_with_a_hole_is_not_put_together(tmp_path: Path) -> None:
    """Also where nobody verifies first, as `checkpoint diff`."""
    for kind in ("a piece missing", "pieces over each other", "a piece not in its file", "a piece of another shape"):
        checkpoint = write(tmp_path / kind, 20, WRONG[kind][0])
        with pytest.raises(CheckpointError, match="master/weight") as caught:
            read_tensor(checkpoint, "master/weight")
        assert "\n" not in str(caught.value)


def test_rectangles_cover_a_tensor_once_or_do_not() -> None:
    """Against counting the elements, for all pairs of rectangles in a small tensor of one, two or no axes."""
    seen = set()
    for shape in ((), (0,), (4,), (2, 3), (1, 2, 2)):
        places = [range(size + 1) for size in shape]
        rectangles = [
            (low, tuple(h - a for a, h in zip(low, high, strict=True)))
            for low in itertools.product(*places)
            for high in itertools.product(*places)
            if all(a <= h for a, h in zip(low, high, strict=True))
        ]
        for pieces in itertools.chain(
            itertools.combinations_with_replacement(rectangles, 2), ((r,) for r in rectangles)
        ):
            count = np.zeros(shape, int)
            for low, sizes in pieces:
                count[tuple(slice(a, a + s) for a, s in zip(low, sizes, strict=True))] += 1
            assert _tile(shape, pieces) == bool((count == 1).all())
            seen.add(bool((count == 1).all()))
    assert seen == {True, False}


def test_data_types_are_those_of_files() -> None:
    assert [str(dtype).removeprefix("torch.") for dtype in DTYPES] == list(get_args(DataType))
