"""What the fullest rank of the 760M and 1.3B models holds: as the recipes train them, and by TP and PP.

    python -m benchmarks.layouts > docs/layouts.md

Built on the meta device and measured on the CPU, in minutes; `megamem plan CONFIG --devices N` and `megamem plan
CONFIG --layouts` give the parts of one configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common import ROOT, table
from megamem.config.recipe import load_run
from megamem.config.run import RunConfig
from megamem.hardware import cores
from megamem.pipeline.balancing import place
from megamem.planning.activations import Activations
from megamem.planning.auto import resolve_auto
from megamem.planning.fit import largest_part
from megamem.planning.machines import machine
from megamem.planning.plan import data_parallel, rank_reports
from megamem.planning.ranks import layouts
from megamem.planning.show import GIB
from megamem.planning.step_time import Layout

SIZES = ("760m", "1.3b")
DEVICES = (8, 32, 64)
HEAD = """# Layouts

This page: `python -m benchmarks.layouts > docs/layouts.md`. All of it is predicted; [planning](planning.md) says how.

## What the recipes choose

`configs/recipes/memory_caching_760m.yaml` and `memory_caching_1.3b.yaml` leave TP, PP, ZeRO stage, micro-batch and
recomputation to the planner (`auto`). This is what it chooses on 8, 32 and 64 H100 of 80 GB, of which {usable:.1f} GiB
may be used and 5 % of these are left free, for 128 sequences of {tokens:,} tokens a step in every model: TP x PP x DP,
ZeRO stage, rows of a micro-batch (and recomputation, where there is any), and the GiB of the fullest rank at the moment
that holds most, with its largest part. `megamem plan RECIPE --model MODEL --devices N` says more of each.
"""
BETWEEN_STEPS = """
## Bytes between steps

GiB that the fullest rank of a layout holds between steps (BF16 weights, FP32 sums of gradients, FP32 master weights and
moments, for one data-parallel rank: ZeRO 1 divides the last two among more), and with them the memory states of one
sequence of {tokens:,} tokens read to its end. Activations and communication buffers come on top. Counted from what each
rank builds on the meta device. Parts of one configuration: `megamem plan CONFIG --layouts`.
"""


def main() -> None:
    """Print the page."""
    runs = dict(_runs())
    tokens = next(iter(runs.values())).data.sequence_length
    print(HEAD.format(tokens=tokens, usable=machine("h100", 8).usable / GIB))
    columns = ("model", *(f"{devices} devices" for devices in DEVICES), "largest part on them")
    print(table(columns, [_chosen(name, config) for name, config in runs.items()]))
    print(BETWEEN_STEPS.format(tokens=tokens))
    print(_between_steps(runs))


def _runs() -> Iterator[tuple[str, RunConfig]]:
    """Yield the runs by the names of their models."""
    files = [(path, size) for size in SIZES for path in (ROOT / "configs" / "models").glob(f"*/*-{size}.yaml")]
    for path, size in sorted(files, key=lambda item: item[0].stem):
        yield path.stem, load_run(ROOT / "configs" / "recipes" / f"memory_caching_{size}.yaml", [], path)


def _chosen(name: str, config: RunConfig) -> list[str]:
    """Return the row of a model: what is chosen for each number of devices, and what takes most there."""
    activations = Activations.of_run(config, cores())
    cells, parts = [], []
    for devices in DEVICES:
        found = resolve_auto(config, devices, machine("h100", devices), activations)
        parallel, training, dp_size = found.parallel, found.training, data_parallel(found, devices)
        reports = rank_reports(Layout(found, dp_size, tuple(place(found))), activations.of_phase(found))
        rank = max(reports, key=lambda report: report.total)
        rows = f"{training.micro_batch_size} row{'s' if training.micro_batch_size > 1 else ''}"
        part = f" {training.recompute}" if isinstance(training.recompute, str) else ""
        recomputed = f", recompute{part}" if training.recompute else ""
        cells.append(
            f"{parallel.tp} x {parallel.pp} x {dp_size}, ZeRO {parallel.zero_stage}, {rows}{recomputed}: "
            f"{rank.total / GIB:.1f}"
        )
        parts.append(largest_part(rank))
    sizes = ", ".join(f"{size / GIB:.1f}" for _, size in parts)
    return [name, *cells, f"{', '.join(dict.fromkeys(part for part, _ in parts))}: {sizes}"]


def _between_steps(runs: dict[str, RunConfig]) -> str:
    """Return the table of bytes by TP and PP."""
    rows = []
    columns: list[str] = []
    for name, config in runs.items():
        found = layouts(config)
        columns = columns or ["model", "parameters", *(f"TP {tp} PP {pp}" for tp, pp in found)]
        whole = found[1, 1]
        sizes = ["-" if isinstance(rank, str) else f"{rank.total / GIB:.2f}" for rank in found.values()]
        count = "-" if isinstance(whole, str) else f"{whole.parameters:,}"
        rows.append([name, count, *sizes])
    return table(columns, rows)


if __name__ == "__main__":
    main()
