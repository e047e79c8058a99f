"""The short form of tests/integration/kill.py: a job that is killed again and again loses nothing."""

import pytest

from tests.integration.kill import torment

pytestmark = [pytest.mark.distributed, pytest.mark.alone]


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
