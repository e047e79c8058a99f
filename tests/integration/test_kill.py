"""The short form of tests/integration/kill.py: a job that is killed again and again loses nothing."""

import pytest

from tests.integration.commands import CHUNK
from tests.integration.kill import EVERY, SAVES, torment

STEPS = EVERY * SAVES

pytestmark = pytest.mark.distributed

LONGER_FROM = 1
LONGER = {
    "parallel": {"tp": 2},
    "training": {
        "steps": STEPS, "batch_tokens": 8 * CHUNK, "micro_batch_size": 4,
        "phases": [{"from_step": LONGER_FROM, "sequence_length": 8 * CHUNK, "micro_batch_size": 1}],
    },
    "data": {"documents": "join", "reset": "exact", "sequence_length": 2 * CHUNK, "validation": []},
}  # fmt: skip
"""Sequences of joined documents, four times as long after the first step."""


@pytest.mark.parametrize(
    ("layout", "seed"),
    [
        ({"parallel": {"tp": 2}}, 1),
        pytest.param(
            {"parallel": {"pp": 2}, "data": {"feeding": "streams", "documents": "pad"}}, 2, marks=pytest.mark.slow
        ),
    ],
    ids=["tp2", "pp2-streams"],
)
def test_kills_at_random_moments(data, tmp_path, layout, seed):
    lives = torment(data, tmp_path, 3, seed, layout)
    killed = [life for life in lives if life.signal == "SIGKILL"]
    assert (len(killed), len(lives)) == (3, 4)
    assert sum(life.in_save for life in killed) >= 1, "every second kill is aimed at a save"
    assert lives[-1].newest > 0, "some save was completed"


@pytest.mark.slow
def test_kills_in_a_phase_with_longer_sequences(data, tmp_path):
    # the fourth life is asked to end and saves; the fifth goes on from there and is killed
    *_, asked, last = torment(data, tmp_path, 4, 3, LONGER)
    assert (asked.signal, last.signal) == ("SIGTERM", "SIGKILL")
    assert last.went_on_from == asked.newest > LONGER_FROM, "it began inside the second phase"
