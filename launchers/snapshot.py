"""The record of a job, written before it starts: enough to say later what ran, with which code, and to repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import distributions, version
from pathlib import Path

from megamem.errors import RunFolderError

KEPT = {
    "CUDA_": "DEVICE_MAX_CONNECTIONS DEVICE_ORDER HOME LAUNCH_BLOCKING MODULE_LOADING VISIBLE_DEVICES",
    "GLOO_": "SOCKET_IFNAME",
    "MEGAMEM_": "CASES HEAD PORT",
    "NCCL_": (
        "ALGO BUFFSIZE COLLNET_ENABLE CROSS_NIC CUMEM_ENABLE DEBUG DEBUG_SUBSYS IB_DISABLE IB_GID_INDEX IB_HCA "
        "IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_SL IB_TC IB_TIMEOUT MAX_CTAS MAX_NCHANNELS "
        "MIN_CTAS MIN_NCHANNELS NET NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NSOCKS_PERTHREAD NTHREADS NVLS_ENABLE "
        "P2P_DISABLE P2P_LEVEL PROTO PXN_DISABLE SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS TOPO_FILE"
    ),
    "OMP_": "DYNAMIC NUM_THREADS PLACES PROC_BIND SCHEDULE WAIT_POLICY",
    "SLURM_": (
        "CLUSTER_NAME CPUS_ON_NODE CPUS_PER_TASK GPUS GPUS_ON_NODE GPUS_PER_NODE JOB_CPUS_PER_NODE JOB_GPUS JOB_ID "
        "JOB_NAME JOB_NODELIST JOB_NUM_NODES JOB_PARTITION JOB_QOS JOB_START_TIME JOB_END_TIME NNODES NTASKS "
        "NTASKS_PER_NODE NODEID PROCID RESTART_COUNT SUBMIT_DIR SUBMIT_HOST TASKS_PER_NODE"
    ),
    "TORCH_": (
        "CPP_LOG_LEVEL CUDA_ARCH_LIST DISTRIBUTED_DEBUG LOGS NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT "
        "NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_TRACE_BUFFER_SIZE SHOW_CPP_STACKTRACES"
    ),
}
"""Environment variables whose values are written down, by the beginning of their names. Of others with these beginnings
the names alone are: a value may be a secret, whatever it is called."""

FOLDER = "launch"
"""The folder in a run folder that has a folder for each start."""


def snapshot_folder(run_folder: Path) -> Path:
    """Return the folder for a job that starts now, `launch/<UTC time>`, which is not made yet."""
    return run_folder / FOLDER / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def write_snapshot(folder: Path, files: Mapping[str, str], private: Sequence[str] = ()) -> None:
    """Make `folder` with `files`, the code's version, packages and environment. Raises RunFolderError.

    private: names of those that only their owner may read.
    """
    try:
        folder.mkdir(parents=True)
        (folder / "snapshot.json").write_text(json.dumps(facts(), indent=2) + "\n", encoding="utf-8")
        (folder / "packages.txt").write_text("\n".join(packages()) + "\n", encoding="utf-8")
        if (diff := _git("diff", "HEAD")) is not None and diff.strip():
            (folder / "changes.diff").write_text(diff, encoding="utf-8")
        for name, text in files.items():
            (folder / name).touch(0o600 if name in private else 0o666)
            (folder / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise RunFolderError(f"{folder}: another launch of this run began in the same second; try again") from None
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be written ({error.strerror}); choose another `runs_folder`") from None


def facts() -> dict[str, object]:
    """Return command, code version, machine and environment."""
    revision, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return {
        "command": sys.argv,
        "work": str(Path.cwd()),
        "megamem": version("megamem"),
        "revision": revision.strip() if revision else None,
        "changed": status.splitlines() if status is not None else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "environment": environment(os.environ),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables of `KEPT`; None for others with their beginnings, whose values are not written down."""
    kept = {f"{prefix}{name}" for prefix, names in KEPT.items() for name in names.split()}
    return {
        name: value if name in kept else None
        for name, value in sorted(variables.items())
        if name.startswith(tuple(KEPT))
    }


@cache
def packages() -> tuple[str, ...]:
    """Return every installed distribution as `name==version`."""
    found = {(dist.metadata["Name"], dist.version) for dist in distributions()}
    return tuple(f"{name}=={number}" for name, number in sorted(found, key=lambda item: str(item[0]).lower()))


def _git(*arguments: str) -> str | None:
    """Return git's output for the folder of the code; None where it is not under git."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
