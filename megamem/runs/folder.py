"""The folder of a run: made once, never shared with another run, with what is needed to repeat the run."""

from __future__ import annotations

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
from typing import TypedDict

from checkpoints.folder import begun_from, checkpoints_in
from checkpoints.location import check_folder, run_checkpoints
from megamem.config.load import config_hash, dump_yaml
from megamem.config.run import RunConfig
from megamem.errors import RunFolderError
from megamem.files import try_lock
from megamem.runs.result import RESULT

FREE_BYTES = 64 * 2**20
"""Bytes that must be free besides those of the weights: for metrics, traces, pictures."""

LEASE_S = 120.0
"""Seconds that the lock of a lost host may outlive it: NFSv4 gives it up after a lease of 90 s as a rule."""
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Variables that count how often agents and SLURM have started a job again."""


class RunLock:
    """Keeps two jobs from writing one run folder: held from `take` to the end of the `with` block or of the process."""

    def __init__(self, folder: Path, busy: str = "is being written by another job") -> None:
        """Describe the lock of `folder`. busy: what the error says of a folder that somebody else holds."""
        self.path = folder / "lock"
        self.busy = busy
        self._file: TextIOWrapper | None = None

    def take(self, patience_s: float = 0.0) -> None:
        """Make the folder and hold it. On file systems without locks nothing is held.

        Raises:
            RunFolderError: somebody else holds it, and still does after `patience_s` seconds; the message names who.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+", encoding="utf-8")
        deadline = time.monotonic() + patience_s
        while not try_lock(file):
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
    """Return the seconds to wait for a run's lock: LEASE_S in a restarted job, whose host may have been lost."""
    return LEASE_S if any(os.environ.get(count, "0") != "0" for count in RESTARTS) else 0.0


def held(path: Path) -> bool:
    """Return whether another process holds the lock of a file, if there is one."""
    if not path.exists():
        return False
    # NFS locks only files that are open for writing
    with path.open("r+b") as file:
        return not try_lock(file)


def check_run_folder(config: RunConfig, checkpoint_bytes: int) -> None:
    """Check that the run can be written, or resumed, in its folder.

    Args:
        config: the run.
        checkpoint_bytes: size of one checkpoint.

    Raises:
        RunFolderError: the folder holds a run that cannot be resumed, cannot be written, or its disk has no room.
        CheckpointError: `checkpoint.folder`, local or in an object store, cannot be written.
        StoreError: its object store does not answer.
    """
    folder, checkpoints = config.run_folder, run_checkpoints(config)
    if config.checkpoint.folder is not None:
        check_folder(checkpoints)
    if (folder / "config.yaml").exists() and not can_resume(config):
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
    # a new checkpoint is written before an old one is removed
    kept = config.checkpoint
    at_most = kept.keep_last + kept.keep_best + len(kept.keep_steps) + 1
    needed_bytes = checkpoint_bytes * max(at_most - len(checkpoints_in(checkpoints)), 1)
    if config.checkpoint.folder is not None:
        # only the final weights are written to the run folder; two moments go with them elsewhere
        needed_bytes = checkpoint_bytes // 3
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + FREE_BYTES:
        raise RunFolderError(
            f"{existing}: {free / 2**20:.0f} MiB free, but the run needs about "
            f"{(needed_bytes + FREE_BYTES) / 2**20:.0f} MiB; free some or choose another `runs_folder`"
        )


def can_resume(config: RunConfig) -> bool:
    """Return whether the run folder holds a part of this run: checkpoints, or the same run ended before its first."""
    folder, resume = config.run_folder, config.checkpoint.resume
    if resume == "none":
        return False
    own = checkpoints_in(run_checkpoints(config))
    if resume != "auto" and any(checkpoint.complete for checkpoint in own):
        return begun_from(run_checkpoints(config), resume)
    if resume == "auto" and own:
        return True
    same = (folder / "config.yaml").read_text(encoding="utf-8") == _text(config)
    return same and not any(path.exists() for path in (folder / RESULT, config.weights))  # what a run leaves at its end


def _text(config: RunConfig) -> str:
    """Return the contents of a run's config.yaml."""
    return f"# resolved configuration, hash {config_hash(config)}\n{dump_yaml(config)}"


def _taken(config: RunConfig) -> str:
    """Return the message about a run folder that holds another run."""
    folder = config.run_folder
    if checkpoints_in(run_checkpoints(config)):
        return f"{folder}: already holds a run; checkpoint.resume=auto goes on with it, or choose another `name`"
    why = "" if config.checkpoint.resume == "none" else ", without a checkpoint to go on from"
    return f"{folder}: already holds another run{why}; choose another `name` or remove the folder"


def create_run_folder(config: RunConfig) -> Path:
    """Make the folder with `config.yaml` and `environment.json`, and return it.

    A run that resumes keeps the configuration it had before as `config-before-N.yaml` if it has changed.

    Raises:
        RunFolderError: another run was faster.
    """
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    text = _text(config)
    path = folder / "config.yaml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if not can_resume(config):
            raise RunFolderError(_taken(config)) from None
        if path.read_text(encoding="utf-8") != text:
            earlier = len(list(folder.glob("config-before-*.yaml")))
            path.rename(folder / f"config-before-{earlier + 1}.yaml")
            path.write_text(text, encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")
    return folder


class Environment(TypedDict):
    """What a run ran in: the contents of environment.json."""

    command: list[str]
    """Arguments of the process."""
    python: str
    """Version of Python."""
    platform: str
    """Operating system and processor."""
    packages: dict[str, str]
    """Versions of the packages that compute."""
    revision: str | None
    """Git revision of the code, where it lies in a repository."""


def environment() -> Environment:
    """Return versions, command and code revision of this process."""
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
