"""`megamem plan`: what a configuration will cost, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from megamem.cli.options import Json, ModelFile, Overrides
from megamem.cli.output import console, write_json
from megamem.errors import ConfigError

if TYPE_CHECKING:
    from megamem.config.run import RunConfig
    from megamem.pipeline.comparison import ScheduleReport


def plan(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run; its layout, costs and batch")] = None,
    overrides: Overrides = None,
    model: ModelFile = None,
    schedule: Annotated[bool, typer.Option("--schedule", help="bubble and peak memory of the schedule")] = False,
    devices: Annotated[int | None, typer.Option(min=1, help="how many; as configured if not given")] = None,
    device: Annotated[str, typer.Option(help="h100, h200, a100, cpu, or a YAML file")] = "h100",
    search: Annotated[bool, typer.Option("--search", help="the best layouts on the devices")] = False,
    layouts: Annotated[bool, typer.Option("--layouts", help="bytes a rank holds, by TP and PP")] = False,
    draw_schedule: Annotated[Path | None, typer.Option(help="draw the schedule beside 1F1B to this picture")] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="run folder whose recorded step (logging.record_step) is drawn too")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="pipeline stages, if no configuration is given")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="micro-batches of a step")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="chunks of a sequence")] = None,
    bptt_chunks: Annotated[int | None, typer.Option(min=1, help="chunks of a window; all if not given")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="data-parallel size; the configuration's if not given")] = None,
    as_json: Json = False,
) -> None:
    """Plan a run on given devices: its bytes, traffic and time; the best layouts; its schedule and a picture of it.

    Of a curriculum, each lesson but for schedules.
    """
    from megamem.config.recipe import load_run

    if model is not None and config is None:
        raise ConfigError(f"plan: --model {model} goes with a configuration; give one")
    if layouts:
        others = (schedule, draw_schedule, recorded, stages, micro_batches, chunks, bptt_chunks, devices)
        if config is None or search or any(others):
            raise ConfigError("plan: --layouts goes with a configuration, --dp and --json, and with no other option")
        for run in _runs(config, overrides, model):
            _print_layouts(run, dp, as_json)
        return
    if not (schedule or draw_schedule):
        if config is None:
            raise ConfigError("plan: nothing to plan; give a configuration, or --schedule and sizes")
        if any((stages, micro_batches, chunks, bptt_chunks, dp, recorded)):
            raise ConfigError("plan: a whole plan goes with --devices, --device, --search and --json only")
        for run in _runs(config, overrides, model):
            _print_plan(run, devices, device, search, as_json)
        return
    if devices or search:
        raise ConfigError("plan: --devices and --search go with a whole plan, not with a schedule")
    if draw_schedule is not None and not draw_schedule.name:
        raise ConfigError("plan: --draw-schedule names no file; give FILE.png")
    if recorded is not None and draw_schedule is None:
        raise ConfigError("plan: --recorded RUN is drawn; give --draw-schedule FILE too")
    from megamem.planning.show_schedule import draw_report, schedule_table

    settings = None if config is None else load_run(config, overrides or [], model)
    report = _report(settings, stages, micro_batches, chunks, bptt_chunks, dp)
    figures = report.to_dict()
    pictures = {} if draw_schedule is None else draw_report(report, draw_schedule, recorded)
    figures |= {name: str(path) for name, path in pictures.items()}
    if as_json:
        write_json(figures)
        return
    _print([schedule_table(report), *(f"{name.replace('_', ' ')}: {path}" for name, path in pictures.items())])


def _runs(config: Path, overrides: list[str] | None, model: Path | None) -> list[RunConfig]:
    """Return the run of a file, or those of a curriculum's lessons, whose weights need not be there."""
    from megamem.config.curriculum import load_runs

    runs = load_runs(config, overrides or [], model)
    if len(runs) > 1:
        from megamem.training.curriculum import expect_lessons

        expect_lessons(runs)
    return runs


def _print_plan(
    settings: RunConfig,
    devices: int | None,
    device: str,
    search: bool,
    as_json: bool,
) -> None:
    """Print the plan of the configured layout, or the best layouts that a search finds."""
    from megamem.hardware import cores
    from megamem.planning.activations import Activations
    from megamem.planning.auto import resolve_for
    from megamem.planning.machines import kind_of, machine
    from megamem.planning.plan import data_parallel, make_plan
    from megamem.planning.search import Search
    from megamem.planning.show import show_plan, show_search

    # this process is nothing but a plan: it can be forked
    processes = cores() if sys.platform == "linux" else 1
    activations = Activations.of_run(settings, processes, kind_of(device))
    if search:
        if devices is None:
            raise ConfigError("plan: --search needs --devices N")
        found = Search(settings, devices, machine(device, devices), activations).run()
        figures, shown = found.to_dict(), show_search(found)
    else:
        settings = resolve_for(settings, devices, device, activations)
        dp_size = data_parallel(settings, devices or settings.auto.devices)
        ranks = dp_size * settings.parallel.tp * settings.parallel.pp
        made = make_plan(settings, dp_size, machine(device, ranks), activations.of_phase(settings))
        figures, shown = made.to_dict(), show_plan(made)
    if as_json:
        write_json(figures)
        return
    _print(shown)


def _print_layouts(settings: RunConfig, dp: int | None, as_json: bool) -> None:
    """Print what the fullest rank of each layout holds."""
    from megamem.planning.ranks import layouts
    from megamem.planning.show_schedule import show_layouts

    dp = dp or settings.parallel.dp or 1
    found = layouts(settings, dp)
    if as_json:
        rows = [
            {
                "tp": tp,
                "pp": pp,
                **({"error": rank} if isinstance(rank, str) else {**asdict(rank), "total": rank.total}),
            }
            for (tp, pp), rank in found.items()
        ]
        write_json({"name": settings.name, "dp": dp, "layouts": rows})
        return
    _print(show_layouts(settings, dp, found))


def _report(
    settings: RunConfig | None,
    stages: int | None,
    micro_batches: int | None,
    chunks: int | None,
    bptt_chunks: int | None,
    dp: int | None,
) -> ScheduleReport:
    """Return the schedule of a configuration or of given sizes. Raises ConfigError."""
    from megamem.pipeline.comparison import compare, compare_for

    sizes = {"--stages": stages, "--micro-batches": micro_batches, "--chunks": chunks}
    try:
        if settings is not None:
            if given := [name for name, size in {**sizes, "--bptt-chunks": bptt_chunks}.items() if size is not None]:
                raise ConfigError(f"plan: {given[0]} does not go with a configuration, which says it itself")
            return compare_for(settings, dp or settings.parallel.dp or 1)
        if dp is not None:
            raise ConfigError("plan: --dp divides a configuration's batch; without one give --micro-batches")
        if stages is None or micro_batches is None or chunks is None:
            missing = next(name for name, size in sizes.items() if size is None)
            raise ConfigError(
                f"plan: {missing} is missing; give a configuration or --stages, --micro-batches and --chunks"
            )
        return compare(stages, micro_batches, chunks, bptt_chunks or chunks)
    except ValueError as error:
        raise ConfigError(f"plan: {error}") from None


def _print(parts: Iterable[Table | str]) -> None:
    """Print tables and lines."""
    for part in parts:
        console.print(part, highlight=False)
