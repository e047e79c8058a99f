"""`StudyConfig`: what a study varies, how its models are read after training, and which tables it ends in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

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


_FIELDS: Mapping[tuple[str, str], tuple[set[str], set[str]]] = {
    ("power", "final"): ({"x"}, {"per"}),
    ("power", "validation"): ({"x"}, {"per"}),
    ("iso_flop", "final"): ({"x", "axis"}, {"per"}),
    ("iso_flop", "validation"): ({"x", "budgets"}, {"per"}),
    ("tokens_to_loss", "final"): ({"per", "axis"}, {"target", "against"}),
    ("tokens_to_loss", "validation"): ({"per"}, {"target", "against"}),
}
"""Fields that a law must and may have, by kind and points."""


class LawConfig(ConfigModel):
    """A law fitted to the study's losses, with 90 % intervals by bootstrap."""

    name: Name
    """Of its files."""
    title: str
    """What it shows."""
    kind: Literal["power", "iso_flop", "tokens_to_loss"]
    """`power`: E + sum of A / x^a. `iso_flop`: the best size for each budget of compute, and how it grows.
    `tokens_to_loss`: training tokens that a loss takes."""
    figure: str = "val_loss"
    """Which figure: of a run's result, or of the lines of metrics.jsonl where points are validations."""
    points: Literal["final", "validation"] = "final"
    """`final`: one point for each run. `validation`: each validation while training, as if the run had ended there."""
    x: tuple[str, ...] = ()
    """Figures, or axes whose values are numbers: the variables of `power`, the size of `iso_flop`."""
    per: str | None = None
    """Axis (or `reading`): a law for each of its values."""
    where: Where = {}
    """Records to take; those of training itself (`reading: [trained]`) if readings are not compared."""
    axis: str | None = None
    """Of final points: whose values are the budgets of `iso_flop`, the lengths of training of `tokens_to_loss`."""
    budgets: tuple[PositiveFloat, ...] = ()
    """Training FLOPs of `iso_flop` from validations."""
    target: PositiveFloat | None = None
    """Loss of `tokens_to_loss`; the least that all values of `per` reach if not given."""
    against: str | None = None
    """Value of `per` whose tokens the others' are divided by."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> LawConfig:
        needed, possible = _FIELDS[self.kind, self.points]
        for field in ("x", "per", "axis", "budgets", "target", "against"):
            if getattr(self, field) and field not in needed | possible:
                raise ValueError(f"{field}: means nothing for kind {self.kind} of {self.points} points; leave it out")
            if not getattr(self, field) and field in needed:
                raise ValueError(f"{field}: required by kind {self.kind} of {self.points} points")
        if self.kind == "iso_flop" and len(self.x) != 1:
            raise ValueError(f"x: kind iso_flop has one size, got {', '.join(self.x)}")
        over_training = {"training_tokens", "training_flops"} & set(self.x)
        if self.kind == "power" and self.points == "validation" and not over_training:
            raise ValueError("x: validations of one run differ in training_tokens and training_flops; name one of them")
        if len(set(self.x)) < len(self.x):
            raise ValueError(f"x: {', '.join(self.x)} names a variable twice")
        return self


class StudyConfig(ConfigModel):
    """A grid of runs. `megamem study run` takes a YAML file of it."""

    name: Name
    """Name of the study and of its folder."""
    run: Path
    """YAML file of the run that all share, relative to the study's file."""
    model: Path | None = None
    """YAML file of its model, if `run` leaves it open or is to get another; relative to the study's file too."""
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
    laws: tuple[LawConfig, ...] = ()
    """What is fitted to them."""
    parallel: PositiveInt = 1
    """Runs at a time on this machine; processor threads are divided among them."""
    jobs: PositiveInt | None = None
    """Jobs at a time with `--on slurm`; as many as the cluster starts if not given."""
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
            *((f"laws.{law.name}.where", law.where) for law in self.laws),
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
        for law in self.laws:
            _check_law(law, values)
        names = [*(table.name for table in self.tables), *(law.name for law in self.laws)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tables and laws: {', '.join(twice)} names two of them")
        return self


def _check_law(law: LawConfig, values: Mapping[str, Collection[str]]) -> None:
    for axis in filter(None, (law.per, law.axis)):
        _among(f"laws.{law.name}: axis", axis, values)
    if law.axis in (READING, SEED) or (law.axis and law.axis == law.per):
        raise ValueError(f"laws.{law.name}.axis: {law.axis!r} must be an axis of its own")
    if READING in (law.per, *law.where) and law.points == "validation":
        raise ValueError(f"laws.{law.name}: readings have no validations; take final points")
    if law.against is not None and law.per is not None:
        _among(f"laws.{law.name}.against:", law.against, values[law.per])
    for axis in law.x:
        for value in sorted(values.get(axis, ())):
            try:
                float(value)
            except ValueError:
                raise ValueError(f"laws.{law.name}.x: value {value!r} of axis {axis} is no number") from None


def _among(what: str, name: str, known: Any) -> None:
    if name not in known:
        raise ValueError(f"{what} {name!r} is none of {', '.join(sorted(known))}")


def readings_of(study: StudyConfig, labels: Mapping[str, str]) -> dict[str, Reading]:
    """The readings of the run with these labels, by name."""
    return {name: reading for name, reading in study.readings.items() if matches(reading.where, labels)}


def matches(where: Where, labels: Mapping[str, str]) -> bool:
    """Whether each axis that `where` names has one of its values in `labels`."""
    return all(labels.get(axis) in chosen for axis, chosen in where.items())
