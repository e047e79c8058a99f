"""All that needs CUDA devices, on a machine that is rented for an hour, and what it found in one archive.

    make rented        # sets up the environment, then: python -m benchmarks.rented [--folder runs/rented] [--hours 3]

It runs, one after the other and whatever becomes of the one before: the preflight check, `make test-gpu` and
`make bench-gpu`, with all devices of the machine. Output goes to the terminal and to a log of each. The archive holds
these logs, what the machine is (devices, driver, versions, revision), the tests' results and the benchmarks' JSON; its
path is the last line. Ctrl-C ends the step at work and packs what there is. The exit code is that of the first step
that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import OUTPUT, ROOT
from megamem.preflight.collect import versions

INTERRUPTED = 130
"""Exit code of a step that Ctrl-C has ended."""
LATE = 124
"""Exit code of a step for which there was no time left."""


@dataclass(frozen=True)
class Step:
    """A command, and what it may find in its environment."""

    name: str
    command: Sequence[str]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    name: str
    command: Sequence[str]
    code: int
    seconds: float


def steps(folder: Path) -> list[Step]:
    """Return what is run; the tests leave their results in `folder`."""
    results = {"PYTEST_ADDOPTS": f"--junitxml={folder.resolve() / 'tests.xml'}"}
    preflight = [sys.executable, "-m", "megamem", "preflight", "--device", "cuda", "--json"]
    return [
        Step("preflight", preflight, {}),
        Step("test-gpu", ["make", "test-gpu"], results),
        Step("bench-gpu", ["make", "bench-gpu"], {}),
    ]


def machine() -> dict[str, Any]:
    """Return what this machine is: devices, driver, versions, revision, processors, memory."""
    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "devices": [{"name": device.name, "bytes": device.total_memory} for device in devices],
        "versions": versions(torch.device("cuda" if count else "cpu")),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "nvidia_smi": {name: _printed(["nvidia-smi", *more]) for name, more in _SMI.items()},
    }


_SMI = {"devices": [], "links": ["topo", "-m"]}
"""What is asked of nvidia-smi: how devices are, and what lies between them."""


def _printed(command: Sequence[str]) -> str | None:
    """Return what a command prints, None where there is no such program."""
    if shutil.which(command[0]) is None:
        return None
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def run_step(step: Step, folder: Path, limit_s: float) -> Outcome:
    """Run a step, its output on the terminal and in `NAME.log`; see `INTERRUPTED` and `LATE`."""
    print(f"\n== {step.name}: {' '.join(step.command)}", flush=True)
    begun = time.monotonic()
    with (folder / f"{step.name}.log").open("wb") as log:
        if limit_s <= 0:
            log.write(b"not run: time was up\n")
            return Outcome(step.name, step.command, LATE, 0.0)
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={**os.environ, **step.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, which can be ended whole
        )
        timer = threading.Timer(limit_s, _end, [process])
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                print(line.decode(errors="replace"), end="", flush=True)
            code = process.wait()
        except KeyboardInterrupt:
            _end(process)
            process.wait()
            code = INTERRUPTED
        finally:
            timer.cancel()
    seconds = time.monotonic() - begun
    return Outcome(step.name, step.command, LATE if seconds >= limit_s else code, seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def run_all(todo: Sequence[Step], folder: Path, limit_s: float) -> list[Outcome]:
    """Run steps within so many seconds in all, until one is interrupted."""
    begun, outcomes = time.monotonic(), []
    for step in todo:
        outcomes.append(run_step(step, folder, limit_s - (time.monotonic() - begun)))
        if outcomes[-1].code == INTERRUPTED:
            break
    return outcomes


def pack(folder: Path, found: Mapping[str, Any], outcomes: Sequence[Outcome], benchmarks: Path, since: float) -> Path:
    """Write what the machine is and what became of the steps into `folder`, and return the archive of it beside it.

    Args:
        found: see `machine`.
        benchmarks: the folder of benchmarks' results; those from before `since` (seconds of the clock) are left out.
    """
    for path in sorted(benchmarks.glob("*")):
        if path.suffix in (".json", ".yaml") and path.stat().st_mtime >= since:
            shutil.copy(path, folder)
    record = {"machine": found, "steps": [asdict(outcome) for outcome in outcomes]}
    (folder / "machine.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return archive


def folder_name(found: Mapping[str, Any], at: time.struct_time) -> str:
    """Return a name such as `2x-nvidia-h100-80gb-hbm3-20250131-1200`; `-and-` joins devices of several kinds."""
    names = [device["name"] for device in found["devices"]]
    kinds = [f"{names.count(name)}x-{name}" for name in dict.fromkeys(names)]
    words = re.sub(r"[^a-z0-9]+", "-", "-and-".join(kinds).lower()).strip("-")
    return f"{words or 'no-device'}-{time.strftime('%Y%m%d-%H%M', at)}"


def main(arguments: list[str] | None = None) -> int:
    """See the module's documentation; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/rented"), help="where logs and archive are written")
    parser.add_argument("--hours", type=float, default=3.0, help="for all steps together; what is late is ended")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.rented: needs a CUDA device and torch finds none; nothing run")
        return 2
    if shutil.which("make") is None:
        print("benchmarks.rented: there is no program called make; install it (apt-get install make)")
        return 2
    if options.hours <= 0:
        print(f"benchmarks.rented: --hours {options.hours:g}: give more than 0")
        return 2
    since, found = time.time(), machine()
    folder = options.folder / folder_name(found, time.localtime(since))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"benchmarks.rented: --folder {options.folder}: {error.strerror}; give one that can be written")
        return 2
    outcomes = run_all(steps(folder), folder, 3600 * options.hours)
    archive = pack(folder, found, outcomes, ROOT / OUTPUT, since)
    print()
    for outcome in outcomes:
        print(f"{outcome.name}: exit code {outcome.code} after {outcome.seconds:,.0f} s")
    print(archive)
    return next((outcome.code for outcome in outcomes if outcome.code), 0)


if __name__ == "__main__":
    sys.exit(main())
