"""Weights & Biases without a network: what a run leaves offline, and how it is uploaded later."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner
from wandb.proto import wandb_internal_pb2

from megamem.cli.main import app
from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.errors import DependencyError, MegamemError, RunFolderError
from megamem.runs import offline_wandb
from megamem.runs.folder import RunLock
from megamem.runs.result import RunResult
from megamem.runs.sinks.wandb import Wandb
from megamem.training import checks

RUN = {
    "name": "small",
    "model": {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 64, "chunk_size": 8},
    "data": {"sources": ["shards"], "sequence_length": 16},
    "training": {"steps": 4, "batch_tokens": 16},
    "logging": {"wandb": {"group": "pair", "tags": ["model:memory"]}},
}


PATIENCE_S = 60


def written(path):
    """Every record of a .wandb file: seven bytes, then blocks of 32 KiB as in LevelDB's log."""
    data, at, part, found = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at < len(data):
        if at % 32768 > 32768 - 7:  # too little room for a header: padding
            at += -at % 32768
            continue
        if at + 7 > len(data):  # the rest is being written
            break
        length, kind = struct.unpack_from("<xxxxHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):  # whole, or the last piece
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


def ended(path):
    """Every record of a run that has ended; W&B's own process may still be writing them."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        records = written(path)
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, f"{path}: no end within {PATIENCE_S} s"
        time.sleep(0.1)


def history(records):
    """Logged values by name, with the step."""
    for record in records:
        if record.HasField("history"):
            yield {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}


def test_a_run_that_goes_on_is_one_run(tmp_path):
    """Group, tags and configuration are there; the second part has the first's id and goes on with its steps."""
    config = parse_config(RunConfig, RUN, "run")
    first = Wandb(config, tmp_path)
    first.write({"step": 1, "tokens": 16, "loss": 4.0})
    first.close()
    second = Wandb(config, tmp_path)
    second.write({"step": 2, "tokens": 32, "loss": 3.0})
    Image.new("RGB", (4, 4)).save(tmp_path / "evaluation.png")
    figures = {"val_loss": 2.5, "picture": str(tmp_path / "evaluation.png"), "lzma_bits_per_byte": None}
    second.finish(RunResult(str(tmp_path), 4, 64, 100.0, (1.5,), figures))
    second.close()
    parts = [ended(next(folder.glob("*.wandb"))) for folder in offline_wandb.offline_folders(tmp_path)]
    assert len(parts) == 2
    runs = [next(record.run for record in part if record.HasField("run")) for part in parts]
    assert len({run.run_id for run in runs}) == 1
    assert {(run.run_group, tuple(run.tags), run.display_name) for run in runs} == {
        ("pair", ("model:memory",), "small")
    }
    logged = [list(history(part)) for part in parts]
    assert [(line["_step"], line["loss"]) for line in (logged[0][0], logged[1][0])] == [(1, 4.0), (2, 3.0)]
    end = logged[1][-1]
    assert (end["figures/_type"], end["evaluation/_type"]) == ("table-file", "image-file")
    assert (end["figures/nrows"], end["figures/ncols"]) == (4, 2), "val_loss, steps, tokens and speed"
    summary = [item for record in parts[1] if record.HasField("summary") for item in record.summary.update]
    assert "val_loss" in {"/".join(item.nested_key) or item.key for item in summary}


def test_a_home_that_cannot_be_written_is_not_needed(tmp_path, monkeypatch):
    """Tables wait for their upload in the run folder, and two runs of one process keep apart."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    config = parse_config(RunConfig, RUN, "run")
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        run = Wandb(config, folder)
        run.finish(RunResult(str(folder), 4, 64, 100.0, (1.5,), {"val_loss": 2.5}))
        run.close()
        assert [path for path in (folder / "wandb/data/artifacts/staging").iterdir() if path.stat().st_size]
        assert "WANDB_DATA_DIR" not in os.environ


# --- megamem wandb sync ---


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A stand-in for `wandb`: notes its arguments and marks folders, as W&B 0.31 none if it cannot read one."""
    script = tmp_path / "fake.py"
    script.write_text(
        "import pathlib, sys\n"
        f"pathlib.Path({str(tmp_path / 'calls')!r}).open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "if any(b'broken' in next(pathlib.Path(folder).glob('*.wandb')).read_bytes() for folder in sys.argv[1:]):\n"
        "    print('could not read'); sys.exit()\n"
        "for folder in sys.argv[1:]:\n"
        "    pathlib.Path(folder, 'run-1.wandb.synced').touch()\n"
    )
    monkeypatch.setattr(offline_wandb, "COMMAND", [sys.executable, str(script)])
    return lambda: (tmp_path / "calls").read_text().split() if (tmp_path / "calls").exists() else []


HEADER = b":W&B" + bytes(3)


def offline(run, *names):
    for name in names:
        folder = run / "wandb" / f"offline-run-{name}"
        folder.mkdir(parents=True)
        (folder / "run-1.wandb").write_bytes(HEADER + b"records")
    return [str(run / "wandb" / f"offline-run-{name}") for name in names]


def sync(*paths):
    return CliRunner().invoke(app, ["wandb", "sync", *map(str, paths)])


def test_offline_runs_are_uploaded_once_and_in_order(tmp_path, wandb):
    single, study = tmp_path / "single", tmp_path / "study"
    later, earlier = offline(single, "20260102_000000-a", "20260101_000000-a")
    of_study = [*offline(study / "runs" / "x-0", "20260101_000000-x"), *offline(study / "runs" / "x-1", "20260101_1-y")]
    done = sync(single, study)
    assert done.exit_code == 0, done.output
    assert wandb() == [earlier, later, *of_study]
    again = sync(single, study)
    assert "4 offline runs, 4 uploaded already" in again.output
    assert len(wandb()) == 4


def test_what_cannot_be_read_keeps_nothing_else_from_being_uploaded(tmp_path, wandb):
    """A part without a record (its run was killed at its start), and a file that W&B refuses."""
    runs = tmp_path / "study" / "runs"
    killed, whole = offline(runs / "x-0", "1-x", "2-x")
    (Path(killed) / "run-1.wandb").write_bytes(HEADER)
    (broken,) = offline(runs / "x-1", "1-y")
    (Path(broken) / "run-1.wandb").write_bytes(HEADER + b"broken")
    (last,) = offline(runs / "x-2", "1-z")
    failed = sync(tmp_path / "study")
    assert isinstance(failed.exception, MegamemError)
    assert str(failed.exception).startswith(f"wandb sync did not upload {broken}; ")
    assert f"{killed}: holds no records; left out" in failed.output
    assert wandb() == [whole, broken, last], "a call for each run"
    again = sync(tmp_path / "study")
    assert "4 offline runs, 2 uploaded already" in again.output
    assert wandb()[3:] == [broken]


def test_a_run_that_goes_on_is_left_for_its_end(tmp_path, wandb):
    """W&B would end it and mark it as uploaded, without what is still to come."""
    offline(tmp_path / "run", "1-x")
    with RunLock(tmp_path / "run") as lock:
        lock.take()
        done = sync(tmp_path / "run")
        assert (done.exit_code, wandb()) == (0, [])
        assert f"{tmp_path / 'run'}: goes on; left for its end" in done.output
    assert sync(tmp_path / "run").exit_code == 0
    assert len(wandb()) == 1


def test_what_cannot_be_uploaded_is_said(tmp_path, wandb, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert isinstance(sync(empty).exception, RunFolderError)
    assert str(sync(empty).exception).startswith(f"{empty}: no wandb/offline-run-* folder in it")
    monkeypatch.setattr(offline_wandb, "find_spec", lambda name: None)
    missing = sync(empty).exception
    assert isinstance(missing, DependencyError)


def test_a_run_without_the_package_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"logging\.wandb\.mode offline needs the package wandb"):
        checks.check_run(parse_config(RunConfig, RUN, "run"), 1)
