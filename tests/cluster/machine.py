"""What a machine may refuse to do even for root, as in a container without privileges."""

from __future__ import annotations

import shlex
import subprocess

import pytest

REFUSALS = ("Operation not permitted", "Permission denied", "Operation not supported")


def skip_if_refused(*command: str) -> None:
    """Skip the test, with the reason, if the kernel refuses `command`; any other failure is the test's."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and any(refusal in done.stderr for refusal in REFUSALS):
        pytest.skip(f"this machine refuses `{shlex.join(command)}`: {' '.join(done.stderr.split())}")
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
