"""A loss that is far too high on one rank: all ranks skip the step, though everything is finite."""

from __future__ import annotations

import pytest

from tests.integration import bad_steps
from tests.integration.ranks import Job
from tests.integration.test_bad_steps import DP2, STREAMS, TP2, case

pytestmark = pytest.mark.distributed

SPIKE_STEP, STEPS, WINDOW = 5, 7, 8


def spiking(target, value, parallel, zero, precision="fp32", **sections):
    made = case(target, value, parallel, zero, precision, grad_clip=1.0, **sections)
    made["config"]["training"] |= {"skip_spikes": 6.0, "spike_window": WINDOW}
    return made


CASES = {
    # one element of a matrix that only the guilty rank holds; one token of that rank
    "tp2-zero0-gradient": spiking("embedding", 1e5, TP2, 0),
    "tp2-zero1-gradient": spiking("query.weight", 1e5, TP2, 1),
    "dp2-zero1-loss": spiking("loss", 1e5, DP2, 1, "bf16"),
    "dp2-zero2-streams": spiking("loss", 1e5, DP2, 2, **STREAMS),
    "dp2-zero3-loss": spiking("loss", 1e5, DP2, 3),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("spikes"), 2, bad_steps.spikes, CASES, SPIKE_STEP, STEPS) as job:
        return job.results()


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_skip_it_and_no_other_step(verdicts, name):
    for rank in range(2):
        found = verdicts[rank][name]
        assert found["spikes"] == [float(step == SPIKE_STEP) for step in range(STEPS)]
        assert found["bad"] == [0.0] * STEPS
        assert found["updates"] == [1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("name", CASES)
def test_weights_and_moments_stay(verdicts, name):
    for rank in range(2):
        unchanged = verdicts[rank][name]["unchanged"]
        assert all(unchanged[part] for part in ("weights", "own", "model"))


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_remember_the_same(verdicts, name):
    one, other = (verdicts[rank][name]["history"] for rank in range(2))
    assert one[-STEPS:] == other[-STEPS:]
    assert len(one) == WINDOW
