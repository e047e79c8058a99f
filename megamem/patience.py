"""Reading from stores behind a network: failures that may pass are tried again, with growing waits, up to a limit."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeGuard, TypeVar

from megamem.errors import MegamemError, StoppedError, StoreError
from megamem.threads import Background

T = TypeVar("T")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Seconds before the second attempt, and at most between two; each wait is twice the one before."""
RETRY_S = 600.0
"""Seconds for which a store that does not answer is tried again, unless the configuration says otherwise."""
STOP_S = 5.0
"""Seconds that what is being read has to end after a signal to stop."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Numbers of errors of a disk of this machine, which is no store: trying again does not make room."""
_LASTING = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, ImportError,
    NotImplementedError,
)  # fmt: skip
_LASTING_NAMES = {"NoCredentialsError", "PartialCredentialsError", "NoSuchBucket", "InvalidAccessKeyId"}
"""Errors of the stores' own libraries, which are optional packages, by the names of their classes."""
_PASSING_STATUS = {408, 425, 429}
"""Answers of HTTP that blame the request, and yet may be others later."""
_MISSING_STATUS = {404, 410}
"""Answers of HTTP that there is no such file."""

_stopping = threading.Event()
_stopped_at = 0.0
_log = logging.getLogger("megamem")


def stop_waiting() -> None:
    """Make everything that waits for a store in this process end: a signal asks it to stop."""
    global _stopped_at
    _stopped_at = time.monotonic()
    _stopping.set()


def wait_again() -> None:
    """Let this process wait for stores again."""
    _stopping.clear()


def check_not_stopped(what: str, grace_s: float = 0.0) -> None:
    """Raise StoppedError where this process was asked to stop `grace_s` seconds ago or longer; `what` is being read."""
    if _stopping.is_set() and time.monotonic() - _stopped_at >= grace_s:
        raise StoppedError(f"{what}: stopped by a signal while it was read; a run goes on from its last checkpoint")


def unless_stopped(what: str, work: Callable[[], T]) -> T:
    """Return what `work` returns, without waiting for it once this process was asked to stop `STOP_S` seconds ago.

    Args:
        what: is being read, for messages.
        work: done by a thread, which is left behind then: a connection that says nothing cannot be ended.

    Raises: StoppedError, or what `work` raises.
    """
    working = Background(work)
    while working.is_alive():
        working.join(0.2)
        if working.is_alive():
            check_not_stopped(what, STOP_S)
    return working.result()


def _of_a_connection(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether an error is of a connection, or of an HTTP server's answer (of aiohttp, an optional package)."""
    return isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.partition(".")[0] == "aiohttp"


def may_pass(error: BaseException) -> bool:
    """Return whether a failure to reach a store may be over later: not where the request itself is wrong."""
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return False
    if isinstance(error, FileNotFoundError) and _of_a_connection(error.__cause__):
        # fsspec says that a file is not there whatever an HTTP server answers
        return may_pass(error.__cause__)
    if isinstance(error, _LASTING) or type(error).__name__ in _LASTING_NAMES:
        return False
    if isinstance(error, OSError) and error.__cause__ is not None:
        return may_pass(error.__cause__)
    status = getattr(error, "status", getattr(error, "code", None))
    return not (isinstance(status, int) and 400 <= status < 500 and status not in _PASSING_STATUS)


def is_missing(error: BaseException) -> bool:
    """Return whether a store says that there is no such file, and no more than that."""
    if not isinstance(error, FileNotFoundError):
        return False
    return not _of_a_connection(error.__cause__) or getattr(error.__cause__, "status", None) in _MISSING_STATUS


def reason(error: BaseException) -> str:
    """Return class and first line of an error, or of what it comes from where it hides that."""
    if isinstance(error, FileNotFoundError) and _of_a_connection(error.__cause__):
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def patiently(what: str, work: Callable[[], T], limit_s: float) -> T:
    """Do `work` and return its result; while it fails in a way that may pass, again and again.

    Args:
        what: the file or URL, for messages.
        work: begins anew each time. Errors that do not pass, and MegamemErrors, are raised as they are.
        limit_s: seconds from the first failure after which there is no further attempt; 0 for one attempt.

    Raises:
        StoreError: it has failed for so long.
        StoppedError: the process was asked to stop meanwhile.
    """
    failing_since, wait = None, FIRST_WAIT_S
    while True:
        try:
            return work()
        except MegamemError:
            raise
        except Exception as error:  # file systems raise errors of their own libraries
            if not may_pass(error):
                raise
            now = time.monotonic()
            if failing_since is None:
                failing_since = now
                if limit_s:
                    _log.warning("%s: does not answer (%s); tried again for %.0f s", what, reason(error), limit_s)
            left = failing_since + limit_s - now
            if left <= 0:
                since = f" for {limit_s:.0f} s" if limit_s else ""
                raise StoreError(f"{what}: does not answer{since} ({reason(error)}); try again later") from error
            check_not_stopped(what)
            _stopping.wait(min(wait, left))
            check_not_stopped(what)
            wait = min(2 * wait, LONGEST_WAIT_S)
