"""The folder a run writes to: made once, never shared with another run, with what is needed to repeat the run."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from checkpoints.folder import FOLDER, begun_from, checkpoints_in
from megamem.config.load import config_hash, dump_yaml
from megamem.config.run import RunConfig
from megamem.errors import RunFolderError
from megamem.runs.result import RESULT

RESULTS = (RESULT, "model.safetensors")
"""What a run leaves at its end."""
FREE_BYTES = 64 * 2**20
"""Room asked for besides the weights: metrics, traces, pictures."""

LEASE_S = 120.0
"""How long the lock of a host that was lost may outlive it: NFSv4 gives it up after a lease of 90 s as a rule."""
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables that count how often agents and SLURM have started a job again."""


class RunLock:
    """Keeps two jobs from writing one run folder: held from `take` to the end of the `with` block or of the process."""

    def __init__(self, folder: Path, busy: str = "is being written by another job") -> None:
        """busy: what is said of a folder that somebody else holds."""
        self.path = folder / "lock"
        self.busy = busy
        self._file: TextIOWrapper | None = None

    def take(self, patience_s: float = 0.0) -> None:
        """Make the folder and hold it. Raises RunFolderError naming who has it, and still has after `patience_s`.

        On file systems that know no locks nothing is held.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+", encoding="utf-8")
        deadline = time.monotonic() + patience_s
        while not locked(file):
            if time.monotonic() >= deadline:
                file.seek(0)
                raise RunFolderError(
                    f"{self.path.parent}: {self.busy} ({file.read().strip() or 'unknown'}); "
                    "wait for its end or choose another `name`"
                )
            time.sleep(0.5)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        self._file = file

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def lock_patience() -> float:
    """Seconds to wait for a run's lock: LEASE_S in a job that was started again, perhaps after its host was lost."""
    return LEASE_S if any(os.environ.get(count, "0") != "0" for count in RESTARTS) else 0.0


def locked(file: IO[Any]) -> bool:
    """Whether this process holds the file's lock now: nobody else did. Where there are no locks everybody does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def held(path: Path) -> bool:
    """Whether another process holds the lock of a file, if there is one."""
    if not path.exists():
        return False
    with path.open("r+b") as file:  # NFS locks only what may be written
        return not locked(file)


def check_run_folder(config: RunConfig, checkpoint_bytes: int) -> None:
    """Raise RunFolderError if the folder holds a run that cannot be gone on with, cannot be written or has no room.

    checkpoint_bytes: of one checkpoint.
    """
    folder = config.run_folder
    if (folder / "config.yaml").exists() and not goes_on(config):
        raise RunFolderError(_taken(config))
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder}: is a file, not a folder; choose another `name` or `runs_folder`")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        probe = existing / f".write-probe-{folder.name}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunFolderError(
            f"{existing}: cannot be written ({error.strerror}); choose another `runs_folder`"
        ) from None
    if (folder / "lock").exists():
        with RunLock(folder) as lock:
            lock.take(lock_patience())
    at_most = config.checkpoint.keep_last + config.checkpoint.keep_best + 1  # one is written before one is removed
    there = len(checkpoints_in(folder / FOLDER))
    needed_bytes = checkpoint_bytes * max(at_most - there, 1)
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + FREE_BYTES:
        raise RunFolderError(
            f"{existing}: {free / 2**20:.0f} MiB free, but the run needs about "
            f"{(needed_bytes + FREE_BYTES) / 2**20:.0f} MiB; free some or choose another `runs_folder`"
        )


def goes_on(config: RunConfig) -> bool:
    """Whether the run folder holds the beginning of this run: checkpoints, or the same run ended before its first."""
    folder, resume = config.run_folder, config.checkpoint.resume
    if resume == "none":
        return False
    own = checkpoints_in(folder / FOLDER)
    if resume != "auto" and any(checkpoint.complete for checkpoint in own):
        return begun_from(folder / FOLDER, resume)
    if resume == "auto" and own:
        return True
    same = (folder / "config.yaml").read_text(encoding="utf-8") == _text(config)
    return same and not any((folder / result).exists() for result in RESULTS)


def _text(config: RunConfig) -> str:
    return f"# resolved configuration, hash {config_hash(config)}\n{dump_yaml(config)}"


def _taken(config: RunConfig) -> str:
    folder = config.run_folder
    if checkpoints_in(folder / FOLDER):
        return f"{folder}: already holds a run; checkpoint.resume=auto goes on with it, or choose another `name`"
    why = "" if config.checkpoint.resume == "none" else ", without a checkpoint to go on from"
    return f"{folder}: already holds another run{why}; choose another `name` or remove the folder"


def create_run_folder(config: RunConfig) -> Path:
    """Make the folder with `config.yaml` and `environment.json`. Raises RunFolderError if another run was faster.

    A run that goes on keeps the configuration it had before as `config-before-N.yaml` if it has changed.
    """
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    text = _text(config)
    path = folder / "config.yaml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if not goes_on(config):
            raise RunFolderError(_taken(config)) from None
        if path.read_text(encoding="utf-8") != text:
            earlier = len(list(folder.glob("config-before-*.yaml")))
            path.rename(folder / f"config-before-{earlier + 1}.yaml")
            path.write_text(text, encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
    return folder


def environment() -> dict[str, Any]:
    """Versions, command and code revision."""
    packages = ["megamem", "torch", "deepspeed", "megatron-core", "numpy", "tokenizers"]
    revision = ""
    if git := shutil.which("git"):
        command = [git, "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        revision = found.stdout.strip()
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in packages},
        "revision": revision or None,
    }
