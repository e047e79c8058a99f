"""Schedules and layouts as tables, lines and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.table import Table

from megamem.config.run import RunConfig
from megamem.pipeline.comparison import ScheduleReport
from megamem.pipeline.gantt import draw_schedules, note
from megamem.pipeline.record import read_record
from megamem.planning.ranks import RankBytes

ONE_F_ONE_B = "1F1B over whole sequences"
PARTS = ("weights", "gradients", "optimizer", "states", "total")


def schedule_table(report: ScheduleReport) -> Table:
    """Return a table of bubble and chunks in flight, beside those of 1F1B."""
    table = Table(title=f"{report.stages} stages, {report.micro_batches} micro-batches of {report.chunks} chunks")
    for column in ("", "chunk by chunk", ONE_F_ONE_B):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("bubble", f"{report.ours.bubble:.1%}", f"{report.one_f_one_b.bubble:.1%}")
    for stage, (ours, theirs) in enumerate(zip(report.peaks(), report.one_f_one_b_peaks(), strict=True)):
        table.add_row(f"most chunks in flight, stage {stage}", str(ours), str(theirs))
    return table


def draw_report(report: ScheduleReport, path: Path, recorded: Path | None) -> dict[str, Path]:
    """Draw the planned schedules and, to a picture of its own, a recorded step; return paths by what they show.

    Args:
        report: what is drawn.
        path: the picture; a PNG if it has no suffix.
        recorded: folder of a run that recorded a step (`logging.record_step`).

    Raises: ConfigError or DataError naming the file that cannot be written or read.
    """
    ours = f"chunk by chunk, gradients over {report.bptt_chunks} chunks"
    timelines = {ours: report.ours, ONE_F_ONE_B: report.one_f_one_b}
    notes = {
        ours: note(report.ours.bubble, report.peaks()),
        ONE_F_ONE_B: note(report.one_f_one_b.bubble, report.one_f_one_b_peaks()),
    }
    path = path if path.suffix else path.with_suffix(".png")
    timeline = read_record(recorded) if recorded is not None else None
    draw_schedules(timelines, notes, path)
    if timeline is None:
        return {"picture": path}
    # seconds and simulated time share no axis
    title = f"recorded in {recorded}, in seconds"
    peaks = [timeline.peak_units(stage) for stage in range(timeline.stages)]
    other = path.with_stem(f"{path.stem}-recorded")
    draw_schedules({title: timeline}, {title: note(timeline.bubble, peaks)}, other)
    return {"picture": path, "recorded_picture": other}


def show_layouts(
    config: RunConfig, dp_size: int, found: Mapping[tuple[int, int], RankBytes | str]
) -> Iterator[Table | str]:
    """Yield the table of what the fullest rank of each layout holds, and why other layouts are impossible.

    found: the rank, or the reason, by sizes of tensor and pipeline parallelism.
    """
    read = f"{config.training.micro_batch_size} x {config.data.sequence_length:,} tokens"
    table = Table(title=f"{config.name}: GiB of the fullest rank, DP {dp_size}, {read} read")
    for column in ("TP", "PP", "parameters", *PARTS):
        table.add_column(column, justify="right")
    for (tp, pp), rank in found.items():
        if not isinstance(rank, str):
            sizes = [f"{getattr(rank, part) / 2**30:.2f}" for part in PARTS]
            table.add_row(str(tp), str(pp), f"{rank.parameters:,}", *sizes)
    yield table
    yield from (f"not TP {tp} x PP {pp}: {rank}" for (tp, pp), rank in found.items() if isinstance(rank, str))
