"""The journal of a study's processes, and what their logs say last."""

from megamem.study.journal import STARTED, Journal, last_words, read_journal


def test_the_journal_of_processes(tmp_path):
    assert read_journal(tmp_path) == {}
    journal = Journal(tmp_path)
    journal.began("a", "trained")
    journal.began("b", "trained")
    journal.ended("a", "trained", 75)
    assert {key[0]: history.state for key, history in read_journal(tmp_path).items()} == {"a": "stopped", "b": "begun"}
    journal.began("a", "trained")
    journal.ended("a", "trained", 0)
    journal.ended("b", "trained", -9)
    failures = {key[0]: history.failures for key, history in read_journal(tmp_path).items()}
    assert failures == {"a": 0, "b": 1}, "a stop is none"
    journal.began("b", "trained")
    journal.ended("b", "trained", 0)
    assert read_journal(tmp_path)["b", "trained"].failures == 0, "what ends well begins the count anew"
    journal.began("b", "trained")
    journal.ended("b", "trained", -9)
    with journal.path.open("a") as file:
        file.write('{"time": 1, "run"')
    histories = {key[0]: history for key, history in read_journal(tmp_path).items()}
    assert (histories["a"].state, histories["a"].attempts) == ("ended", 2)
    assert (histories["b"].state, histories["b"].code) == ("failed", -9)
    assert 0 <= histories["a"].seconds < 60


def test_a_line_that_was_cut_short_takes_no_other_with_it(tmp_path, monkeypatch):
    """As a full disk leaves it: what is written next begins a line of its own, and no time is made up."""
    journal, clock = Journal(tmp_path), iter([1000.0, 1005.0, 1007.0])
    monkeypatch.setattr("megamem.study.journal.time.time", lambda: next(clock))
    journal.path.write_text('{"time": 900, "run": "a", "evaluation": "trained", "co')
    journal.ended("a", "trained", 6)
    journal.began("a", "trained")
    journal.ended("a", "trained", 0)
    history = read_journal(tmp_path)["a", "trained"]
    assert (history.state, history.failures, history.attempts) == ("ended", 0, 2)
    assert history.seconds == 2.0


def test_last_words_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_text("step 1\nTraceback (most recent call last):\n  File x\nValueError: a defect: it is\nstep 2\n")
    assert last_words(log) == "ValueError: a defect: it is"
    log.write_text("megamem: first\nmegamem: rank 1: second\nstep 3\n")
    assert last_words(log) == "megamem: rank 1: second"
    with log.open("a") as file:
        file.write(f"{STARTED}2026-01-01 00:00:00 UTC\nstep 4\n")
    assert last_words(log) == "", "what an earlier process said is not why the last one ended"
