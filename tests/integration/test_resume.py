"""A run that goes on from a checkpoint is the run that was never interrupted; layouts may change in between.

Every test has a short form, and a full one (20 steps, every pair of layouts) among the slow tests.
"""

import itertools
import json
import shutil
from dataclasses import dataclass

import pytest

from checkpoints.folder import Checkpoint, checkpoints_in, open_checkpoint
from checkpoints.read import compare, read_tensor
from checkpoints.storage import read_index
from checkpoints.verify import verify
from tests.integration.commands import CHUNK, run_tree
from tests.integration.ranks import Job
from tests.integration.resume_cases import reload, train_each
from tests.unit.data_helpers import make_shards

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Form:
    """How long runs are and which moves between layouts are tried."""

    half: int
    after: int
    """Steps after a move."""
    layouts: tuple[str, ...]
    """Whose halves are compared with the whole."""
    pairs: tuple[tuple[str, str], ...]
    """(saved under, read under)"""

    @property
    def steps(self) -> int:
        return 2 * self.half


ROWS, LENGTH = 4, 2 * CHUNK
MODEL = {
    "layers": 4,
    "memory": [
        {"layers": [1, 3], "mixer": {"kind": "elastic_memory", "order": 8, "block": 8}},
        {"layers": [2], "mixer": {"kind": "full_attention", "max_chunks": 3}},
    ],
}
MUP = {"mup": {"base_width": 16, "base_heads": 4}}
ADAPTIVE = {
    "adaptive": {"cutoffs": [40, 150, 200], "divisor": 2, "tie_projections": True}, "tie_embeddings": True,
}  # fmt: skip
STREAMS = {
    "data": {"feeding": "streams", "documents": "pad"}, "training": {"bptt_chunks": 2},
    "model": {"dropout": 0.1, "attention_dropout": 0.1},
}  # fmt: skip
"""Text that is read on from step to step; its runs drop values too, which a resumption must drop again."""
VALIDATED = {"evaluation": {"every": 1}}
SPIKES = {"skip_spikes": 6.0, "spike_window": 4}
LAYOUTS = {
    "tp1": (1, {}),
    "tp1-mup": (1, {"model": MUP}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "tp2-streams": (2, {"parallel": {"tp": 2}, **STREAMS, **VALIDATED, "training": {"bptt_chunks": 2, **SPIKES}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "pp2-tied": (2, {"parallel": {"pp": 2}, "model": {"tie_embeddings": True}, "training": SPIKES, **VALIDATED}),
    "pp2-adaptive": (2, {"parallel": {"pp": 2}, "model": ADAPTIVE}),
    "tp2-adaptive": (2, {"parallel": {"tp": 2}, "model": ADAPTIVE}),
    "dp2-zero0": (2, {"parallel": {"zero_stage": 0}, "training": {"micro_batch_size": 1}}),
    "tp2-dp2-zero1": (4, {"parallel": {"tp": 2}}),
    "tp2-dp2-zero2": (4, {"parallel": {"tp": 2, "zero_stage": 2}}),
    "tp2-dp2-zero3": (4, {"parallel": {"tp": 2, "zero_stage": 3}}),
    "tp2-dp2-streams": (4, {"parallel": {"tp": 2}, **STREAMS}),
    "pp2-tp2": (4, {"parallel": {"pp": 2, "tp": 2}}),
    "pp2-tp2-mup": (4, {"parallel": {"pp": 2, "tp": 2}, "model": MUP}),
    "pp2-tp2-streams": (4, {"parallel": {"pp": 2, "tp": 2}, **STREAMS}),
    "pp2-tp2-bf16": (4, {"parallel": {"pp": 2, "tp": 2}, "training": {"precision": "bf16"}}),
    "tp2-dp2-zero3-bf16": (4, {"parallel": {"tp": 2, "zero_stage": 3}, "training": {"precision": "bf16"}}),
}


MOVES = ["tp1", "tp2", "tp2-dp2-zero1", "tp2-dp2-zero3", "pp2", "pp2-tp2"]
ACROSS = ("tp1-mup", "pp2-tp2-mup")
CLUSTERS = ("pp2-adaptive", "tp2-adaptive")
QUICK = ("tp1", "tp1-mup", "tp2-streams", "pp2-tied", "pp2-adaptive", "tp2-dp2-zero3", "pp2-tp2", "pp2-tp2-bf16")
FORMS = {
    "short": Form(
        2, 2, QUICK,
        (
            ("tp1", "pp2-tp2"), ("pp2-tp2", "tp2-dp2-zero3"), ("tp2-dp2-zero3", "tp1"), ACROSS, CLUSTERS,
        ),
    ),
    "full": Form(10, 5, tuple(LAYOUTS), (*itertools.product(MOVES, MOVES), ACROSS, CLUSTERS)),
}  # fmt: skip


@pytest.fixture(scope="module", params=["short", pytest.param("full", marks=pytest.mark.slow)])
def form(request):
    return FORMS[request.param]


def tree(corpus, runs, name, layout, form, **sections):
    """A run that logs each step and saves in the middle and at the end."""
    made = LAYOUTS[layout][1]
    merged = {key: {**made.get(key, {}), **sections.get(key, {})} for key in {*made, *sections}}
    training = {"steps": form.steps, "batch_tokens": ROWS * LENGTH, **merged.pop("training", {})}
    checkpoint = {"every": form.half, "keep_last": 5, **merged.pop("checkpoint", {})}
    validated = {"every": 0, **merged.pop("evaluation", {})}
    source = {"sequence_length": LENGTH, **({} if validated["every"] else {"validation": []}), **merged.pop("data", {})}
    return run_tree(
        corpus, runs, name=name, model={**MODEL, **merged.pop("model", {})}, training=training, checkpoint=checkpoint,
        data=source, evaluation=validated, logging={"every": 1}, **merged,
    )  # fmt: skip


def run_all(folder, trees):
    """Each run on the processes its layout needs, those of one size in one world of fresh processes."""
    for world in (1, 2, 4):
        chosen = {name: t for name, (size, t) in trees.items() if size == world}
        if chosen:
            with Job(folder / f"world{world}", world, train_each, chosen) as job:
                job.results()


@pytest.fixture(scope="module")
def runs(form, data, tmp_path_factory):
    """Per layout two runs: `NAME` straight through, `NAME-halves` in two lots of fresh processes."""
    folder = tmp_path_factory.mktemp("resume")

    def trees(suffix="", **sections):
        return {
            f"{name}{suffix}": (size, tree(data, folder / "runs", f"{name}{suffix}", name, form, **sections))
            for name, (size, _) in LAYOUTS.items()
            if name in form.layouts
        }

    run_all(folder / "first", {**trees(), **trees("-halves", training={"stop_after": form.half})})
    for name in form.layouts:
        assert [c.step for c in checkpoints_in(folder / "runs" / f"{name}-halves" / "checkpoints")] == [form.half]
    run_all(folder / "second", trees("-halves"))
    return folder / "runs"


def saved(runs, name, step) -> Checkpoint:
    return open_checkpoint(runs / name / "checkpoints" / f"step-{step:08d}")


def records(runs, name):
    """What was logged of each step, and of each validation."""
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "tokens", "loss", "grad_norm", "lr", "skipped", "skipped_spikes", "val_loss")
    return [{key: record[key] for key in kept if key in record} for record in map(json.loads, lines)]


def test_two_halves_are_the_whole_bit_for_bit(form, runs):
    for name, step in itertools.product(form.layouts, (form.half, form.steps)):
        straight, halves = saved(runs, name, step), saved(runs, f"{name}-halves", step)
        verify(halves)
        count, differences = compare(straight, halves)
        assert [str(difference) for difference in differences] == [], name
        masters = [tensor for tensor in read_index(straight.path) if tensor.startswith("master/")]
        assert count >= 3 * len(masters) + LAYOUTS[name][0], "weights, two moments, a generator per rank"
        one, other = ({k: v for k, v in c.run().items() if k != "config"} for c in (straight, halves))
        assert one == other, name
    for name in form.layouts:
        assert records(runs, f"{name}-halves") == records(runs, name), name
        logged = records(runs, name)
        assert [record["step"] for record in logged if "loss" in record] == list(range(1, form.steps + 1))
        validated = [record["step"] for record in logged if "val_loss" in record]
        every = LAYOUTS[name][1].get("evaluation", {}).get("every", form.steps + 1)
        assert validated == list(range(every, form.steps + 1, every)), name


def test_streams_save_their_memory(form, runs):
    """Elastic Memory's coefficients and full attention's keys and values, of every lane."""
    for name in [name for name in form.layouts if "streams" in name]:
        checkpoint = saved(runs, name, form.steps)
        coefficients = read_tensor(checkpoint, "states/layers.1/coefficients")
        assert coefficients.shape[0] == ROWS, "a lane per row of the batch"
        assert all(lane.abs().max() > 0 for lane in coefficients)
        assert [n for n in read_index(checkpoint.path) if n.startswith("states/layers.2/")], "growing lists"


@pytest.fixture(scope="module")
def moved(form, data, runs, tmp_path_factory):
    """Checkpoints of the middle, loaded under another layout: saved again at once, and gone on with."""
    folder = tmp_path_factory.mktemp("moved")
    reloads, trees = {1: {}, 2: {}, 4: {}}, {}
    for source, target in form.pairs:
        name, size = f"{source}--{target}", LAYOUTS[target][0]
        origin = str(saved(runs, source, form.half).path)
        sections = {"training": {"stop_after": form.half + form.after}, "checkpoint": {"resume": origin}}
        case = tree(data, folder / "runs", name, target, form, **sections)
        reloads[size][name] = {"tree": case, "from": origin, "to": str(folder / "again" / name)}
        trees[name] = size, case
    for size, cases in reloads.items():
        with Job(folder / f"reload{size}", size, reload, cases) as job:
            job.results()
    run_all(folder, trees)
    return folder


def test_another_layout_reads_the_same_bits_and_goes_on(form, runs, moved):
    for source, target in form.pairs:
        name = f"{source}--{target}"
        origin = saved(runs, source, form.half)
        again = open_checkpoint(moved / "again" / name / origin.path.name)
        _, differences = compare(origin, again)
        # generators belong to ranks, and are not saved again here
        assert [str(d) for d in differences if not d.name.startswith("rng/")] == [], name
        assert again.run()["optimizer_steps"] == origin.run()["optimizer_steps"] == form.half
        found = records(moved / "runs", name)
        expected = records(runs, source)[form.half : form.half + form.after]
        assert [record["step"] for record in found] == [record["step"] for record in expected]
        # FP32 sums in another order, carried through some AdamW steps
        assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], abs=1e-5), name


def test_streams_move_too(form, data, runs, tmp_path):
    """Memory states of lanes, from TP 2 on two processes to PP 2 x TP 2 and TP 2 x DP 2 on four."""
    origin = saved(runs, "tp2-streams", form.half)
    trees = {}
    for target in ("pp2-tp2-streams", "tp2-dp2-streams"):
        sections = {"training": {"stop_after": form.half + form.after}, "checkpoint": {"resume": str(origin.path)}}
        trees[target] = 4, tree(data, tmp_path / "runs", target, target, form, **sections)
    run_all(tmp_path, trees)
    logged = [record["loss"] for record in records(runs, "tp2-streams") if "loss" in record]
    expected = logged[form.half : form.half + form.after]
    for target in trees:
        found = [record["loss"] for record in records(tmp_path / "runs", target) if "loss" in record]
        assert found == pytest.approx(expected, abs=1e-5)


def test_lanes_with_memories_of_different_age(tmp_path):
    """Short documents begin at different steps in each lane, so that growing lists have different lengths."""
    data = tmp_path / "data"
    make_shards(data, tuple(40 + 37 * i % 150 for i in range(24)), name="train", seed=3)
    make_shards(data, (300,), name="validation", seed=100)
    sections = {"data": {"feeding": "streams", "documents": "pad"}, "checkpoint": {"every": 1, "keep_last": 9}}
    micro = {"bptt_chunks": 2, "micro_batch_size": 1}
    form = Form(3, 2, (), ())

    def trees(layout, **training):
        for name in ("straight", "halves", "dp2"):
            yield name, tree(data, tmp_path / "runs", name, layout, form, training={**micro, **training}, **sections)

    one = dict(trees("tp1"))
    half = dict(trees("tp1", stop_after=form.half))
    run_all(tmp_path / "first", {"straight": (1, one["straight"]), "halves": (1, half["halves"])})
    checkpoint = saved(tmp_path / "runs", "halves", form.half)
    (entries,) = [name for name in read_index(checkpoint.path) if name.endswith(".entries")]
    counts = read_tensor(checkpoint, entries).tolist()
    assert len(counts) == ROWS
    assert len(set(counts)) > 1, f"the lanes are alike: {counts}"
    moved = tree(
        data, tmp_path / "runs", "dp2", "tp1", form, training=micro,
        **{**sections, "checkpoint": {**sections["checkpoint"], "resume": str(checkpoint.path)}},
    )  # fmt: skip
    run_all(tmp_path / "second", {"halves": (1, one["halves"]), "dp2": (2, moved)})
    straight, halves = (saved(tmp_path / "runs", name, form.steps) for name in ("straight", "halves"))
    assert [str(difference) for difference in compare(straight, halves)[1]] == []
    expected = [record["loss"] for record in records(tmp_path / "runs", "straight")]
    assert [record["loss"] for record in records(tmp_path / "runs", "halves")] == expected
    found = [record["loss"] for record in records(tmp_path / "runs", "dp2")]
    assert found == pytest.approx(expected[form.half :], abs=1e-5)


def test_a_finished_run_has_nothing_left_to_do(form, data, runs, tmp_path):
    """Its figures are given again, and nothing is written."""
    shutil.copytree(runs / "tp1", tmp_path / "tp1")
    before = {p.name: p.read_bytes() for p in (tmp_path / "tp1").iterdir() if p.is_file()}
    run_all(tmp_path, {"tp1": (1, tree(data, tmp_path, "tp1", "tp1", form))})
    after = {p.name: p.read_bytes() for p in (tmp_path / "tp1").iterdir() if p.is_file()}
    for changed in ("config.yaml", "environment.json", "config-before-1.yaml", "lock"):
        before.pop(changed, None), after.pop(changed, None)
    assert "result.json" in before
    assert after == before
    assert [c.step for c in checkpoints_in(tmp_path / "tp1" / "checkpoints")] == [form.half, form.steps]


def test_a_run_from_another_ones_checkpoint_goes_on_from_its_own(form, data, runs, tmp_path):
    """As under a launcher that restarts the same command."""
    origin = str(saved(runs, "tp1", form.half).path)

    def branch(**training):
        case = tree(data, tmp_path, "branch", "tp1", form, checkpoint={"resume": origin, "every": 1}, training=training)
        return {"branch": (1, case)}

    run_all(tmp_path / "first", branch(stop_after=form.half + 1))
    run_all(tmp_path / "second", branch())
    assert records(tmp_path, "branch") == records(runs, "tp1")[form.half :]
    ends = saved(tmp_path, "branch", form.steps), saved(runs, "tp1", form.steps)
    assert [str(difference) for difference in compare(*ends)[1]] == []
