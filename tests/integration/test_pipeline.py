"""`megamem train` through a pipeline of stages: the real command, and the same runs with and without stages."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.errors import ConfigError, ContractError
from megamem.pipeline.record import read_record
from megamem.pipeline.schedule import stage_order
from tests.integration.commands import finish, megamem, run_tree, write_config
from tests.integration.ranks import Job
from tests.integration.ranks import command as in_process
from tests.integration.test_train import losses, train_all

pytestmark = pytest.mark.distributed

MODEL = {
    "layers": 4,
    "memory": [
        {"layers": [1, 3], "mixer": {"kind": "elastic_memory", "order": 8, "block": 8}},
        {"layers": [2], "mixer": "full_attention"},
    ],
}
BF16 = {"precision": "bf16"}
RUNS = {
    1: {
        "one": {},
        "one-streams": {"data": {"feeding": "streams", "documents": "pad"}, "training": {"bptt_chunks": 2}},
        "one-tied": {"model": {"tie_embeddings": True}, "optimizer": {"grad_clip": 0.2}},
    },
    2: {
        "pp2-streams": {
            "parallel": {"pp": 2}, "data": {"feeding": "streams", "documents": "pad"}, "training": {"bptt_chunks": 2},
        },
        "tp2-bf16": {"parallel": {"tp": 2}, "training": BF16},
    },
    4: {
        "pp2-tp2": {"parallel": {"pp": 2, "tp": 2, "sequence_parallel": True}},
        "pp2-tp2-bf16": {"parallel": {"pp": 2, "tp": 2}, "training": BF16},
        "pp4-tied": {
            "parallel": {"pp": 4, "zero_stage": 0}, "model": {"tie_embeddings": True}, "optimizer": {"grad_clip": 0.2},
        },
    },
}  # fmt: skip


def tree(data, runs, name, sections):
    return run_tree(data, runs, name=name, **{**sections, "model": {**MODEL, **sections.get("model", {})}})


def make_runs(data, folder, worlds):
    """Folder of all runs, and their final figures."""
    figures = {}
    for world, cases in worlds.items():
        trees = {name: tree(data, folder / "runs", name, sections) for name, sections in cases.items()}
        with Job(folder / f"world{world}", world, train_all, trees) as job:
            figures |= job.results()[0]
            assert [job.output(rank) for rank in range(world)] == [""] * world
    return folder / "runs", figures


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    return make_runs(data, tmp_path_factory.mktemp("pipelines"), RUNS)


def assert_same_run(runs, staged, whole):
    """Six steps with clipping, validation between them, the final evaluation and the saved weights."""
    folder, figures = runs
    # FP32 sums in another order, carried through 6 AdamW steps
    assert losses(folder / staged) == pytest.approx(losses(folder / whole), abs=1e-4)
    for name in ("val_loss", "beyond_first_chunk_loss", "memory_off_beyond_first_chunk_loss", "sliding_perplexity"):
        assert figures[staged][name] == pytest.approx(figures[whole][name], rel=1e-4), name
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in (staged, whole))
    assert ours.keys() == theirs.keys()
    for name, exact in theirs.items():
        assert (ours[name] - exact).norm() <= 1e-3 * exact.norm(), name


@pytest.mark.parametrize(
    ("staged", "whole"), [("pp2-tp2", "one"), ("pp2-streams", "one-streams"), ("pp4-tied", "one-tied")]
)
def test_a_pipeline_trains_and_evaluates_as_one_process(runs, staged, whole):
    assert_same_run(runs, staged, whole)


@pytest.mark.slow
def test_other_pipelines_too(data, tmp_path):
    tied = {"model": {"tie_embeddings": True}, "optimizer": {"grad_clip": 0.2}}
    staged = {"pp2": {"parallel": {"pp": 2}}, "pp2-tied": {"parallel": {"pp": 2, "zero_stage": 0}, **tied}}
    found = make_runs(data, tmp_path, {1: {"one": {}, "one-tied": tied}, 2: staged})
    for name in staged:
        assert_same_run(found, name, name.replace("pp2", "one"))


def test_bf16_through_a_pipeline_follows_bf16_without(runs):
    folder, figures = runs
    exact, whole, staged = (losses(folder / name) for name in ("one", "tp2-bf16", "pp2-tp2-bf16"))
    # BF16 keeps 8 bits: a relative 2^-9 per operation moves a loss of 5.8 nats by a few hundredths at most
    assert staged == pytest.approx(whole, abs=0.05)
    assert staged == pytest.approx(exact, abs=0.05)
    assert staged[6] < staged[1] - 0.1
    assert figures["pp2-tp2-bf16"]["val_loss"] == pytest.approx(figures["tp2-bf16"]["val_loss"], abs=0.05)


def swelling(*arguments: str) -> None:
    """On a rank: the command, with an Elastic Memory that gains a coefficient with every chunk."""
    from megamem.memory.continuous.elastic_memory import ElasticMemory

    forward = ElasticMemory.forward

    def grows(self, hidden, state, chunk):
        output, new, losses = forward(self, hidden, state, chunk)
        return output, {**new, "coefficients": torch.cat((new["coefficients"], new["coefficients"][:, :1]), 1)}, losses

    ElasticMemory.forward = grows
    in_process(*arguments)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_mechanism_that_breaks_its_declaration_ends_the_run_in_one_line(data, tmp_path, stages):
    config = write_config(tmp_path / "run.yaml", tree(data, tmp_path / "runs", "run", {}))
    with Job(tmp_path / "job", stages, swelling, "train", str(config), f"parallel.pp={stages}") as job:
        assert ContractError.exit_code in job.codes(60)
        said = "".join(job.output(rank) for rank in range(stages))
    line = r"model\.layers\.[13] \(elastic_memory\): state coefficients has shape \[2, 9, .* declares \['batch', 8, .*"
    assert re.search(rf"megamem: (rank \d: )?{line}\n", said)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["parallel.pp=5"], "parallel.pp 5 is more than the 4 layers of the model (model.layers)"),
        (["parallel.pp=2", "parallel.placement=[4,0]"], "parallel.placement [4, 0] leaves stage 1 without layers"),
        (["parallel.pp=2", "training.bptt_chunks=3"], "training.bptt_chunks 3 does not divide the 4 chunks"),
        (["parallel.pp=2", "parallel.zero_stage=2"], "parallel.zero_stage 2 does not go with parallel.pp 2"),
        (["parallel.pp=2", "parallel.zero_stage=3"], "parallel.zero_stage 3 does not go with parallel.pp 2"),
        (["parallel.pp=2", "--processes", "3"], "3 processes cannot be split into TP 1 x PP 2"),
        (["parallel.pp=2", "parallel.dp=2", "--processes", "2"], "parallel.dp: 2 x TP 1 x PP 2 needs 4 processes"),
    ],
)
def test_impossible_pipelines_are_refused_before_anything_starts(data, tmp_path, arguments, line):
    config = write_config(tmp_path / "run.yaml", tree(data, tmp_path / "runs", "run", {}))
    result = CliRunner().invoke(app, ["train", str(config), *arguments])
    assert isinstance(result.exception, ConfigError)
    assert line in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def command(data, tmp_path_factory):
    """The command a user types, two stages; (folder of the run, stdout)."""
    folder = tmp_path_factory.mktemp("staged")
    config = write_config(folder / "run.yaml", tree(data, folder / "runs", "staged", {}))
    arguments = ["parallel.pp=2", "logging.record_step=2", "training.bptt_chunks=2", "parallel.placement=[3,1]"]
    code, out, err = finish(megamem("train", str(config), *arguments))
    assert (code, err) == (0, "")
    return folder / "runs" / "staged", out


def test_stages_are_printed(command):
    _, out = command
    assert "layout: PP 2 x TP 1 x DP 1, ZeRO 1, FP32" in out
    first = r"stage 0: layers 0-2, embedding: [\d,]+ parameters, \d+\.\d% of the operations, at most 3 chunks in flight"
    last = r"stage 1: layers 3-3, head: [\d,]+ parameters, \d+\.\d% of the operations, at most 2 chunks in flight"
    assert re.search(first, out)
    assert re.search(last, out)
    # one stage of two waits at both ends of 2 micro-batches of 4 chunks, and where the other has more to do
    (share,) = re.findall(r"bubble: ([\d.]+)% of the working time", out)
    assert float(share) > 12.5


def test_a_recorded_step_is_the_schedule_as_it_ran(command, tmp_path):
    folder, _ = command
    timeline = read_record(folder)
    for stage in range(2):
        actions = [event.action for event in sorted(timeline.events, key=lambda e: e.start) if event.stage == stage]
        assert actions == stage_order(stage, 2, 2, 4, 2)
    ended = {(event.stage, event.action): event.end for event in timeline.events}
    for event in timeline.events:
        before = event.stage - 1 if event.action.kind == "forward" else event.stage + 1
        assert ended.get((before, event.action), 0.0) <= event.start, "nothing starts before its input is there"
    picture = tmp_path / "schedule.png"
    sizes = ["--stages", "2", "--micro-batches", "2", "--chunks", "4", "--bptt-chunks", "2"]
    code, out, _ = finish(megamem("plan", *sizes, "--draw-schedule", str(picture), "--recorded", str(folder)))
    assert code == 0
    assert f"picture: {picture}" in out
    for path in (picture, tmp_path / "schedule-recorded.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_saved_weights_are_those_of_all_stages(command, runs):
    folder, _ = command
    ours, theirs = load_file(folder / "model.safetensors"), load_file(runs[0] / "one" / "model.safetensors")
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    assert all(torch.isfinite(value).all() for value in ours.values())
