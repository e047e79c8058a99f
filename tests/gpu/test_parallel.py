"""Layouts of several CUDA devices over NCCL against one process on one device."""

import pytest

from tests.gpu.parallel import LAYOUTS, assert_follows, losses_of, run_and_kill, run_to_end, tree_of

PRECISIONS = ["fp32", "bf16"]


def needing_devices(names):
    return [pytest.param(name, id=name, marks=pytest.mark.devices(LAYOUTS[name][0])) for name in names]


@pytest.fixture(scope="module")
def alone():
    return losses_of(1, "cuda", ["alone"], PRECISIONS)


@pytest.mark.parametrize("name", needing_devices(LAYOUTS))
def test_losses_are_those_of_one_process(name, alone):
    found = losses_of(LAYOUTS[name][0], "cuda", [name], PRECISIONS)
    for precision in PRECISIONS:
        assert_follows(found[f"{name} {precision}"], alone[f"alone {precision}"], precision)


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """Losses of a run that nothing interrupts, in one process."""
    return run_to_end(1, tree_of(corpus, tmp_path_factory.mktemp("straight"), "straight", "cuda", {}))


@pytest.mark.parametrize("name", needing_devices(LAYOUTS))
def test_a_killed_run_goes_on(name, corpus, straight, tmp_path):
    world, parallel = LAYOUTS[name]
    tree = tree_of(corpus, tmp_path, name, "cuda", parallel)
    run_and_kill(world, tree)
    assert_follows(run_to_end(world, tree), straight, "fp32")


MOVES = [("tp2", "dp2-zero3"), ("dp2-zero2", "pp2"), ("pp2", "tp2-pp2"), ("tp2-pp2", "dp2-zero1")]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*move, marks=pytest.mark.devices(max(LAYOUTS[name][0] for name in move))) for move in MOVES],
)
def test_a_run_goes_on_in_another_layout(before, after, corpus, straight, tmp_path):
    world, parallel = LAYOUTS[before]
    run_to_end(world, tree_of(corpus, tmp_path, "moved", "cuda", parallel, stop_after=4))
    world, parallel = LAYOUTS[after]
    assert_follows(run_to_end(world, tree_of(corpus, tmp_path, "moved", "cuda", parallel)), straight, "fp32")
