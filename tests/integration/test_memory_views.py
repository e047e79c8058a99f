"""`megamem memory-length` and `megamem attention` on runs, and on what they cannot look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.commands import CHUNK, run_tree, write_config
from tests.integration.ranks import Job, command
from tests.integration.test_long_term_memory import invoke, refused

pytestmark = pytest.mark.distributed

KINDS = ("lamemo", "transformer_xl", "local_attention")


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of two steps by the kind of their mixers."""
    folder = tmp_path_factory.mktemp("views")
    for kind in KINDS:
        tree = run_tree(data, folder / "runs", model={"mixer": {"kind": kind}, "memory": []}, training={"steps": 2})
        config = write_config(folder / f"{kind}.yaml", {**tree, "name": kind})
        with Job(folder / f"job-{kind}", 1, command, "train", str(config)) as job:
            assert job.codes(90) == [0], job.output(0)
    return {kind: folder / "runs" / kind for kind in KINDS}


def test_losses_are_those_of_evaluations_with_the_length(runs: dict[str, Path], tmp_path: Path) -> None:
    models = [runs["lamemo"], runs["transformer_xl"]]
    said = invoke("memory-length", *models, tmp_path / "out", "--segments", "1,3")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"memory_length.json", "memory_length.png"}
    assert "lamemo, step 2" in said
    assert "transformer_xl, step 2" in said
    found = json.loads((tmp_path / "out" / "memory_length.json").read_text())["models"]
    for path, model in zip(models, found, strict=True):
        assert [point["memory_length"] for point in model["points"]] == [CHUNK, 3 * CHUNK]
        for point in model["points"]:
            own = json.loads(
                invoke("evaluate", path, f"model.mixer.memory_length={point['memory_length']}", "--json").splitlines()[
                    -1
                ]
            )
            # the same calls of the same model on the same tokens
            assert (point["loss"], point["perplexity"]) == (own["val_loss"], own["val_perplexity"])
            assert (point["bits_per_byte"], model["tokens"]) == (own["val_bits_per_byte"], own["val_tokens"])
        assert len({point["loss"] for point in model["points"]}) == 2, "the length matters"
    bound = ("--segments", "2", "--override", "evaluation.final_max_tokens=256", "--json")
    (one,) = json.loads(invoke("memory-length", runs["lamemo"], tmp_path / "bound", *bound))["models"]
    assert one["tokens"] == 256
    assert len(one["points"]) == 1


def test_lengths_that_cannot_be(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = refused("memory-length", runs["lamemo"], runs["local_attention"], out)
    assert "local_attention has no memory_length to read with; the mixers that have one: " in line
    assert "exists already; choose another folder" in refused("memory-length", runs["lamemo"], tmp_path)
    assert "--segments 3-1: give numbers of chunks" in refused(
        "memory-length", runs["lamemo"], out, "--segments", "3-1"
    )
    line = refused("memory-length", runs["lamemo"], out, "--override", "data.validation=[]")
    assert "its configuration names no held-out text; give data.validation='[SHARDS]'" in line
    # rows of memory are at least one
    assert "memory_length" in refused("memory-length", runs["lamemo"], out, "--segments", "0")
    assert not out.exists()


def test_attention_of_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    said = invoke("attention", runs["lamemo"], tmp_path / "lamemo", "--documents", 2, "--chunks", 3)
    assert f"lamemo, step 2: {6 * CHUNK} tokens of 2 documents" in said
    names = {path.name for path in (tmp_path / "lamemo").iterdir()}
    assert names == {"attention.json", "attention.png", "alpha.png"}
    found = json.loads((tmp_path / "lamemo" / "attention.json").read_text())
    assert [len(layer["alpha"] or []) for layer in found["layers"]] == [CHUNK, 0]
    longer = ("model.mixer.memory_length=80", "--json")
    found = json.loads(invoke("attention", runs["transformer_xl"], tmp_path / "longer", *longer))
    for layer in found["layers"]:
        assert layer["memory_length"] == 80
        assert layer["tokens"]["distance"] == list(range(80 + CHUNK))
        total = sum(s * n for s, n in zip(layer["tokens"]["share"], layer["tokens"]["pairs"], strict=True))
        # FP32 shares of 112 keys, four heads
        assert total == pytest.approx(4 * found["tokens"], rel=1e-5)
    assert "exists already" in refused("attention", runs["lamemo"], tmp_path)
    line = refused("attention", runs["local_attention"], tmp_path / "out")
    assert "local_attention has no attention by distance to look at" in line
    line = refused("attention", runs["lamemo"], tmp_path / "out", "model.mixer.memory_length=4096")
    assert "no document has 4,129 tokens, the fewest with which a memory is read" in line
    assert not (tmp_path / "out").exists()
