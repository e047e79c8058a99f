"""A value that is not finite on one rank: all ranks skip the step together, and nothing of it remains."""

from __future__ import annotations

import math

import pytest

from tests.integration import bad_steps
from tests.integration.ranks import Job

pytestmark = pytest.mark.distributed

TP2, DP2 = {"tp": 2}, {"tp": 1}
MODEL = {"layers": 2, "memory": [{"layers": [1], "mixer": {"kind": "elastic_memory", "order": 8, "block": 8}}]}
STREAMS = {"data": {"feeding": "streams", "documents": "pad"}}


def case(target, value, parallel, zero, precision="fp32", grad_clip=0.0, **sections):
    training = {"precision": precision, "bptt_chunks": 2, "micro_batch_size": 2 * parallel["tp"]}
    config = {
        "model": MODEL, "parallel": parallel | {"zero_stage": zero}, "training": training,
        "optimizer": {"grad_clip": grad_clip}, **sections,
    }  # fmt: skip
    return {"config": config, "target": target, "value": value}


CASES = {
    "tp2-zero2-matrix": case("embedding", math.inf, TP2, 2, grad_clip=1.0),
    "dp2-zero3-matrix": case("embedding", math.inf, DP2, 3, grad_clip=1.0),
    "tp2-zero0-loss": case("loss", math.nan, TP2, 0),
    "dp2-zero1-loss": case("loss", math.inf, DP2, 1),
    "tp2-zero1-streams": case("state", math.nan, TP2, 1, **STREAMS),
    "dp2-zero2-streams": case("loss", math.nan, DP2, 2, **STREAMS),
}
# norms are replicated over tensor-parallel ranks and stand in the second parameter group, matrices in the first
GRID = {
    **{
        f"{layout}-zero{zero}-norm": case("norm", math.nan, parallel, zero)
        for layout, parallel in (("tp2", TP2), ("dp2", DP2))
        for zero in range(4)
    },
    **{
        f"{layout}-zero{zero}-bf16": case("norm", math.inf, parallel, zero, "bf16", grad_clip=1.0)
        for layout, parallel in (("tp2", TP2), ("dp2", DP2))
        for zero in (1, 2)
    },
}
QUICK = ("tp2-zero3-norm", "dp2-zero0-norm", "tp2-zero1-bf16", "dp2-zero2-bf16")
CASES |= {name: GRID.pop(name) for name in QUICK}


def verdicts_of(folder, cases):
    """What each rank found, by case."""
    with Job(folder, 2, bad_steps.cases, cases) as job:
        return job.results()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    return verdicts_of(tmp_path_factory.mktemp("bad-steps"), CASES)


def assert_all_ranks_agree(verdicts, name):
    for rank in range(2):
        found = verdicts[rank][name]
        assert found["bad"] == [float(step == bad_steps.BAD_STEP) for step in range(bad_steps.STEPS)]
        assert all(norm is not None for step, norm in enumerate(found["norms"]) if step != bad_steps.BAD_STEP)


def assert_everything_stays(verdicts, name):
    for rank in range(2):
        found = verdicts[rank][name]
        assert found["moments"] > 0
        assert found["unchanged"] == {"weights": True, "own": True, "states": True, "model": True}
        assert (found["states"] > 0) == ("streams" in name)


def assert_the_run_goes_on(verdicts, name):
    for rank in range(2):
        found = verdicts[rank][name]
        assert found["moved later"]
        assert found["finite"]
        assert all(found["as if the step had not been"].values())
    assert verdicts[0][name]["checksum"] == verdicts[1][name]["checksum"]


@pytest.mark.parametrize("name", CASES)
class TestBadStep:
    def test_all_ranks_agree(self, verdicts, name):
        assert_all_ranks_agree(verdicts, name)

    def test_weights_moments_and_memory_stay(self, verdicts, name):
        assert_everything_stays(verdicts, name)

    def test_the_run_goes_on_as_if_the_step_had_not_been(self, verdicts, name):
        assert_the_run_goes_on(verdicts, name)


@pytest.mark.slow
def test_every_stage_of_zero(tmp_path):
    verdicts = verdicts_of(tmp_path, GRID)
    for name in GRID:
        assert_all_ranks_agree(verdicts, name)
        assert_everything_stays(verdicts, name)
        assert_the_run_goes_on(verdicts, name)


@pytest.mark.parametrize("exact", [False, True], ids=["at chunk borders", "inside chunks"])
def test_a_row_whose_document_ended_in_a_bad_step_begins_afresh(tmp_path, exact):
    """What follows it is another document, and a row that goes on keeps the memory from before the step."""
    with Job(tmp_path, 1, bad_steps.ended_documents, exact) as job:
        (found,) = job.results()
    assert found["bad"] == 1.0
    assert all(norm > 0 for norm in found["before"]), "both rows have a memory to lose"
    assert not found["after"][0].any()
    assert found["after"][1].equal(found["kept"][1])


def test_gathering_shards(tmp_path):
    with Job(tmp_path, 2, bad_steps.gathered) as job:
        results = job.results()
    whole = [[float(6 * row + column) for column in range(6)] for row in range(4)]
    assert results == [{"0": whole, "1": whole, "None": whole}] * 2
