"""Checkpoints in a real object store, over HTTP: killed, down, damaged, read under another layout, named by URL."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from checkpoints.folder import checkpoints_in, open_checkpoint
from checkpoints.location import ObjectPath
from checkpoints.read import compare
from checkpoints.verify import verify
from megamem.cli.main import app
from megamem.errors import CheckpointError, StoreError
from tests.integration.commands import run_tree, write_config
from tests.integration.ranks import Job
from tests.integration.resume_cases import reload
from tests.integration.s3_server import BUCKET, S3Server, with_environment
from tests.integration.store_kill import torment

pytestmark = pytest.mark.distributed

RUNS = f"s3://{BUCKET}/runs"
EXTENT_BYTES = 1024
"""Extents of these tests' checkpoints, whose files are small."""
SECTIONS = {
    "parallel": {"tp": 2},
    "checkpoint": {"every": 2, "keep_last": 9, "folder": RUNS, "retry_minutes": 0.5},
    "evaluation": {"every": 0},
    "logging": {"every": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3") / "server") as running:
        yield running


@pytest.fixture(autouse=True)
def environment(server, monkeypatch):
    """Of this process, which asks the store too."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


def small_extents(environment: dict[str, str], *arguments: str) -> None:
    """On a rank: the command, with checkpoints of small extents."""
    from checkpoints import target, tensor_objects

    target.EXTENT_BYTES = tensor_objects.EXTENT_BYTES = EXTENT_BYTES
    with_environment(environment, *arguments)


@pytest.fixture(scope="module")
def run(data, server, tmp_path_factory):
    """The folder of a finished run of two ranks, with checkpoints after steps 2, 4 and 6 in the store."""
    folder = tmp_path_factory.mktemp("store")
    config = write_config(folder / "run.yaml", run_tree(data, folder / "runs", **SECTIONS))
    with Job(folder / "job", 2, small_extents, server.environment, "train", str(config)) as job:
        assert job.codes(120) == [0, 0], job.output(0) + job.output(1)
    return folder / "runs" / "run"


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_inside_saves(data, server, tmp_path, kills):
    lives = torment(data, tmp_path, server, kills, seed=kills)
    assert len(lives) == kills, "all of them inside a save"
    assert sum(life.store_killed for life in lives) == kills // 2
    server.store().rm(f"{BUCKET}/checkpoints", recursive=True)


def checkpoint(*arguments):
    """(exit code, stdout)."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


class TestCommands:
    @pytest.fixture(params=["url", "run folder"])
    def named(self, request, run):
        return f"{RUNS}/run" if request.param == "url" else run

    def test_ls_show_and_verify(self, named):
        rows = json.loads(checkpoint("ls", named, "--json")[1])
        assert [(row["step"], row["complete"]) for row in rows] == [(2, True), (4, True), (6, True)]
        assert rows[0]["path"] == f"{RUNS}/run/step-00000002"
        shown = json.loads(checkpoint("show", named, "--json")[1])
        assert (shown["step"], shown["bytes"]) == (6, rows[2]["bytes"])
        assert shown["tensors"]["master/embedding.weight"] == {"shape": [320, 32], "dtype": "float32"}
        code, out = checkpoint("verify", named, "--json")
        assert (code, [row["intact"] for row in json.loads(out)]) == (0, [True] * 3)

    def test_diff(self, named):
        code, out = checkpoint("diff", f"{RUNS}/run/step-00000006", named, "--json")
        assert (code, json.loads(out)["bitwise_equal"]) == (0, True)
        assert checkpoint("diff", f"{RUNS}/run/step-00000002", named)[0] == 1

    def test_merge_and_convert(self, named, run, tmp_path):
        assert checkpoint("merge", named, "-o", tmp_path / "weights.safetensors")[0] == 0
        ours, theirs = load_file(tmp_path / "weights.safetensors"), load_file(run / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        result = CliRunner().invoke(app, ["convert", "to-hf", str(named), str(tmp_path / "export")])
        assert result.exit_code == 0, result.output
        assert (tmp_path / "export" / "model.safetensors").is_file()

    def test_prune(self, server, run):
        server.store().copy(f"{BUCKET}/runs/run", f"{BUCKET}/runs/pruned", recursive=True)
        removed = json.loads(checkpoint("prune", f"{RUNS}/pruned", "--keep-last", 1, "--json")[1])["removed"]
        assert removed == [f"{RUNS}/pruned/step-{step:08d}" for step in (2, 4)]
        assert list(ObjectPath(f"{RUNS}/pruned").entries()) == ["step-00000006"]
        verify(open_checkpoint(f"{RUNS}/pruned/step-00000006"))


def bytes_read(environment: dict[str, str], cases: dict[str, Any]) -> dict[str, int]:
    """On a rank: what loads of tensors ask the store for. Each case is loaded and saved again."""
    import os

    from checkpoints import target, tensor_objects

    target.EXTENT_BYTES = tensor_objects.EXTENT_BYTES = EXTENT_BYTES
    os.environ.update(environment)
    read, asked = ObjectPath.read_ranges, 0

    def counted(self: ObjectPath, ranges: Any) -> list[bytes]:
        nonlocal asked
        asked += sum(stop - start for start, stop in ranges)
        return read(self, ranges)

    ObjectPath.read_ranges = counted  # type: ignore[method-assign]
    found = {}
    for name, case in cases.items():
        asked = 0
        reload({name: case})
        found[name] = asked
    return found


def test_another_layout_reads_the_ranges_it_needs(data, server, run, tmp_path):
    """Saved by two ranks, loaded by one, and saved by that for two again: bit for bit; no rank reads all for a part."""
    newest = open_checkpoint(f"{RUNS}/run/step-00000006")
    alone = {"to one": {"tree": tree(data, tmp_path, tp=1), "from": str(newest.path), "to": f"{RUNS}/alone"}}
    with Job(tmp_path / "one", 1, bytes_read, server.environment, alone) as job:
        (read,) = job.results()
    whole = sum(size for name, size in newest.path.entries().items() if name.endswith(".safetensors"))
    # everything once, but for the generator of a rank that does not exist (5,056 bytes)
    assert whole - 5056 - EXTENT_BYTES <= read["to one"] <= whole

    again = {
        name: {"tree": tree(data, tmp_path, tp=2), "from": source, "to": str(tmp_path / name)}
        for name, source in (("same", str(newest.path)), ("to two", f"{RUNS}/alone/step-00000006"))
    }
    with Job(tmp_path / "two", 2, bytes_read, server.environment, again) as job:
        first, second = job.results()
    for name in again:
        # vectors (norms) and what is split by columns are needed by both, or lie within one extent
        assert max(first[name], second[name]) < 0.7 * whole
        count, differences = compare(newest, open_checkpoint(tmp_path / name / "step-00000006"))
        assert count > 3 * 20
        # generators of ranks are not what `reload` saves
        assert [str(found) for found in differences if not found.name.startswith("rng/")] == []


def tree(data, folder, tp):
    """The run's configuration under another layout."""
    return run_tree(data, folder, **{**SECTIONS, "parallel": {"tp": tp}})


def test_a_damaged_object_stops_the_run_or_is_passed_over(data, server, run, tmp_path):
    store = server.store()
    store.copy(f"{BUCKET}/runs/run", f"{BUCKET}/runs/damaged", recursive=True)
    path = f"{BUCKET}/runs/damaged/step-00000006/rank-00001.safetensors"
    content = bytearray(store.cat_file(path))
    content[len(content) // 2] ^= 1
    store.pipe_file(path, bytes(content))
    sections = {**SECTIONS, "training": {"steps": 8}}
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", name="damaged", **sections))
    with Job(tmp_path / "stops", 2, small_extents, server.environment, "train", str(config)) as job:
        assert job.codes(90) == [CheckpointError.exit_code] * 2, job.output(0)
        said = rf"megamem: s3://{path}: is damaged \(.*\); --fallback goes on from the newest undamaged one\n"
        assert re.fullmatch(said, job.output(0)), job.output(0)
    with Job(tmp_path / "on", 2, small_extents, server.environment, "train", str(config), "--fallback") as job:
        assert job.codes(90) == [0, 0], job.output(0)
        assert "skipped step-00000006: " in job.output(0, "out")
        assert "goes on from s3://bucket/runs/damaged/step-00000004" in job.output(0, "out")
    for found in checkpoints_in(ObjectPath(f"{RUNS}/damaged")):
        verify(found)


NOWHERE = "http://127.0.0.1:9"
"""The port of a service that nobody runs any more."""
UNUSABLE = {
    "no credentials": ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
    "wrong key": ({"AWS_SECRET_ACCESS_KEY": "guessed"}, "The request signature we calculated does not match"),
    "no server": ({"AWS_ENDPOINT_URL": NOWHERE}, "Could not connect to the endpoint URL"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_store_that_cannot_be_used_ends_the_run_before_it_begins(data, server, tmp_path, kind):
    change, reason = UNUSABLE[kind]
    config = write_config(
        tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", **{**SECTIONS, "parallel": {"tp": 1}})
    )
    alone = {"AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_CONFIG_FILE": "/dev/null"}
    with Job(
        tmp_path / "job", 1, with_environment, {**server.environment, **alone, **change}, "train", str(config)
    ) as job:
        # what may be over later is tried again by launchers
        assert job.codes(90) == [(StoreError if kind == "no server" else CheckpointError).exit_code]
        line = rf"megamem: checkpoint\.folder {RUNS}/run: checkpoints cannot be kept there \({reason}.*\)\n"
        assert re.fullmatch(line, job.output(0)), job.output(0)
    assert not (tmp_path / "runs").exists(), "nothing was begun"


def steps_logged(job: Job) -> int:
    return max((int(step) for step in re.findall(r"^step (\d+)/", job.output(0, "out"), re.MULTILINE)), default=0)


@pytest.mark.alone
def test_a_server_that_is_down_during_a_save(data, server, tmp_path):
    """Training goes on and the save ends when the server is back; without it the run ends, and says why."""
    sections = {**SECTIONS, "training": {"steps": 12}, "checkpoint": {**SECTIONS["checkpoint"], "every": 6}}
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", name="down", **sections))
    try:
        impatient = ("train", str(config), "name=impatient", "checkpoint.retry_minutes=0.02")
        with Job(tmp_path / "ends", 2, with_environment, server.environment, *impatient) as job:
            job.wait_for(r"step +4/", 90)
            server.kill()
            assert job.codes(90) == [StoreError.exit_code] * 2
            line = r"megamem: checkpoint after step 6: rank 0: s3://bucket/runs/impatient/\S* Could not connect.*\n"
            assert re.fullmatch(line, job.output(0)), job.output(0)
        server.start()
        assert checkpoints_in(ObjectPath(f"{RUNS}/impatient")) == []
        with Job(tmp_path / "waits", 2, with_environment, server.environment, "train", str(config)) as job:
            job.wait_for(r"step +4/", 90)
            server.kill()
            job.wait_for(r"rank 0: s3://bucket/runs/down/\S+ Could not connect.*; tried again for 30 s", 60)
            before, deadline = steps_logged(job), time.monotonic() + 60
            while steps_logged(job) < max(before, 8):
                assert time.monotonic() < deadline, "training goes on beside a save that waits"
                time.sleep(0.1)
            server.start()
            assert job.codes(90) == [0, 0], job.output(0)
    finally:
        server.kill()
        server.start()
    found = checkpoints_in(ObjectPath(f"{RUNS}/down"))
    assert [checkpoint.step for checkpoint in found] == [6, 12]
    for checkpoint in found:
        verify(checkpoint)
