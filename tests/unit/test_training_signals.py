"""Signals that ask a rank to stop: noted, many at once as one, and acting at once where nobody else would."""

import signal

import pytest

from megamem import patience
from megamem.errors import StoppedError
from megamem.training import signals
from megamem.training.signals import SAME_SIGNAL_S, noted_signals

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the signals' clock shows."""
    now = [1000.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def acted():
    """Numbers of the signals that acted as they would without the block."""
    found, before = [], {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, lambda number, frame: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_ends_the_waiting_for_stores(monkeypatch, acted, number):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    noted = []
    with noted_signals(lambda: noted.append(number)):
        patience.check_not_stopped("a shard")
        signal.raise_signal(number)
        with pytest.raises(StoppedError, match="a shard: stopped by a signal"):
            patience.check_not_stopped("a shard")
    assert (noted, acted) == ([number], [])
    signal.raise_signal(number)
    assert acted == [number], "the handlers before are back"
    patience.wait_again()


def test_a_second_signal_acts_at_once_after_a_second_only(monkeypatch, acted, clock):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with noted_signals(lambda: None):
        signal.raise_signal(signal.SIGTERM)
        clock[0] += SAME_SIGNAL_S
        signal.raise_signal(signal.SIGTERM)
        assert acted == []
        clock[0] += 0.1
        signal.raise_signal(signal.SIGINT)
        assert acted == [signal.SIGINT]
    patience.wait_again()


def test_a_rank_of_an_agent_leaves_the_end_to_it(monkeypatch, acted, clock):
    """SLURM signals all processes of a job; on a busy machine the agent's own signal came seconds after, and killed."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    noted = []
    with noted_signals(lambda: noted.append(True)):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            clock[0] += 10 * SAME_SIGNAL_S
    assert (len(noted), acted) == (3, [])
    patience.wait_again()
