"""Processes of tests that end with the process that started them."""

import ctypes
import multiprocessing
import os
import signal
import threading

CONTEXT = multiprocessing.get_context("forkserver")
"""Ranks are forked from one process for each one that runs tests, which has imported what takes seconds to import."""
CONTEXT.set_forkserver_preload(["tests.preload"])
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, the process of that id, has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before this process could ask for the signal
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_starter() -> None:
    """Kill this process as soon as the one that started it by `multiprocessing` has ended.

    A fork server, which is its parent, lives as long as what it has forked: `end_with` would wait for ever.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="starter", daemon=True).start()
