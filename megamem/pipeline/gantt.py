"""A picture of a pipeline's schedule: one line per stage, one bar per action."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megamem.errors import ConfigError
from megamem.pipeline.simulate import Timeline

MICRO_BATCH_COLORS = ("#4878a8", "#e08a3c", "#5fa05a", "#b8524e", "#8a6fae", "#8c6d5a", "#d07bb0", "#7f7f7f")
BACKWARD_ALPHA = 0.45
LABELLED_EVENTS = 160
"""Above so many bars, numbers would not be readable."""


def draw_schedules(timelines: dict[str, Timeline], notes: dict[str, str], path: Path) -> None:
    """Draw timelines one below the other on one time axis.

    Args:
        timelines: by title.
        notes: by title, what the line under it says (bubble, peak memory).
        path: of the picture; its suffix chooses the format.
    Raises: ConfigError for a path that cannot be written or a format that cannot be drawn.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    formats = plt.figure().canvas.get_supported_filetypes()
    plt.close("all")
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(f"{path}: cannot draw this format; use one of .{', .'.join(sorted(formats))}")
    heights = [timeline.stages + 1.2 for timeline in timelines.values()]
    figure, axes = plt.subplots(
        len(timelines), 1, sharex=True, squeeze=False, figsize=(13, 0.42 * sum(heights) + 1.2),
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    for axis, (title, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        _draw(axis, timeline)
        axis.set_title(f"{title}: {notes[title]}", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("time (solid: forward, light: backward; a color per micro-batch, numbers are chunks)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        plt.close(figure)


def _draw(axis: Any, timeline: Timeline) -> None:
    begin = min(event.start for event in timeline.events)
    several = any(event.action.chunk for event in timeline.events)
    labelled = several and len(timeline.events) <= LABELLED_EVENTS
    for event in timeline.events:
        start, length = event.start - begin, event.end - event.start
        forward = event.action.kind == "forward"
        color = MICRO_BATCH_COLORS[event.action.micro_batch % len(MICRO_BATCH_COLORS)]
        axis.barh(
            event.stage, length, left=start, height=0.8, color=color, alpha=1.0 if forward else BACKWARD_ALPHA,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        if labelled:
            axis.text(
                start + length / 2, event.stage, str(event.action.chunk), ha="center", va="center", fontsize=6,
                color="white" if forward else "black",
            )  # fmt: skip
    axis.set_yticks(range(timeline.stages), [f"stage {stage}" for stage in range(timeline.stages)])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def note(bubble: float, peaks: Sequence[int]) -> str:
    """Bubble and peak memory in words."""
    return f"bubble {bubble:.1%}, most chunks in flight by stage {', '.join(map(str, peaks))}"
