"""Schedules as the simulator plays them: a line for each stage, a bar for each chunk forward or backward."""

from __future__ import annotations

from dataclasses import dataclass

from docs.figures.svg import GRAY, INK, Drawing, lightened
from megamem.pipeline.gantt import MICRO_BATCH_COLORS, note
from megamem.pipeline.schedule import chunk_schedule
from megamem.pipeline.simulate import Timeline, even_cost, simulate

STAGES, MICRO_BATCHES, CHUNKS = 4, 4, 4
LEFT, BAR, LINE, PANEL = 84.0, 22.0, 26.0, 34.0
"""Where time begins, height of a bar and of a stage's line, height of a panel's title."""
WIDTH = 860.0
"""Of the longest schedule."""


@dataclass(frozen=True)
class Panel:
    """A schedule and what it is called."""

    title: str
    timeline: Timeline
    chunks: int
    """A unit of work is one of so many parts of a sequence; of 1 there is no number to show."""


def plain() -> str:
    """Return the picture of the schedule of models whose memories stay in their layers, beside 1F1B."""
    ours = simulate(chunk_schedule(STAGES, MICRO_BATCHES, CHUNKS, CHUNKS), CHUNKS)
    whole = even_cost(CHUNKS, 2 * CHUNKS)
    theirs = simulate(chunk_schedule(STAGES, MICRO_BATCHES, 1, 1), 1, whole)
    return _draw(
        "Chunk by chunk the stages of a pipeline idle less than with whole sequences",
        [Panel("chunk by chunk", ours, CHUNKS), Panel("1F1B over whole sequences", theirs, 1)],
    )


def interleaved() -> str:
    """Return the picture of the schedule of a memory from the last stage to the first, and of too few micro-batches."""
    panels = []
    for micro_batches in (MICRO_BATCHES, STAGES // 2):
        orders = chunk_schedule(STAGES, micro_batches, CHUNKS, CHUNKS, interleaved=True)
        timeline = simulate(orders, CHUNKS, last_to_first=True)
        panels.append(Panel(f"interleaved, {micro_batches} micro-batches", timeline, CHUNKS))
    return _draw(
        "Where a memory goes from the last stage to the first, chunks of several micro-batches take turns", panels
    )


def _draw(title: str, panels: list[Panel]) -> str:
    length = max(panel.timeline.makespan for panel in panels)
    unit = WIDTH / length
    height = PANEL + STAGES * LINE + 10
    drawing = Drawing(LEFT + WIDTH + 12, len(panels) * height + 30, title)
    for index, panel in enumerate(panels):
        _panel(drawing, panel, index * height, unit)
    legend = "time: solid forward, light backward; a color for each micro-batch, numbers are chunks"
    drawing.text((LEFT, len(panels) * height + 12), legend, 12, anchor="start")
    return drawing.svg()


def _panel(drawing: Drawing, panel: Panel, top: float, unit: float) -> None:
    """Draw a schedule. unit: width of the time of one chunk's forward; a backward takes twice as long."""
    timeline = panel.timeline
    peaks = [timeline.peak_units(stage) * CHUNKS // panel.chunks for stage in range(timeline.stages)]
    drawing.text((LEFT, top + 18), f"{panel.title}: {note(timeline.bubble, peaks)}", 13, GRAY, "start")
    for stage in range(timeline.stages):
        drawing.text((LEFT - 12, top + PANEL + stage * LINE + BAR / 2), f"stage {stage}", 12, anchor="end")
    for event in timeline.events:
        color = MICRO_BATCH_COLORS[event.action.micro_batch]
        forward = event.action.kind == "forward"
        drawing.box(
            (LEFT + event.start * unit + 0.5, top + PANEL + event.stage * LINE),
            ((event.end - event.start) * unit - 1, BAR),
            str(event.action.chunk) if panel.chunks > 1 else "",
            color if forward else lightened(color),
            "#ffffff" if forward else INK,
            radius=2, font=9,
        )  # fmt: skip
