"""A run with phases is one run: interrupted in a later phase and resumed, it is the unbroken run, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest

from checkpoints.folder import checkpoints_in, open_checkpoint
from checkpoints.read import compare
from megamem.config.optimizer import OptimizerConfig
from megamem.pipeline.optimizer import learning_rate
from tests.integration.commands import CHUNK, run_tree
from tests.integration.ranks import Job
from tests.integration.resume_cases import begin_phases, train_each

pytestmark = pytest.mark.distributed

SHORT, LONG = 2 * CHUNK, 8 * CHUNK
STEPS, BOUNDARIES = 7, (3, 5)
PHASES = [
    # longer sequences, and other numbers of rows, micro-batches and windows
    {"from_step": 3, "sequence_length": LONG, "batch_tokens": 4 * LONG, "micro_batch_size": 1, "bptt_chunks": 4},
    {"from_step": 5, "batch_tokens": 8 * LONG},
]
LAYOUTS = {
    "tp1": (1, {}),
    "pp2": (2, {"pp": 2}),
    "dp2-zero2": (2, {"zero_stage": 2}),
    "tp2-dp2-zero3": (4, {"tp": 2, "zero_stage": 3}),
}
QUICK = ("tp1", "pp2", "dp2-zero2")
"""Those that `make test` tries."""
LEFT_OUT = {(layout, "-border") for layout in LAYOUTS if layout != "tp1"}


def tree(data, runs, name, layout, **training):
    model = {"layers": 4, "memory": [{"layers": [1, 3], "mixer": {"kind": "elastic_memory", "order": 8, "block": 8}}]}
    portions = {"steps": STEPS, "batch_tokens": 4 * SHORT, "micro_batch_size": 2, "phases": PHASES, **training}
    source = {"sequence_length": SHORT, "validation": []}
    return run_tree(
        data, runs, name=name, model=model, training=portions, data=source, logging={"every": 1},
        parallel=LAYOUTS[layout][1], evaluation={"every": 0}, checkpoint={"every": 1, "keep_last": 9},
    )  # fmt: skip


def train_all(folder, trees):
    """trees: by name, with the layout's number of processes."""
    for world in sorted({world for world, _ in trees.values()}):
        with Job(
            folder / f"world{world}", world, train_each, {k: t for k, (w, t) in trees.items() if w == world}
        ) as job:
            job.results()


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "phase", "tokens", "loss", "grad_norm", "lr")} for line in lines]


def train_layouts(data, folder, layouts):
    """Per layout a run straight through, one stopped inside the second phase and one at its beginning."""
    stops = {"inside": 4, "border": 3}

    def trees(**suffixes):
        return {
            f"{layout}{suffix}": (
                LAYOUTS[layout][0],
                tree(data, folder / "runs", f"{layout}{suffix}", layout, **changes),
            )
            for layout in layouts
            for suffix, changes in suffixes.items()
            if (layout, suffix) not in LEFT_OUT
        }

    stopped = {f"-{name}": {"stop_after": step} for name, step in stops.items()}
    train_all(folder / "first", trees(**{"": {}}, **stopped))
    for name, step in stops.items():
        if (layouts[0], f"-{name}") not in LEFT_OUT:
            assert checkpoints_in(folder / "runs" / f"{layouts[0]}-{name}" / "checkpoints")[-1].step == step
    train_all(folder / "second", trees(**{f"-{name}": {} for name in stops}))
    return folder / "runs"


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    return train_layouts(data, tmp_path_factory.mktemp("phases"), QUICK)


@pytest.mark.parametrize(("layout", "stopped"), [("tp1", "border"), *((layout, "inside") for layout in QUICK)])
def test_resumed_in_a_later_phase_it_is_the_unbroken_run(runs, layout, stopped):
    assert_unbroken(runs, layout, stopped)


def assert_unbroken(runs, layout, stopped):
    assert records(runs / f"{layout}-{stopped}") == records(runs / layout)
    for step in (4, STEPS):
        one, other = (
            open_checkpoint(runs / name / "checkpoints" / f"step-{step:08d}")
            for name in (layout, f"{layout}-{stopped}")
        )
        count, differences = compare(one, other)
        assert count > 0
        assert [str(difference) for difference in differences] == []


@pytest.mark.parametrize("layout", QUICK)
def test_all_layouts_train_alike(runs, layout):
    assert_alike(runs, layout, runs)


def assert_alike(runs, layout, reference):
    """FP32 sums in another order, over 7 steps."""
    losses = [record["loss"] for record in records(runs / layout)]
    assert losses == pytest.approx([record["loss"] for record in records(reference / "tp1")], abs=2e-4)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in QUICK])
def test_other_layouts_do_as_these(data, runs, tmp_path, layout):
    others = train_layouts(data, tmp_path, (layout,))
    assert_unbroken(others, layout, "inside")
    assert_alike(others, layout, runs)


def test_phases_and_tokens_are_recorded(runs):
    found = records(runs / "tp1")
    assert [record["phase"] for record in found] == [1, 1, 1, 2, 2, 3, 3]
    per_step = [4 * SHORT] * 3 + [4 * LONG] * 2 + [8 * LONG] * 2
    assert [record["tokens"] for record in found] == [sum(per_step[: n + 1]) for n in range(STEPS)]
    saved = open_checkpoint(runs / "tp1" / "checkpoints" / f"step-{STEPS:08d}").run()
    assert (saved["tokens"], saved["samples"]) == (sum(per_step), 4 * 3 + 4 * 2 + 8 * 2)
    assert [phase["first_step"] for phase in saved["phases"]] == list(BOUNDARIES)


def test_one_learning_rate_goes_over_all_steps(runs):
    rates = [record["lr"] for record in records(runs / "tp1")]
    assert rates == [learning_rate(OptimizerConfig(), step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize(
    "layout", [layout if layout in QUICK else pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS]
)
def test_an_engine_that_changed_is_one_that_was_built_so(data, tmp_path, layout):
    """The engine of the second phase's configuration, against one that began with the first's: same bits."""
    with Job(tmp_path / layout, LAYOUTS[layout][0], begin_phases, tree(data, tmp_path, "case", layout)) as job:
        for built, changed in job.results():
            assert built == changed


def test_a_phase_that_has_begun_cannot_change_and_later_ones_can(data, runs, tmp_path):
    shutil.copytree(runs / "tp1-inside" / "checkpoints" / "step-00000004", tmp_path / "run/checkpoints/step-00000004")
    other = [{**PHASES[0], "batch_tokens": 8 * LONG}, PHASES[1]]
    case = {"run": tree(data, tmp_path, "run", "tp1", phases=other)}
    with Job(tmp_path / "a", 1, train_each, case) as job, pytest.raises(AssertionError) as caught:
        job.results()
    assert "phases.after_step_3.batch_tokens was 1024 and is 2048; a run cannot go on with another" in str(caught.value)
    later = [PHASES[0], {"from_step": 6, "batch_tokens": 16 * LONG}]
    with Job(tmp_path / "b", 1, train_each, {"run": tree(data, tmp_path, "run", "tp1", phases=later)}) as job:
        job.results()
    assert [record["tokens"] for record in records(tmp_path / "run")] == [2816, 3840, 7936]
