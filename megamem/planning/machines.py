"""The devices of plans: memory, rates and the links between them."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from megamem.config.base import ConfigModel
from megamem.config.load import load_config, parse_config, read_yaml
from megamem.costs.devices import Precision, device_peak
from megamem.errors import ConfigError
from megamem.planning.device_rates import cpu_rates
from megamem.planning.roofline import Rates

ACHIEVED = 0.8
"""Share of the rates of data sheets that large transfers over links reach."""
UNKNOWN_RESERVE, UNKNOWN_FRAGMENTS = 2e9, 0.05
"""Bytes and share of the memory of a device that is not known that the run cannot use."""
CPU_LATENCY = 2e-3
"""Seconds that gloo takes for a few numbers of two processes on one machine (`benchmarks/predicted_step.py`)."""
DISK = 2e9
"""Bytes per second that a node writes to shared storage."""


class Machine(ConfigModel):
    """A device in a cluster, and what programs reach on it. See devices.yaml."""

    name: str
    """Name of the device, as `megamem.costs.devices` may know it."""
    memory: PositiveFloat
    """Bytes of a device."""
    reserve: NonNegativeFloat
    """Bytes that the run cannot use: context and libraries, their communication buffers, fragmentation."""
    link: PositiveFloat
    """Bytes per second at which a device sends to others in its node, as data sheets print them."""
    network: PositiveFloat
    """Bytes per second at which a device sends to other nodes."""
    latency: NonNegativeFloat
    """Seconds that a collective, or a transfer to another stage, takes besides its bytes."""
    per_node: PositiveInt
    """Devices of a node."""
    reached: Rates
    """Rates of arithmetic, memory and launches."""

    @property
    def usable(self) -> float:
        """Bytes that the run may use."""
        return self.memory - self.reserve

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """What torch calls it."""
        return kind_of(self.name)

    def peak(self, precision: Precision) -> float:
        """Return the FLOP/s of dense matrix products that MFU is measured against."""
        return device_peak(self.name, precision) or self.reached.matmul[precision]

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


def kind_of(device: str) -> Literal["cuda", "cpu"]:
    """Return what torch calls a device that is given to `machine`."""
    return "cpu" if device == "cpu" else "cuda"


_KNOWN = Path(__file__).parent / "devices.yaml"


@cache
def _known() -> dict[str, Machine]:
    """Return the devices of devices.yaml by their short names."""
    return {kind: parse_config(Machine, tree, f"{_KNOWN}: {kind}") for kind, tree in read_yaml(_KNOWN).items()}


def machine(kind: str, devices: int) -> Machine:
    """Return one of so many devices.

    kind: a device of devices.yaml, a YAML file with its fields, or `cpu`: a rank's share of this machine, whose rates
        are measured.

    Raises: ConfigError for a kind that is not known, or a file that cannot be read.
    """
    if kind == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices
        shared = 1e10 / devices  # of a memory bus that all ranks copy over
        return Machine(
            name="cpu", memory=memory, reserve=0.5e9, link=shared, network=shared, latency=CPU_LATENCY,
            per_node=devices, reached=cpu_rates(),
        )  # fmt: skip
    if kind.endswith((".yaml", ".yml")):
        return load_config(Machine, Path(kind))
    if kind not in _known():
        raise ConfigError(f"plan: --device {kind!r} is not known; one of {', '.join([*_known(), 'cpu'])}, or FILE.yaml")
    return _known()[kind]


def machine_like(name: str, memory: float, per_node: int) -> Machine:
    """Return the machine of CUDA devices that torch describes so; rates of an unknown one are those of an A100.

    Args:
        name: as `torch.cuda.get_device_name` gives it.
        memory: bytes.
        per_node: ranks of a node.
    """
    for known in _known().values():
        # a share of a device (MIG) has the name and less memory
        if known.name in name and abs(memory / known.memory - 1) < 0.1:
            return known.model_copy(update={"memory": memory, "per_node": per_node})
    reserve = UNKNOWN_RESERVE + UNKNOWN_FRAGMENTS * memory
    changes = {"name": name, "memory": memory, "reserve": reserve, "per_node": per_node}
    return _known()["a100"].model_copy(update=changes)


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
