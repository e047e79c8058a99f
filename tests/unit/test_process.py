"""What an agent's process needs around torchrun: signals as exceptions, patience with its limits, shares of cores."""

import os
import signal
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from launchers import process
from launchers.node import Node, parse_node_counts
from launchers.process import SAME_SIGNAL_S, Signals, result_within, run_interruptibly, shared_cores
from launchers.rendezvous import _alternatives
from megamem.errors import ConfigError

# signals


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the signals' clock shows."""
    now = [1000.0]
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_to_stop_are_exceptions(number):
    inherited = signal.signal(number, signal.default_int_handler)  # under nohup the tests were told to ignore SIGHUP
    try:
        with pytest.raises(SignalException, match=f"got {signal.Signals(number).name}") as raised, Signals():
            signal.raise_signal(number)
        assert raised.value.sigval == number
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, inherited)


def test_signals_within_a_second_are_one(clock, interruptible):
    """A scheduler may signal this process and its parent, which passes it on."""
    with Signals():
        with pytest.raises(SignalException):
            signal.raise_signal(signal.SIGTERM)
        clock[0] += 0.9 * SAME_SIGNAL_S
        signal.raise_signal(signal.SIGINT)
        clock[0] += 0.9 * SAME_SIGNAL_S
        signal.raise_signal(signal.SIGTERM)  # counted from the one before
        clock[0] += SAME_SIGNAL_S
        with pytest.raises(SignalException, match="SIGINT"):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_was_ignored_stays_so():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as torchrun puts its own handlers
            signals.install()
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_leave_handlers_alone():
    before, failed = signal.getsignal(signal.SIGTERM), []

    def run():
        try:
            with Signals():
                pass
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failed == []
    assert signal.getsignal(signal.SIGTERM) is before


# patience


def test_a_result_that_comes_in_time():
    assert result_within(10, lambda: 7) == 7


def test_no_result_for_work_that_fails_or_hangs():
    held = threading.Event()
    begun = time.monotonic()
    assert result_within(10, lambda: 1 // 0) is None
    assert result_within(0.05, lambda: held.wait(30)) is None
    assert time.monotonic() - begun < 10
    held.set()


def test_interruptible_work_returns_and_raises_as_it_does():
    assert run_interruptibly(lambda: "done", lambda: False) == "done"
    with pytest.raises(KeyError, match="lost"):
        run_interruptibly(lambda: {}["lost"], lambda: False)
    with pytest.raises(SystemExit):
        run_interruptibly(lambda: exit(3), lambda: False)


def test_work_is_given_up_when_told_so():
    held, asked = threading.Event(), []

    def give_up():
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(TimeoutError):
        run_interruptibly(lambda: held.wait(30), give_up)
    assert len(asked) == 3
    held.set()


def test_a_signal_ends_the_waiting():
    """The work itself runs in a thread, which no signal reaches."""
    held = threading.Event()

    def work():  # the signal is sent once it is handled
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        return held.wait(30)

    begun = time.monotonic()
    with pytest.raises(SignalException), Signals():
        run_interruptibly(work, lambda: False)
    assert time.monotonic() - begun < 10
    held.set()


@pytest.mark.parametrize(("cores", "processes", "threads"), [(16, 4, "4"), (16, 3, "5"), (2, 8, "1")])
def test_ranks_share_the_cores(monkeypatch, cores, processes, threads):
    monkeypatch.setattr(process, "cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with shared_cores(processes):
        assert os.environ["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with shared_cores(processes):
        assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["OMP_NUM_THREADS"] == "7"


# numbers of nodes


@pytest.mark.parametrize(("text", "counts"), [("1", (1,)), ("2,4", (2, 4)), ("1,2,3,16", (1, 2, 3, 16))])
def test_numbers_of_nodes(text, counts):
    assert parse_node_counts(text) == counts
    assert Node(8, "job", node_counts=counts).is_alone == (counts == (1,))


@pytest.mark.parametrize("text", ["", "0", "4,2", "2,2", "2;4", "2,", "2, 4", "-1", "two", "02", "0,2", "²"])
def test_numbers_of_nodes_that_are_none(text):
    with pytest.raises(ConfigError) as refused:
        parse_node_counts(text)
    assert str(refused.value) == f"--nodes {text}: expected numbers in ascending order, such as 2,4"


def test_numbers_of_nodes_in_words():
    words = [_alternatives(counts) for counts in ((1,), (2, 4), (1, 2, 4))]
    assert words == ["1 node(s)", "2 or 4 nodes", "1, 2 or 4 nodes"]
