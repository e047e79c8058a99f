"""`megamem` as a process: how a rank ends whose work is done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from megamem.errors import STOPPED

SCRIPT = """
import atexit, os, sys
from megamem.cli import main as cli

class Threads:
    def __del__(self, abort=os.abort):  # as may happen where the interpreter takes everything down
        abort()

def command(**_):
    sys.kept_to_the_last = Threads()
    atexit.register(print, "closed")
    print("done")
    sys.exit({code})

cli.app = command
cli.main()
"""


@pytest.mark.parametrize("code", [0, STOPPED])
@pytest.mark.parametrize("rank", [True, False])
def test_a_rank_that_is_done_ends_before_the_interpreter_is_taken_down(code: int, rank: bool) -> None:
    """What was registered for the end still happens; a process that is no rank shows that the abort is real."""
    job = {"RANK": "1", "WORLD_SIZE": "2"} if rank else {}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(code=code)],
        capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **job},
    )  # fmt: skip
    assert done.stdout == "done\nclosed\n"
    assert done.returncode == (code if rank else -signal.SIGABRT), done.stderr
