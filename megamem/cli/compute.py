"""The options --dtype, --device and --processes: the type of numbers, and where a model is read with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from megamem.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megamem.parallel.topology import Topology


@dataclass(frozen=True)
class Place:
    """Where this process reads with a model."""

    device: torch.device
    topology: Topology | None
    """Data-parallel ranks that share what is read, each with the whole model; None in a single process."""


def compute_place(device: str | None, processes: int) -> Place:
    """Return where this process reads with a model: as a rank of a job, or alone on `device`.

    Where several processes are asked for and this is no rank yet, the same command is run by each of them instead, and
    this process ends with their exit code. Raises ConfigError for a device that is not there.
    """
    from launchers.local_ranks import inside_job, run_local

    chosen = compute_device(device)
    if not inside_job():
        if processes > 1:
            raise typer.Exit(run_local(processes, sys.argv[1:]))
        return Place(chosen, None)
    from megamem.parallel.topology import Topology

    topology = Topology.start(device=chosen.type)
    return Place(topology.device, topology)


def compute_dtype(name: str) -> torch.dtype:
    """Return the dtype of --dtype, the processor prepared for it. Raises ConfigError for an unknown one."""
    from megamem.memory.base import DTYPES

    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: give fp32 or bf16")
    if name == "bf16":
        from megamem.hardware import avoid_broken_amx

        avoid_broken_amx()
    return DTYPES[name]


def compute_device(name: str | None) -> torch.device:
    """Return the device of --device: cuda where there is one if none is named. Raises ConfigError where it is not."""
    import torch

    there = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if there else "cpu"))
    except RuntimeError:
        raise ConfigError(f"--device {name}: give cpu, cuda or the number of one, as cuda:1") from None
    if device.type == "cuda" and not there:
        raise ConfigError(f"--device {name}: torch finds no CUDA device; give cpu")
    return device
