"""Processes that a killed queue left behind: they are waited for, and what they have made is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from megamem.files import try_lock
from megamem.runs.folder import RunLock
from megamem.runs.result import RunResult, write_result
from megamem.study.collect import records
from megamem.study.grid import planned_runs
from megamem.study.queue import Queue
from megamem.study.tasks import open_partial, partial_file, tasks, written_elsewhere
from tests.unit.test_study import fake, run, spans, study  # noqa: F401, fixtures


def test_runs_that_a_killed_queue_left_take_up_room(study, fake, tmp_path, monkeypatch):  # noqa: F811
    """Two go on: the first ends without a result and is started once its lock is free, the second is done then."""
    monkeypatch.setenv("LASTS", "0.3")
    one, other = planned_runs(study)[:2]
    said, locks = [], [RunLock(one.folder), RunLock(other.folder)]
    for lock in locks:
        lock.take()

    def end(done: int, total: int) -> None:
        if done == 5:  # four runs and evaluations, one after another as one of three places is left
            write_result(other.folder, RunResult(str(other.folder), 4, 400, 1.0, (1.0,), {"val_loss": 4}))
            for lock in locks:
                lock.__exit__()

    outcome = Queue(study.model_copy(update={"parallel": 3}), said.append, end).run(planned_runs(study))
    assert (len(outcome.done), outcome.failed) == (10, [])
    waiting = [line for line in said if "waits" in line]
    assert waiting == [
        f"{run.name}: waits for the end of another process that writes {run.folder}" for run in (one, other)
    ]
    times = sorted((begin, ended) for _, begin, ended in spans(tmp_path))
    assert all(ended <= begin for (_, ended), (begin, _) in zip(times[:5], times[1:5], strict=False))
    trained = [call.split("/")[-1] for call in fake() if call.startswith("train")]
    assert trained.count(f"{one.name}.yaml") == 1
    assert trained.count(f"{other.name}.yaml") == 0


def test_devices_of_runs_that_a_killed_queue_left_are_given_to_nobody(study, fake, tmp_path, monkeypatch):  # noqa: F811
    """Which ones they have is not known."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    lock = RunLock(planned_runs(study)[0].folder)
    lock.take()
    ended = []

    def end() -> None:
        ended.append(time.time())
        lock.__exit__()

    threading.Timer(1.0, end).start()
    outcome, _, _ = run(study.model_copy(update={"parallel": 2}))
    assert len(outcome.done) == 10
    assert min(begin for _, begin, _ in spans(tmp_path)) > ended[0]


def test_an_evaluation_that_a_killed_queue_left_is_waited_for(study, fake):  # noqa: F811
    """Its process holds the file that it writes to, the queue being gone."""
    _, evaluations = tasks(study, planned_runs(study))[2]
    evaluations[0].run.folder.mkdir(parents=True)
    with open_partial(evaluations[0]) as out:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=out)
    assert written_elsewhere(evaluations[0])
    process.communicate(b"\n")
    assert not written_elsewhere(evaluations[0])


def test_what_an_evaluation_gave_after_its_queue_was_killed_is_kept(study, fake):  # noqa: F811
    """Of the same evaluation and model: a file of another one, or one that was cut short, is made again."""
    planned = tasks(study, planned_runs(study))
    for training, _ in planned:
        training.run.folder.mkdir(parents=True)
        write_result(training.run.folder, RunResult(str(training.run.folder), 4, 400, 1.0, (1.0,), {"val_loss": 4}))
    for number, (_, (evaluation,)) in enumerate(planned[2:]):
        if number == 1:
            evaluation.change = {"model.memory.0.mixer.samples": 3}
        with open_partial(evaluation) as out:
            if number != 2:
                out.write(b'a table\n{"val_loss": 5.0}\n')
    os.utime(partial_file(evaluation), (0, 0))  # the last one: its run has gone on learning since
    outcome, _, _ = run(study)
    assert (len(outcome.done), len(fake())) == (10, 3), "all but the first evaluation"
    kept = [record for record in records(study, planned_runs(study)) if record.evaluation == "uniform"]
    assert [record.figures["val_loss"] for record in kept] == [5.0, 7.0, 7.0, 7.0]


def test_a_training_that_has_not_reached_its_folder_is_waited_for(study, fake):  # noqa: F811
    """Its log is locked from its first moment on, as a queue that was killed has left it."""
    training, _ = tasks(study, planned_runs(study))[0]
    with training.log.open("ab") as log:
        assert try_lock(log)
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
    assert written_elsewhere(training)
    process.communicate(b"\n")
    assert not written_elsewhere(training)
