"""The devices of plans: memory, rates and the links between them."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context

import torch

from megamem.costs.devices import Precision, device_peak
from megamem.errors import ConfigError

ACHIEVED = 0.8
"""Share of the rates of data sheets that large transfers over links and memory reach."""
UNKNOWN_RESERVE, UNKNOWN_FRAGMENTS = 2e9, 0.05
"""Bytes and share of the memory of a device that is not known that the run cannot use."""
DISK = 2e9
"""Bytes per second that a node writes to shared storage."""


@dataclass(frozen=True)
class Machine:
    """A device in a cluster; rates in bytes per second, as data sheets print them."""

    name: str
    """Name of the device, as `megamem.costs.devices` may know it."""
    memory: float
    """Bytes of a device."""
    reserve: float
    """Bytes that the run cannot use: context and libraries, their communication buffers, fragmentation."""
    memory_rate: float
    """Rate of the device's memory."""
    link: float
    """Rate at which a device sends to others in its node."""
    network: float
    """Rate at which a device sends to other nodes."""
    per_node: int
    """Devices of a node."""

    @property
    def usable(self) -> float:
        """Bytes that the run may use."""
        return self.memory - self.reserve

    def peak(self, precision: Precision) -> float:
        """Return the FLOP/s of dense matrix products."""
        if self.name == "cpu":
            return _measured_rate()
        # of a device without a data sheet here any peak will do: layouts are compared with each other
        found = device_peak(self.name, precision) or device_peak(_MACHINES["a100"].name, precision)
        assert found is not None
        return found

    def rate(self, ranks: int, apart: int = 1) -> float:
        """Return the bytes per second that each of `ranks` ranks, whose numbers are `apart` apart, sends around a ring.

        A group that spans nodes has a network card for each of its ranks in a node, and rings over all of them.
        """
        if self._in_a_node(ranks, apart):
            return ACHIEVED * self.link
        return ACHIEVED * min(self.link, self.network * max(1, self.per_node // apart))

    def hop(self, ranks: int, apart: int) -> float:
        """Return the bytes per second of the slowest hop from one of `ranks` ranks to the next, `apart` further."""
        return ACHIEVED * (self.link if self._in_a_node(ranks, apart) else self.network)

    def _in_a_node(self, ranks: int, apart: int) -> bool:
        """Return whether such a group of ranks lies within a node."""
        return self.per_node % (ranks * apart) == 0


# Memory is what torch reports of a device (the GB of data sheets are binary ones). Data sheets: H100, H200 SXM (3.35
# and 4.8 TB/s, NVLink 900 GB/s both ways together), A100 SXM 80 GB (2.04 TB/s, NVLink 600 GB/s). Networks as in the
# vendor's reference systems of eight: 400 and 200 Gbit/s for each device.
_MACHINES = {
    "h100": Machine("H100 80GB HBM3", 84.9e9, 6e9, 3.35e12, 450e9, 50e9, 8),
    "h200": Machine("H200", 149e9, 7e9, 4.8e12, 450e9, 50e9, 8),
    "a100": Machine("A100-SXM4-80GB", 84.9e9, 6e9, 2.04e12, 300e9, 25e9, 8),
}
KINDS = (*_MACHINES, "cpu")


def machine(kind: str, devices: int) -> Machine:
    """Return one of so many devices of a kind; `cpu` is a rank's share of this machine, whose matrix rate is measured.

    Raises: ConfigError for a kind that is not known.
    """
    if kind == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices
        shared = 1e10 / devices  # of a memory bus that all ranks copy over
        return Machine("cpu", memory, 0.5e9, shared, shared, shared, devices)
    if kind not in _MACHINES:
        raise ConfigError(f"plan: --device {kind!r} is not known; one of {', '.join(KINDS)}")
    return _MACHINES[kind]


def machine_like(name: str, memory: float, per_node: int) -> Machine:
    """Return the machine of CUDA devices that torch describes so; rates of an unknown one are those of an A100.

    Args:
        name: as `torch.cuda.get_device_name` gives it.
        memory: bytes.
        per_node: ranks of a node.
    """
    for known in _MACHINES.values():
        # a share of a device (MIG) has the name and less memory
        if known.name in name and abs(memory / known.memory - 1) < 0.1:
            return replace(known, memory=memory, per_node=per_node)
    reserve = UNKNOWN_RESERVE + UNKNOWN_FRAGMENTS * memory
    return replace(_MACHINES["a100"], name=name, memory=memory, reserve=reserve, per_node=per_node)


def cuda_machine(per_node: int) -> Machine:
    """Return the machine of this node's CUDA devices, by its first one. per_node: ranks of a node."""
    # in a process of its own: what this one forks later, to measure activations, must not find CUDA initialized
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        name, memory = pool.submit(_first_device).result()
    return machine_like(name, memory, per_node)


def _first_device() -> tuple[str, float]:
    """Return name and bytes of the first CUDA device."""
    found = torch.cuda.get_device_properties(0)
    return found.name, float(found.total_memory)


@lru_cache(maxsize=1)
def _measured_rate() -> float:
    """Return the FLOP/s of one core in FP32, from products that take about a tenth of a second."""
    size, threads = 768, torch.get_num_threads()
    a = torch.ones(size, size)
    torch.set_num_threads(1)
    try:
        a @ a
        begun = time.perf_counter()
        for _ in range(3):
            a @ a
        return 3 * 2 * size**3 / (time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
