"""One trial: a mutant in a copy of the repository, and what the tests nearest to it say."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.mutants.mutant import Mutant
from tests.processes import end_with_starter

SLOWER = 5
"""With a mutation, tests may take so many times what they take without it, and `AT_LEAST_S` more."""
AT_LEAST_S = 60
UNMUTATED_S = 900
FAILED = (1, 2)
"""pytest's exit codes for failed tests and for test files that could not be imported."""
PACKAGES = ("megamem", "checkpoints", "launchers", "tokenization", "tests")


CONTEXT = multiprocessing.get_context("forkserver")
"""Tests run in processes forked from one that has imported libraries before, which takes longer than most of them."""


class TrialError(Exception):
    """Tests that say nothing about a mutation: they fail without one, or there are none."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    verdict: str
    """`killed`, `hung` (killed too: the tests did not end in time) or `survived`."""
    seconds: float
    first_failure: str = ""

    @property
    def killed(self) -> bool:
        return self.verdict != "survived"


def run_pytest(folder: Path, env: Mapping[str, str], arguments: Sequence[str], output: str) -> NoReturn:
    """Run pytest in `folder`: the body of a process of its own, which ends with pytest's exit code.

    Args:
        folder: a copy of the repository, from which the mutated packages are imported.
        env: all environment variables.
        arguments: those of pytest.
        output: the file that its output goes to.
    """
    end_with_starter()
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in env
    os.chdir(folder)
    # as `python -m pytest` has it; what came from elsewhere is imported anew, from the copy
    sys.path[:] = [str(folder), *(path for path in sys.path if not (Path(path) / "tests" / "mutants").is_dir())]
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    code = 1
    try:
        import pytest

        code = int(pytest.main(list(arguments)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Copy:
    """A copy of the repository's files, tracked and new, in which mutations are tried one after the other."""

    def __init__(self, root: Path, folder: Path) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).exists():  # a tracked file may have been deleted
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)
        self.folder = folder
        self.unmutated: dict[tuple[str, str], float] = {}

    def check_imports(self) -> None:
        """Raise a TrialError if Python takes a package from elsewhere: its tests would never see a mutation."""
        for package in PACKAGES:
            if not (self.folder / package / "__init__.py").exists():
                continue
            code = f"import {package}; print({package}.__file__)"
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=self.folder,
                env=self._env(),
                capture_output=True,
                text=True,
                check=True,
            )
            if self.folder not in Path(done.stdout.strip()).parents:
                raise TrialError(f"{package} is imported from {done.stdout.strip()} instead of {self.folder}")

    def try_mutant(self, mutant: Mutant) -> Outcome:
        """Run the mutant's tests with its mutation; once before that, without any.

        Raises: TrialError if they do not pass without it.
        """
        allowed = AT_LEAST_S + SLOWER * self._seconds_unmutated(mutant)
        with self._mutated(mutant):
            # compiled code of a mutation must not outlive it
            code, output, seconds = self._pytest(mutant, allowed, {"PYTHONDONTWRITEBYTECODE": "1"})
        if code is None:
            return Outcome("hung", seconds)
        if code == 0:
            return Outcome("survived", seconds)
        if code in FAILED or code < 0:
            failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            return Outcome("killed", seconds, failures[0][:120] if failures else f"exit code {code}")
        raise TrialError(f"{mutant.title}: pytest ended with {code}\n{output[-2000:]}")

    def _seconds_unmutated(self, mutant: Mutant) -> float:
        selection = (mutant.tests, mutant.cases)
        if selection not in self.unmutated:
            code, output, seconds = self._pytest(mutant, UNMUTATED_S, {})
            if code != 0 or not re.search(r"\b[1-9]\d* passed", output):
                raise TrialError(
                    f"{mutant.title}: its tests do not pass without the mutation (exit code {code})\n{output[-2000:]}"
                )
            self.unmutated[selection] = seconds
        return self.unmutated[selection]

    @contextmanager
    def _mutated(self, mutant: Mutant) -> Iterator[None]:
        path = self.folder / mutant.file
        text, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutant.applied(text), encoding="utf-8")
        # Python compares seconds and sizes to find out whether compiled code is of this source
        os.utime(path, (times.st_atime, times.st_mtime + 10))
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, (times.st_atime, times.st_mtime))

    def _pytest(self, mutant: Mutant, limit_s: float, env: Mapping[str, str]) -> tuple[int | None, str, float]:
        """Return pytest's exit code (None if it did not end in time), what it printed, and its seconds."""
        arguments = ["-x", "-q", "-p", "no:cacheprovider", *mutant.arguments]
        begun = time.monotonic()
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            process = CONTEXT.Process(
                target=run_pytest,
                args=(self.folder, self._env() | {"MEGAMEM_CASES": mutant.cases} | env, arguments, output.name),
            )
            process.start()
            process.join(limit_s)
            code = process.exitcode
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
            return code, output.read(), time.monotonic() - begun

    def _env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return env | {"PYTHONPATH": str(self.folder)}
