"""Seconds that a search for layouts takes, for every model of configs/models with 760M or 1.3B parameters.

    python -m benchmarks.searches [--devices 64] [--models titans ...]

Each is a process of its own, `megamem plan --search`, from its start to its end: importing torch is a part of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.common import OUTPUT, ROOT, publish, table

RECIPES = {"760m": "memory_caching_760m", "1.3b": "memory_caching_1.3b"}


def seconds_of(model: str, size: str, devices: int) -> float:
    """Run the search of one model and return its seconds."""
    (path,) = (ROOT / "configs" / "models").glob(f"*/{model}-{size}.yaml")
    recipe = ROOT / "configs" / "recipes" / f"{RECIPES[size]}.yaml"
    command = [
        sys.executable, "-m", "megamem", "plan", str(recipe), "--model", str(path),
        "--devices", str(devices), "--device", "h100", "--search", "--json",
    ]  # fmt: skip
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> None:
    """Time all searches and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="without the size, as titans-grm; all if not given")
    options = parser.parse_args()
    names = sorted(path.stem for size in RECIPES for path in (ROOT / "configs" / "models").glob(f"*/*-{size}.yaml"))
    models = dict.fromkeys(name.rpartition("-")[0] for name in names)
    if unknown := set(options.models or ()) - set(models):
        parser.error(f"--models {', '.join(sorted(unknown))}: none of {', '.join(models)}")
    found: dict[str, dict[str, float]] = {}
    for model in models:
        if options.models and model not in options.models:
            continue
        found[model] = {}
        for size in RECIPES:
            if f"{model}-{size}" in names:
                found[model][size] = seconds_of(model, size, options.devices)
                sys.stderr.write(f"{model}-{size}: {found[model][size]:.1f} s\n")
    rows = [
        [model, *(f"{times[size]:.1f}" if size in times else "" for size in RECIPES)] for model, times in found.items()
    ]
    print(table(["search, seconds", "760M", "1.3B"], rows))
    publish({"devices": options.devices, "seconds": found}, OUTPUT / "searches.json")


if __name__ == "__main__":
    main()
