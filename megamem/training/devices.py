"""A run on the devices that it gets: what was left to the planner is chosen, and what does not fit is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
from pydantic import TypeAdapter
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from megamem.config.load import load_config
from megamem.config.run import RunConfig
from megamem.errors import ConfigError, LayoutError
from megamem.hardware import cores
from megamem.planning.activations import Activations
from megamem.planning.auto import chosen_before, is_open, resolve_auto
from megamem.planning.fit import check_memory
from megamem.planning.machines import Machine, cuda_machine, machine
from megamem.training.checks import check_layout

_RUNS = TypeAdapter(list[RunConfig])
_KEY = "megamem/resolved"
_stores: list[Store] = []
"""The store of this job, kept for as long as ranks may read what rank 0 chose."""


def uses_cuda(config: RunConfig) -> bool:
    """Return whether the run's ranks use CUDA devices; to find out does not initialize CUDA."""
    return config.parallel.device != "cpu" and torch.cuda.device_count() > 0


def is_rank_0() -> bool:
    """Return whether this process is the first rank of its job, or alone."""
    return os.environ.get("RANK", "0") == "0"


def local_processes(config: RunConfig) -> int:
    """Return the ranks of a run on this machine if nobody says how many: PP x TP x DP.

    Where TP or PP is left to the planner and DP is not given, one for each CUDA device if there are any.
    """
    parallel = config.parallel
    if parallel.dp is None and {"parallel.tp", "parallel.pp"} & set(config.auto.fields) and uses_cuda(config):
        return torch.cuda.device_count()
    return parallel.tp * parallel.pp * (parallel.dp or 1)


def settle(
    config: RunConfig,
    ranks: int,
    check: bool = True,
    device: Machine | None = None,
    activations: Activations | None = None,
) -> RunConfig:
    """Return the run with numbers for `auto`, once its plan fits into the devices.

    A run that is started again on as many devices keeps the numbers of its run folder. Ranks on the CPU share its
    memory with everything else: their plan is not compared with it, and where no layout fits the smallest is chosen.

    Args:
        ranks: of the whole job.
        check: compare the plan with the devices, unless the configuration says not to.
        device: of the ranks; this machine's if not given.
        activations: see `measurements`.

    Raises: LayoutError if no layout fits, or the given one does not.
    """
    found = _chosen_before(config, ranks) if is_open(config, ranks) else config
    check = check and config.parallel.check_memory and (device is not None or uses_cuda(config))
    if found is not None and not check:
        return found
    device = device or this_machine(config, ranks)
    activations = activations or measurements(config)
    found = found or resolve_auto(config, ranks, device, activations, must_fit=check)
    dp_size = check_layout(found, ranks)
    for number, phase in enumerate(found.phases if check else ()):
        try:
            check_memory(phase, dp_size, device, activations.of_phase(phase))
        except LayoutError as error:
            raise LayoutError(f"training.phases.{number - 1}: {error}" if number else str(error)) from None
    return found


def measurements(config: RunConfig) -> Activations:
    """Return what measures the run's activations, in processes forked from this one, which does not use CUDA yet."""
    processes = cores() if sys.platform == "linux" else 1
    return Activations.of_run(config, processes, "cuda" if uses_cuda(config) else "cpu")


def this_machine(config: RunConfig, ranks: int) -> Machine:
    """Return the devices of this machine as the planner knows them. ranks: of the whole job."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return cuda_machine(per_node) if uses_cuda(config) else machine("cpu", per_node)


def from_rank_0(timeout_s: float, work: Callable[[], list[RunConfig]]) -> list[RunConfig]:
    """Return what `work` gives on rank 0, on all ranks, before they have joined. `work` runs on rank 0 only.

    timeout_s: seconds that the others wait for it.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, _ = next(rendezvous("env://", timeout=timeout))
    _stores.append(store)
    if rank == 0:
        found = work()
        store.set(_KEY, _RUNS.dump_json(found))
        return found
    store.wait([_KEY], timeout)
    return _RUNS.validate_json(store.get(_KEY))


def _chosen_before(config: RunConfig, ranks: int) -> RunConfig | None:
    """Return the run as its run folder has it for as many devices; None without such a folder."""
    path = config.run_folder / "config.yaml"
    if not path.exists():
        return None
    try:
        return chosen_before(config, load_config(RunConfig, path), ranks)
    except ConfigError:
        return None  # of another release; what it is worth is checked when the run takes its folder
