"""One exit code for a job from those of its ranks."""

import signal

import pytest

from launchers.codes import of_ranks
from megamem.errors import STOPPED, ConfigError, DataError, NonFiniteError, StuckRankError


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({0: 1}, 1),
        ({1: DataError.exit_code, 0: 1}, DataError.exit_code),
        # a rank that lost its peer may be seen to fail first
        ({0: 1, 1: NonFiniteError.exit_code}, NonFiniteError.exit_code),
        ({0: -signal.SIGKILL, 1: StuckRankError.exit_code}, StuckRankError.exit_code),
        ({0: STOPPED, 1: STOPPED}, STOPPED),
        ({0: ConfigError.exit_code}, ConfigError.exit_code),
    ],
)
def test_a_telling_code_goes_first(codes, code, capsys):
    assert of_ranks(codes) == code
    assert capsys.readouterr().err == ""


def test_a_rank_killed_by_a_signal_is_named(capsys):
    assert of_ranks({3: -signal.SIGSEGV, 0: 1}) == 128 + signal.SIGSEGV
    assert capsys.readouterr().err == "megamem: rank 3 was killed by SIGSEGV\n"


def test_a_rank_that_lost_its_connection_first_does_not_hide_the_killed_one(capsys):
    assert of_ranks({0: 1, 1: -signal.SIGKILL}) == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in capsys.readouterr().err
