"""A step of a real run, recorded action by action: one file per stage in the run folder."""

from __future__ import annotations

import json
from pathlib import Path

from megamem.errors import DataError
from megamem.pipeline.simulate import Event, Timeline

NAME = "schedule-stage{stage}.json"


def write_record(folder: Path, stage: int, stages: int, events: list[Event]) -> None:
    """Write what one stage did."""
    text = json.dumps(Timeline(stages, tuple(events)).to_dict())
    (folder / NAME.format(stage=stage)).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> Timeline:
    """All stages of a recorded step. Times are those of each host's clock. Raises DataError naming what is missing."""
    first = folder / NAME.format(stage=0)
    if not first.is_file():
        raise DataError(f"{first}: no recorded step in this run folder; train with logging.record_step=N")
    stages = _read_stage(first, 0, None).stages
    parts = [_read_stage(folder / NAME.format(stage=stage), stage, stages) for stage in range(stages)]
    return Timeline(stages, tuple(event for part in parts for event in part.events))


def _read_stage(path: Path, stage: int, stages: int | None) -> Timeline:
    """One stage's file, which must say so and agree on the number of stages."""
    try:
        timeline = Timeline.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a readable record of a stage ({error})") from None
    if not timeline.events or not isinstance(timeline.stages, int) or {e.stage for e in timeline.events} != {stage}:
        raise DataError(f"{path}: not a record of stage {stage}")
    if stages is not None and timeline.stages != stages:
        raise DataError(f"{path}: of a run with {timeline.stages} stages, but stage 0 is of one with {stages}")
    return timeline
