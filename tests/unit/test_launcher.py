"""One exit code for a job from those of its ranks and nodes; the signals that stop it."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from launchers.codes import code_of_nodes, code_of_ranks, code_of_stopped_ranks, first_reported_code, report_killed_rank
from launchers.targets.ssh import signals_passed_on
from megamem.errors import STOPPED, CheckpointError, ConfigError, DataError, NonFiniteError, StuckRankError
from megamem.parallel.control import Messages, Signer

KILLED = 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({}, 0),
        ({0: 0}, 0),
        ({0: 1}, 1),
        ({0: 0, 1: 1}, 1),
        ({1: DataError.exit_code, 0: 1}, DataError.exit_code),
        # a rank that lost its peer may be seen to fail first
        ({0: 1, 1: NonFiniteError.exit_code}, NonFiniteError.exit_code),
        ({0: -signal.SIGKILL, 1: StuckRankError.exit_code}, StuckRankError.exit_code),
        ({0: STOPPED, 1: STOPPED}, STOPPED),
        ({0: ConfigError.exit_code}, ConfigError.exit_code),
        ({3: -signal.SIGSEGV, 0: 1}, 128 + signal.SIGSEGV),
        ({0: 1, 1: -signal.SIGKILL}, KILLED),
    ],
)
def test_a_telling_code_goes_first(codes, code):
    assert code_of_ranks(codes) == code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({}, STOPPED),
        ({0: STOPPED, 1: STOPPED}, STOPPED),
        # before they listened to signals, or because a peer ended
        ({0: -signal.SIGTERM, 1: 1}, STOPPED),
        ({0: STOPPED, 1: CheckpointError.exit_code}, CheckpointError.exit_code),
        ({0: STOPPED, 1: -signal.SIGKILL}, KILLED),
    ],
)
def test_a_stop_that_went_wrong_is_none(codes, code):
    assert code_of_stopped_ranks(codes) == code


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 1], 1),
        ([1, DataError.exit_code, KILLED], DataError.exit_code),
        ([KILLED, STOPPED], STOPPED),  # the others were stopped, and killed where they took too long
        ([1, KILLED, 2 + KILLED, 1], 2 + KILLED),  # nothing says why: a signal says more than 1
    ],
)
def test_the_code_of_a_job_is_that_of_the_node_that_says_most(codes, code):
    assert code_of_nodes(codes) == code
    assert code_of_nodes(reversed(codes)) == code


def test_a_rank_killed_by_a_signal_is_named(capsys):
    codes = {0: 1, 3: -signal.SIGSEGV, 4: -signal.SIGKILL}
    report_killed_rank(codes, 128 + signal.SIGSEGV, " on a", "; and more")
    assert capsys.readouterr().err == "megamem: rank 3 on a was killed by SIGSEGV; and more\n"
    report_killed_rank(codes, DataError.exit_code)
    assert capsys.readouterr().err == ""


def messages():
    return Messages(HashStore(), Signer("token"), "round")


class TestWhatNodesTell:
    def test_a_code_that_says_why_is_told_at_once(self):
        told = messages()
        assert first_reported_code(told, lambda: (5, 0.0)) == 5
        assert first_reported_code(told, lambda: (6, 0.0)) == 5, "the first is that of all"

    def test_another_is_kept_back_for_a_better_one(self):
        """Of another node, or of another rank here that ends a little later."""
        told = messages()
        threading.Timer(0.3, lambda: told.write("code", "5")).start()
        assert first_reported_code(told, lambda: (1, 10.0)) == 5
        begun = time.monotonic()
        found = first_reported_code(messages(), lambda: (5, 0.0) if time.monotonic() > begun + 0.3 else (1, 10.0))
        assert found == 5
        assert time.monotonic() < begun + 5

    def test_but_not_for_ever(self):
        assert first_reported_code(messages(), lambda: (1, 0.2)) == 1


@pytest.mark.parametrize(("handler", "told"), [(signal.SIG_IGN, []), (signal.SIG_DFL, ["SIGHUP"])])
def test_ssh_passes_a_hangup_on_unless_it_is_ignored(handler, told):
    """As under nohup."""
    heard = []
    host = SimpleNamespace(send=heard.append, process=SimpleNamespace(poll=lambda: 0))
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with signals_passed_on([host]):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
        assert heard == told
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
