"""Start a job's processes on this machine with torchrun, and end with the code of the rank that failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megamem.errors import STOPPED, MegamemError


def inside_job() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def run_local(processes: int, arguments: Sequence[str]) -> int:
    """Run `megamem ARGUMENTS` on `processes` local ranks; returns their exit code.

    torchrun's agent runs in this process: SIGTERM and SIGINT make it pass them on, wait for the ranks (30 seconds at
    most) and return STOPPED. Each rank has a session of its own, so a terminal's Ctrl-C reaches it from here only.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    command = ["--standalone", "--nproc-per-node", str(processes), "-m", "megamem", *arguments]
    logging.disable()  # the ranks say what is wrong
    try:
        with _handlers_kept(), _threads_shared(processes):
            run(parse_args(command))
    except SignalException:
        return STOPPED
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        return exit_code({rank: failure.exitcode for rank, failure in failures})
    finally:
        logging.disable(logging.NOTSET)
    return 0


def exit_code(codes: dict[int, int]) -> int:
    """One code for a job whose ranks ended with `codes` (negative: killed by a signal), the first to fail first.

    A code that says what was wrong goes before one of ranks that failed as a consequence.
    """
    telling = {cls.exit_code for cls in _error_classes()} - {1} | {STOPPED}
    for code in codes.values():
        if code in telling:
            return code
    for rank, code in codes.items():
        if code < 0:
            sys.stderr.write(f"megamem: rank {rank} was killed by {signal.Signals(-code).name}\n")
            return 128 - code
    return next(iter(codes.values()))


def _error_classes() -> Iterator[type[MegamemError]]:
    waiting = [MegamemError]
    while waiting:
        cls = waiting.pop()
        yield cls
        waiting += cls.__subclasses__()


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """torchrun installs signal handlers and leaves them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _threads_shared(processes: int) -> Iterator[None]:
    """Without OMP_NUM_THREADS, each rank gets its share of the cores."""
    given = "OMP_NUM_THREADS" in os.environ
    if not given:
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    try:
        yield
    finally:
        if not given:
            del os.environ["OMP_NUM_THREADS"]
