"""Studies that are told to stop, or are not to hear of it."""

# ruff: noqa: F811  (fixtures of another file)

import os
import signal
import threading
import time

from megamem.study.grid import planned_runs
from megamem.study.status import run_statuses
from tests.unit.test_study import fake, run, study  # noqa: F401


def test_a_hangup_that_was_to_be_ignored_stops_nothing(study, fake):
    """As under nohup."""
    log, sent = study.folder / "pair" / "logs" / "memory-narrow-3.log", threading.Event()

    def hang_up() -> None:
        while not log.exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGHUP)
        sent.set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        threading.Thread(target=hang_up, daemon=True).start()
        outcome, _, _ = run(study)
        assert sent.is_set()
        assert (len(outcome.done), outcome.stopped) == (10, False)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_stops_runs_and_the_next_call_goes_on(study, fake, monkeypatch, interruptible):
    monkeypatch.setenv("HANGS", "memory-narrow-3")
    log = study.folder / "pair" / "logs" / "memory-narrow-3.log"

    def interrupt() -> None:
        while not log.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    begin = time.monotonic()
    outcome, _, _ = run(study)
    assert outcome.stopped
    assert not outcome.failed
    states = {state.run.name: state.state for state in run_statuses(study, planned_runs(study))}
    assert (states["memory-narrow-3"], states["memory-wide-4"]) == ("stopped", "waiting")
    assert time.monotonic() - begin < 20
    assert len(outcome.done) == 2
    monkeypatch.delenv("HANGS")
    outcome, _, _ = run(study)
    assert (len(outcome.done), outcome.stopped) == (10, False)
