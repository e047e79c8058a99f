"""`StudyConfig`: what a study varies, how its models are read after training, and which tables it ends in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, model_validator

from megamem.config.base import ConfigModel

Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9_+.]*$")]
Changes = Mapping[str, Any]
"""Values by dotted key of a run's configuration: `model.memory.0.mixer.order: 64`."""
Where = Mapping[str, tuple[str, ...]]
"""Values of axes (or of `reading`) to which something is bound; axes not named may have any value."""
SEED, READING, TRAINED = "seed", "reading", "trained"


class Reading(ConfigModel):
    """One more evaluation of trained models, with another configuration."""

    where: Where = {}
    """Runs that are read so; all if not given."""
    change: Changes
    """What differs from training: nothing that parameters depend on."""


class Adjustment(ConfigModel):
    """What some combinations of values have different besides what each value brings."""

    where: Where
    """Combinations it is for."""
    change: Changes
    """Values by dotted key."""


class TableConfig(ConfigModel):
    """A table over the study's records: mean and standard deviation over seeds."""

    name: Name
    """Of its files."""
    title: str
    """What it shows."""
    figure: str
    """Which figure of a run's result: `beyond_first_chunk_loss`, `sliding_perplexity` and so on."""
    rows: str
    """Axis (or `reading`) that is listed downwards."""
    columns: str
    """Axis (or `reading`) that is listed across."""
    against: str | None = None
    """Row that is subtracted from the others, seed by seed: what the seeds share cancels in the spread."""
    where: Where = {}
    """Records to take; those of training itself (`reading: [trained]`) if readings are neither rows nor columns."""
    paper: Mapping[str, Mapping[str, float]] = {}
    """Published figures by row and column, shown beside."""
    source: str = ""
    """Where those are from and what they measure."""


class StudyConfig(ConfigModel):
    """A grid of runs. `megamem study run` takes a YAML file of it."""

    name: Name
    """Name of the study and of its folder."""
    run: Path
    """YAML file of the run that all share, relative to the study's file."""
    folder: Path = Path("runs/studies")
    """Where study folders lie."""
    change: Changes = {}
    """What all runs of the study have different from `run`."""
    axes: Mapping[Name, Mapping[Name, Changes]] = Field(min_length=1)
    """Values of each axis by name; every combination is a run."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    """Each sets training.seed and data.seed of a run: initial weights and order of the data."""
    adjust: tuple[Adjustment, ...] = ()
    """Applied after the axes' values, in order."""
    skip: tuple[Where, ...] = ()
    """Combinations that are left out."""
    readings: Mapping[Name, Reading] = {}
    """Evaluations after training, besides that of training itself."""
    tables: tuple[TableConfig, ...] = ()
    """What is made of the results."""
    parallel: PositiveInt = 1
    """Runs at a time on this machine; processor threads are divided among them."""
    retries: Annotated[int, Field(ge=0)] = 1
    """How often a run that failed is started again, going on from its last checkpoint; none whose exit code says that
    it would fail the same way, as after a loss that is not finite."""

    @model_validator(mode="after")
    def _known(self) -> StudyConfig:
        values = {
            **{axis: set(named) for axis, named in self.axes.items()},
            READING: {TRAINED, *self.readings},
            SEED: {str(seed) for seed in self.seeds},
        }
        instead = {SEED: "give seeds", READING: "give readings", "run": "take another name"}
        for reserved in sorted(instead.keys() & self.axes):
            raise ValueError(f"axes.{reserved}: reserved; {instead[reserved]}")
        if TRAINED in self.readings:
            raise ValueError(f"readings.{TRAINED}: reserved for the evaluation at the end of training")
        wheres = [
            *((f"adjust.{i}.where", adjustment.where) for i, adjustment in enumerate(self.adjust)),
            *((f"skip.{i}", where) for i, where in enumerate(self.skip)),
            *((f"readings.{name}.where", reading.where) for name, reading in self.readings.items()),
            *((f"tables.{table.name}.where", table.where) for table in self.tables),
        ]
        for place, where in wheres:
            for axis, chosen in where.items():
                _among(f"{place}: axis", axis, values)
                for value in chosen:
                    _among(f"{place}.{axis}:", value, values[axis])
        for table in self.tables:
            for side in (table.rows, table.columns):
                _among(f"tables.{table.name}: axis", side, values)
            if table.against is not None:
                _among(f"tables.{table.name}.against:", table.against, values[table.rows])
                if table.rows == SEED:
                    raise ValueError(f"tables.{table.name}.against: rows that are seeds cannot be paired by seed")
            for row, cells in table.paper.items():
                _among(f"tables.{table.name}.paper: row", row, values[table.rows])
                for column in cells:
                    _among(f"tables.{table.name}.paper.{row}: column", column, values[table.columns])
        return self


def _among(what: str, name: str, known: Any) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r} is none of {', '.join(sorted(known))}")


def matches(where: Where, labels: Mapping[str, str]) -> bool:
    """Whether each axis that `where` names has one of its values in `labels`."""
    return all(labels.get(axis) in chosen for axis, chosen in where.items())
