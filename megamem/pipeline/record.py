"""A step of a real run, recorded action by action: one file per stage in the run folder."""

from __future__ import annotations

import json
from pathlib import Path

from megamem.errors import DataError
from megamem.pipeline.simulate import Event, Timeline

NAME = "schedule-stage{stage}.json"


def write_record(folder: Path, stage: int, stages: int, events: list[Event]) -> None:
    """Write what one stage did."""
    text = json.dumps(Timeline(stages, tuple(events)).as_dict())
    (folder / NAME.format(stage=stage)).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> Timeline:
    """All stages of a recorded step. Times are those of each host's clock. Raises DataError naming what is missing."""
    first = folder / NAME.format(stage=0)
    if not first.is_file():
        raise DataError(f"{first}: no recorded step in this run folder; train with logging.record_step=N")
    events: list[Event] = []
    stage, stages = 0, 1
    while stage < stages:
        path = folder / NAME.format(stage=stage)
        try:
            timeline = Timeline.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a readable record of a stage ({error})") from None
        events += timeline.events
        stage, stages = stage + 1, timeline.stages
    return Timeline(stages, tuple(events))
