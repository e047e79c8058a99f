"""A run that goes on from a checkpoint is the run that was never interrupted; layouts may change in between."""

import json
import shutil

import pytest

from checkpoints.folder import Checkpoint, at, checkpoints_in, verify
from checkpoints.read import compare, whole
from checkpoints.storage import read_index
from tests.integration.commands import run_tree
from tests.integration.ranks import Job
from tests.integration.resume_cases import reload, train_each

pytestmark = pytest.mark.distributed

STEPS, HALF = 20, 10
MODEL = {
    "layers": 4,
    "memory": [
        {"layers": [1, 3], "mixer": {"kind": "elastic_memory", "order": 8, "block": 8}},
        {"layers": [2], "mixer": {"kind": "full_attention", "max_chunks": 3}},
    ],
}
STREAMS = {"data": {"feeding": "streams"}, "training": {"bptt_chunks": 2}}
LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "tp2-streams": (2, {"parallel": {"tp": 2}, **STREAMS}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "dp2-zero0": (2, {"parallel": {"zero_stage": 0}, "training": {"micro_batch_size": 1}}),
    "tp2-dp2-zero1": (4, {"parallel": {"tp": 2}}),
    "tp2-dp2-zero2": (4, {"parallel": {"tp": 2, "zero_stage": 2}}),
    "tp2-dp2-zero3": (4, {"parallel": {"tp": 2, "zero_stage": 3}}),
    "tp2-dp2-streams": (4, {"parallel": {"tp": 2}, **STREAMS}),
    "pp2-tp2": (4, {"parallel": {"pp": 2, "tp": 2}}),
    "pp2-tp2-streams": (4, {"parallel": {"pp": 2, "tp": 2}, **STREAMS}),
    "pp2-tp2-bf16": (4, {"parallel": {"pp": 2, "tp": 2}, "training": {"precision": "bf16"}}),
    "tp2-dp2-zero3-bf16": (4, {"parallel": {"tp": 2, "zero_stage": 3}, "training": {"precision": "bf16"}}),
}


def tree(data, runs, name, layout, **sections):
    """A run of 20 steps that logs each and saves every 10."""
    made = LAYOUTS[layout][1]
    merged = {key: {**made.get(key, {}), **sections.get(key, {})} for key in {*made, *sections}}
    training = {"steps": STEPS, **merged.pop("training", {})}
    checkpoint = {"every": HALF, "keep_last": 5, **merged.pop("checkpoint", {})}
    source = {"validation": [], **merged.pop("data", {})}
    return run_tree(
        data, runs, name=name, model=MODEL, training=training, checkpoint=checkpoint, data=source,
        evaluation={"every": 0}, logging={"every": 1}, **merged,
    )  # fmt: skip


def run_all(folder, trees):
    """Each run on the processes its layout needs, those of one size in one world of fresh processes."""
    for world in (1, 2, 4):
        chosen = {name: t for name, (size, t) in trees.items() if size == world}
        if chosen:
            with Job(folder / f"world{world}", world, train_each, chosen) as job:
                job.results(400)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Per layout two runs: `NAME` straight through, `NAME-halves` in two lots of fresh processes."""
    folder = tmp_path_factory.mktemp("resume")
    sizes = {name: size for name, (size, _) in LAYOUTS.items()}
    first = {name: (sizes[name], tree(data, folder / "runs", name, name)) for name in LAYOUTS}
    half = {"training": {"stop_after": HALF}}
    halves = {f"{n}-halves": (sizes[n], tree(data, folder / "runs", f"{n}-halves", n, **half)) for n in LAYOUTS}
    run_all(folder / "first", {**first, **halves})
    for name in LAYOUTS:
        assert [c.step for c in checkpoints_in(folder / "runs" / f"{name}-halves" / "checkpoints")] == [HALF]
    whole_runs = {f"{n}-halves": (sizes[n], tree(data, folder / "runs", f"{n}-halves", n)) for n in LAYOUTS}
    run_all(folder / "second", whole_runs)
    return folder / "runs"


def saved(runs, name, step) -> Checkpoint:
    return at(runs / name / "checkpoints" / f"step-{step:08d}")


def records(runs, name):
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "tokens", "loss", "grad_norm", "lr", "skipped")
    return [{key: record[key] for key in kept} for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_halves_are_the_whole_bit_for_bit(runs, name):
    for step in (HALF, STEPS):
        straight, halves = saved(runs, name, step), saved(runs, f"{name}-halves", step)
        verify(halves)
        count, differences = compare(straight, halves)
        assert [str(difference) for difference in differences] == []
        masters = [tensor for tensor in read_index(straight.path) if tensor.startswith("master/")]
        assert count >= 3 * len(masters) + LAYOUTS[name][0], "weights, two moments, a generator per rank"
        assert {k: v for k, v in straight.run().items() if k != "config"} == {
            k: v for k, v in halves.run().items() if k != "config"
        }
    assert records(runs, f"{name}-halves") == records(runs, name)
    assert [record["step"] for record in records(runs, name)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "streams" in name])
def test_streams_save_their_memory(runs, name):
    """Elastic Memory's coefficients and full attention's keys and values, of every lane."""
    checkpoint = saved(runs, name, STEPS)
    coefficients = whole(checkpoint, "states/layers.1/coefficients")
    assert coefficients.shape[0] == 4, "a lane per row of the batch"
    assert all(lane.abs().max() > 0 for lane in coefficients)
    assert [n for n in read_index(checkpoint.path) if n.startswith("states/layers.2/")], "entries of a growing list"


MOVES = ["tp1", "tp2", "tp2-dp2-zero1", "tp2-dp2-zero3", "pp2", "pp2-tp2"]


@pytest.fixture(scope="module")
def moved(data, runs, tmp_path_factory):
    """Every layout's checkpoint of step 10, loaded under every other: saved again at once, and gone on with."""
    folder = tmp_path_factory.mktemp("moved")
    reloads, trees = {1: {}, 2: {}, 4: {}}, {}
    for source in MOVES:
        for target in MOVES:
            name = f"{source}--{target}"
            origin = saved(runs, source, HALF)
            size = LAYOUTS[target][0]
            case = tree(data, folder / "runs", name, target, checkpoint={"resume": str(origin.path)})
            reloads[size][name] = {"tree": case, "from": str(origin.path), "to": str(folder / "again" / name)}
            case = tree(
                data, folder / "runs", name, target,
                training={"stop_after": HALF + 5}, checkpoint={"resume": str(origin.path)},
            )  # fmt: skip
            trees[name] = size, case
    for size, cases in reloads.items():
        with Job(folder / f"reload{size}", size, reload, cases) as job:
            job.results(300)
    run_all(folder, trees)
    return folder


@pytest.mark.parametrize("target", MOVES)
@pytest.mark.parametrize("source", MOVES)
def test_another_layout_reads_the_same_bits_and_goes_on(runs, moved, source, target):
    name = f"{source}--{target}"
    origin, again = saved(runs, source, HALF), at(moved / "again" / name / f"step-{HALF:08d}")
    _, differences = compare(origin, again)
    # generators belong to ranks, and are not saved again here
    assert [str(d) for d in differences if not d.name.startswith("rng/")] == []
    assert again.run()["optimizer_steps"] == origin.run()["optimizer_steps"] == HALF
    found = records(moved / "runs", name)
    expected = records(runs, source)[HALF : HALF + 5]
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    # FP32 sums in another order, carried through 5 AdamW steps
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], abs=1e-5)


def test_streams_move_too(data, runs, tmp_path):
    """Memory states of lanes, from TP 2 on two processes to PP 2 x TP 2 and TP 2 x DP 2 on four."""
    origin = saved(runs, "tp2-streams", HALF)
    trees = {}
    for target in ("pp2-tp2-streams", "tp2-dp2-streams"):
        sections = {"training": {"stop_after": HALF + 5}, "checkpoint": {"resume": str(origin.path)}}
        trees[target] = 4, tree(data, tmp_path / "runs", target, target, **sections)
    run_all(tmp_path, trees)
    expected = [record["loss"] for record in records(runs, "tp2-streams")[HALF : HALF + 5]]
    for target in trees:
        found = [record["loss"] for record in records(tmp_path / "runs", target)]
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_finished_run_has_nothing_left_to_do(data, runs, tmp_path):
    shutil.copytree(runs / "tp1", tmp_path / "tp1")
    run_all(tmp_path, {"tp1": (1, tree(data, tmp_path, "tp1", "tp1"))})
    assert records(tmp_path, "tp1") == records(runs, "tp1")
    assert [c.step for c in checkpoints_in(tmp_path / "tp1" / "checkpoints")] == [HALF, STEPS]
