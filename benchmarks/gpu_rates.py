"""What a machine's devices reach, as a file that `megamem plan --device FILE.yaml` takes.

    python -m benchmarks.gpu_rates [--output runs/benchmarks/device.yaml]

Matrix products in BF16 and FP32, fused attention, memory, the smallest kernel and the launch of an operation are
measured on one CUDA device. Where there are several, `megamem preflight` measures all-reduces over all of them, whose
rate is that of the links within the node. The rate between nodes cannot be measured on one of them: it is taken from
`megamem/planning/devices.yaml`, that of the same device or of an A100. Without a CUDA device it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import OUTPUT
from megamem.planning.device_rates import SIZES, device_rates
from megamem.planning.machines import ACHIEVED, Machine, machine_like
from megamem.planning.roofline import Rates


def measured_machine(name: str, memory: float, devices: int, rates: Rates, all_reduce: float | None) -> Machine:
    """Return the machine of so many devices as plans know it.

    Args:
        name, memory: of a device, as torch reports them; bytes.
        devices: of the node.
        rates: what one of them reaches.
        all_reduce: bytes per second that each sends in a large all-reduce over all of them, None for one device.
    """
    known = machine_like(name, memory, devices)
    # plans take links to reach a share of what data sheets print
    link = known.link if all_reduce is None else all_reduce / ACHIEVED
    return known.model_copy(update={"reached": rates, "link": link})


def preflight(devices: int, device: str) -> str:
    """Return what `megamem preflight` prints over so many processes."""
    command = [sys.executable, "-m", "megamem", "preflight", "--json", "--device", device, "--processes", str(devices)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600).stdout


def all_reduce_rate(printed: str) -> float | None:
    """Return the bytes per second of the largest all-reduce that a preflight has measured; None if it failed before.

    printed: its JSON, behind whatever libraries have printed.
    """
    try:
        record: dict[str, Any] = json.JSONDecoder().raw_decode(printed[printed.index("{") :])[0]
        reductions = sorted(record["reductions"], key=lambda reduction: int(reduction["bytes"]))
        return float(reductions[-1]["bandwidth"])
    except (ValueError, KeyError, IndexError):
        return None


def write_machine(found: Machine, path: Path) -> None:
    """Write the machine as a YAML file with its fields."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = (
        f"# Measured on {os.uname().nodename} with torch {torch.__version__} by benchmarks/gpu_rates.py. Fields are\n"
        "# those of megamem/planning/devices.yaml; reserve and network are taken from there.\n"
    )
    path.write_text(head + yaml.safe_dump(found.model_dump(mode="json"), sort_keys=False), encoding="utf-8")


def measure(path: Path) -> Machine:
    """Measure this machine's CUDA devices and write the file."""
    devices, first = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
    rates = device_rates(torch.device("cuda", 0), SIZES["cuda"])
    torch.cuda.empty_cache()
    rate = all_reduce_rate(preflight(devices, "cuda")) if devices > 1 else None
    if devices > 1 and rate is None:
        print("benchmarks.gpu_rates: megamem preflight has measured no all-reduce; run it by itself to see why")
        print(f"  (link is not measured: {machine_like(first.name, float(first.total_memory), devices).link:.3g})")
    found = measured_machine(first.name, float(first.total_memory), devices, rates, rate)
    write_machine(found, path)
    return found


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT / "device.yaml")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.gpu_rates: needs a CUDA device and torch finds none; nothing measured")
        return
    measure(options.output)
    print(options.output.read_text(encoding="utf-8"))
    print(f"written to {options.output}; plans with it: megamem plan CONFIG --device {options.output}")


if __name__ == "__main__":
    main()
