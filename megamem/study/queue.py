"""The queue of a study on this machine: some runs at a time, each in a process of its own, resumed where it stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import BinaryIO

import torch

from launchers.signals import not_ignored
from megamem.errors import FINAL, STOPPED, DependencyError, MegamemError, RunFolderError
from megamem.files import try_lock
from megamem.hardware import cores
from megamem.runs.folder import RunLock
from megamem.study import tasks as processes
from megamem.study.config import StudyConfig
from megamem.study.grid import PlannedRun, study_folder
from megamem.study.journal import STARTED, History, Journal, read_journal
from megamem.study.status import run_statuses
from megamem.study.tasks import Task, keep_figures, open_partial, tasks, write_config, written_elsewhere

DEVICES = "CUDA_VISIBLE_DEVICES"
Job = tuple["subprocess.Popen[bytes]", BinaryIO]
"""A process and its log."""


@dataclass
class Outcome:
    """How a study's runs ended."""

    done: list[Task] = field(default_factory=list)
    failed: list[Task] = field(default_factory=list)
    stopped: bool = False


def study_lock(study: StudyConfig) -> RunLock:
    """Return the lock of a study. Its `take` raises RunFolderError while another process runs the study."""
    return RunLock(study_folder(study), "another process is running this study")


def check_not_submitted(study: StudyConfig, runs: Sequence[PlannedRun]) -> None:
    """Raise RunFolderError if a run is a job that SLURM has not done with, or that is not known.

    Where squeue is not installed no job of this machine's runs is waited for.
    """
    try:
        statuses = run_statuses(study, runs, strict=True)
    except DependencyError:
        return
    except MegamemError as error:
        raise RunFolderError(f"{study_folder(study)}: SLURM may have runs of it: {error}") from None
    for status in statuses:
        if status.in_queue:
            raise RunFolderError(
                f"{status.run.folder}: is job {status.jobs[-1].number} of SLURM, {status.state}; "
                "go on with --on slurm, or scancel it first"
            )


def ranks(run: PlannedRun) -> int:
    """Return the number of processes of a run on one machine."""
    parallel = run.config.parallel
    return parallel.tp * parallel.pp * (parallel.dp or 1)


def visible_devices() -> list[str]:
    """Return the CUDA devices as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get(DEVICES)
    if given is not None:
        return [name for name in given.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]


def shares(devices: Sequence[str], parallel: int, each: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of `parallel` runs side by side, of `each` ranks at most.

    Returns: an empty list for a single run, which may see all, and if there are too few devices for all.
    """
    size = len(devices) // parallel
    if parallel == 1 or size < each:
        return []
    return [",".join(devices[number * size : (number + 1) * size]) for number in range(parallel)]


class Queue:
    """Starts tasks in order, at most `parallel` runs at a time; an evaluation waits for its training."""

    def __init__(
        self,
        study: StudyConfig,
        report: Callable[[str], None],
        progress: Callable[[int, int], None],
        retry_failed: bool = False,
    ) -> None:
        """Read the journal of the study.

        Args:
            report: takes a line whenever something happens.
            progress: takes the number of tasks that are done, and of all.
            retry_failed: start tasks that failed for good too.
        """
        self.study, self.report, self.progress, self.retry_failed = study, report, progress, retry_failed
        self.outcome = Outcome()
        self.journal = Journal(study_folder(study))
        self.earlier = read_journal(study_folder(study))
        """The journal as earlier calls left it."""
        self.stopping = False
        self.devices: list[str] = []
        """CUDA devices for each run that may be started now; empty if all runs see the same ones."""
        self.held: dict[Task, str] = {}
        """CUDA devices of the tasks that run."""
        self.split = False
        """Whether runs have devices of their own."""
        self.foreign: list[Task] = []
        """Tasks that other processes run, such as those of a queue that was killed: they count among `parallel`."""
        self.reported: set[Task] = set()
        """Tasks that were reported to wait for another process."""

    def run(self, runs: Sequence[PlannedRun]) -> Outcome:
        """Run everything that is not done yet. On SIGTERM or SIGINT, runs save a checkpoint and the queue ends.

        Raises: RunFolderError while another process or SLURM runs the study, or as `tasks`; nothing is written then.
        """
        with study_lock(self.study) as lock:
            lock.take()
            check_not_submitted(self.study, runs)
            self.devices = shares(visible_devices(), self.study.parallel, max(ranks(run) for run in runs))
            self.split = bool(self.devices)
            return self._run(tasks(self.study, runs))

    def _run(self, planned: Sequence[tuple[Task, list[Task]]]) -> Outcome:
        """Start tasks whenever there is room, until none is left; see `run`."""
        total = sum(1 + len(after) for _, after in planned)
        # a training waits, and after it its evaluations: those of a run that is trained already wait at once
        following = defaultdict(list, {id(training): after for training, after in planned})
        waiting: deque[Task] = deque()
        for training, after in planned:
            waiting.extend(self._remaining([training]) or (self._remaining(after) if training.done else []))
        self.foreign = [task for task in waiting if written_elsewhere(task)]
        running: dict[Task, Job] = {}
        with self._signals(running):
            while running or (waiting and not self.stopping):
                # start tasks while there is room
                while self._room(len(running)) and not self.stopping and (task := self._next(waiting)):
                    if task.change is not None:
                        keep_figures(task)
                    if task.done:  # by the process that was waited for, or that a killed queue did not see the end of
                        waiting.extendleft(reversed(self._remaining([task]) or self._remaining(following[id(task)])))
                        continue
                    running[task] = self._start(task)
                    self.journal.began(task.run.name, task.evaluation)
                    if self.stopping:  # the signal came while it was started
                        running[task][0].send_signal(signal.SIGTERM)
                time.sleep(0.2)
                # what has ended makes room: its evaluations go next, or itself once more if that may help
                for task in [task for task, (job, _) in running.items() if job.poll() is not None]:
                    job, log = running.pop(task)
                    log.close()
                    if task in self.held:
                        self.devices.append(self.held.pop(task))
                    self.journal.ended(task.run.name, task.evaluation, job.returncode)
                    if self._finished(task, job.returncode):
                        waiting.extendleft(reversed(self._remaining(following[id(task)])))
                    elif not self.stopping and task.failures <= self.study.retries and job.returncode not in FINAL:
                        waiting.appendleft(task)
                    elif not self.stopping:
                        self.outcome.failed.append(task)
                        self.report(f"{task.name}: failed ({job.returncode}); see {task.log}")
                self.progress(len(self.outcome.done), total)
        self.outcome.stopped = self.stopping
        return self.outcome

    def _room(self, running: int) -> bool:
        """Return whether one more may be started.

        Nobody knows which devices the runs of a killed queue have: where runs have devices of their own, none is
        started beside them.
        """
        self.foreign = [task for task in self.foreign if written_elsewhere(task)]
        for task in self.foreign:
            if task not in self.reported:
                self.reported.add(task)
                self.report(f"{task.name}: waits for the end of another process that writes {task.run.folder}")
        return running + len(self.foreign) < self.study.parallel and not (self.split and self.foreign)

    def _next(self, waiting: deque[Task]) -> Task | None:
        """Take the first task from `waiting` whose run no other process writes; None without one."""
        for task in waiting:
            if not written_elsewhere(task):
                waiting.remove(task)
                return task
            if task not in self.foreign:  # begun by hand meanwhile
                self.foreign.append(task)
        return None

    def _remaining(self, candidates: Sequence[Task]) -> list[Task]:
        """Return the tasks to be started; the others count as done or, from earlier calls, as failed for good."""
        found = []
        for task in candidates:
            if task.done:
                self.outcome.done.append(task)
            elif self._given_up(task):
                self.outcome.failed.append(task)
            else:
                found.append(task)
        return found

    def _given_up(self, task: Task) -> bool:
        """Return whether a task failed in earlier calls as often as it may; without its folder it begins anew."""
        past = self.earlier.get((task.run.name, task.evaluation), History())
        if self.retry_failed or not task.run.folder.exists():
            return False
        task.failures = past.failures
        if past.state != "failed" or not (past.code in FINAL or past.failures > self.study.retries):
            return False
        self.report(f"{task.name}: failed ({past.code}) in an earlier call; --retry-failed starts it once more")
        return True

    def _start(self, task: Task) -> Job:
        """Start the process of a task, with its share of the cores and devices of its own."""
        share = cores() // (self.study.parallel * ranks(task.run))
        own = {"OMP_NUM_THREADS": str(max(1, share)), **os.environ}
        if self.devices:
            own[DEVICES] = self.held[task] = self.devices.pop()
        log = task.log.open("ab")
        log.write(f"{STARTED}{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n".encode())
        log.flush()
        if task.change is None:
            write_config(self.study, task.run)
            try_lock(log)  # the process inherits the lock
        out = log if task.change is None else open_partial(task)
        job = subprocess.Popen(
            [*processes.COMMAND, *task.command],
            stdout=out,
            stderr=log,
            env=own,
            start_new_session=True,  # a terminal's Ctrl-C reaches runs through this process only
        )
        if task.change is not None:
            out.close()
        return job, log

    def _finished(self, task: Task, code: int) -> bool:
        """Note how a task ended, and return whether it is done."""
        if code == 0 and task.change is not None:
            keep_figures(task)
        if code == 0 and task.done:
            self.outcome.done.append(task)
            self.report(f"{task.name}: done")
            return True
        if not (self.stopping and code == STOPPED):
            task.failures += 1
        return False

    @contextmanager
    def _signals(self, running: Mapping[Task, Job]) -> Iterator[None]:
        """Pass signals to stop on to the running tasks while the block runs, and end them if it fails."""

        def stop(number: int, frame: object) -> None:
            self.stopping = True
            for job, _ in list(running.values()):
                job.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in not_ignored()}
        try:
            yield
        finally:
            for job, _ in running.values():  # only if something went wrong here
                job.send_signal(signal.SIGTERM)
                job.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
