"""`StudyConfig`: what a study varies, which evaluations follow training, and which tables and laws it ends in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megamem.config.base import ConfigModel

Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9_+.]*$")]
Changes = Mapping[str, object]
"""Values by dotted key of a run's configuration: `model.memory.0.mixer.order: 64`."""
Where = Mapping[str, tuple[str, ...]]
"""Values of axes (or of `evaluation`) for which something holds; axes not named may have any value."""
SEED, EVALUATION = "seed", "evaluation"
"""Names that labels and tables have besides those of the axes."""
TRAINED = "trained"
"""The evaluation that belongs to the training itself."""


class StudyEvaluation(ConfigModel):
    """One more evaluation of trained models, with another configuration."""

    where: Where = {}
    """Runs that are evaluated so; all if not given."""
    change: Changes
    """Values by dotted key that differ from training: none that parameters depend on."""


class Adjustment(ConfigModel):
    """Changes for some combinations of values, besides those that each value brings."""

    where: Where
    """The combinations that have these changes."""
    change: Changes
    """Values by dotted key of the run's configuration."""


class RecoveredConfig(ConfigModel):
    """The models between whose losses the recovered share of each run's model is measured."""

    local: Path | Mapping[str, str]
    """Attention within chunks only: the folder of an evaluation that is there already, or values of axes that name
    the run of this study, others as in the run that is compared."""
    full: Path | Mapping[str, str]
    """Full attention, likewise."""
    control: Path | Mapping[str, str] | None = None
    """A model trained alike that has nothing to remember with, likewise: what others recover beyond it, document by
    document, is `recovered_over_control`."""


class TableConfig(ConfigModel):
    """A table over the study's records: mean and standard deviation over seeds."""

    name: Name
    """Name of its files."""
    title: str
    """Heading in the report."""
    figure: str
    """The number of a run's result that it shows: `beyond_first_chunk_loss`, `sliding_perplexity` and so on."""
    rows: str
    """Axis (or `evaluation`) that is listed downwards."""
    columns: str
    """Axis (or `evaluation`) that is listed across."""
    against: str | None = None
    """Row that is subtracted from the others, seed by seed: what the seeds share cancels in the spread."""
    where: Where = {}
    """Records to take; those of training itself (`evaluation: [trained]`) unless evaluations are rows or columns."""
    paper: Mapping[str, Mapping[str, float]] = {}
    """Published figures by row and column, shown beside."""
    source: str = ""
    """The source of the published figures, and what they measure."""


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
    """Name of its files."""
    title: str
    """Heading in the report."""
    kind: Literal["power", "iso_flop", "tokens_to_loss"]
    """`power`: E + sum of A / x^a. `iso_flop`: the best size for each budget of compute, and how it grows.
    `tokens_to_loss`: training tokens that a loss takes."""
    figure: str = "val_loss"
    """The number that is fitted: of a run's result, or of the lines of metrics.jsonl where points are validations."""
    points: Literal["final", "validation"] = "final"
    """`final`: one point for each run. `validation`: each validation while training, as if the run had ended there."""
    x: tuple[str, ...] = ()
    """Figures, or axes whose values are numbers: the variables of `power`, the size of `iso_flop`."""
    per: str | None = None
    """Axis (or `evaluation`): a law for each of its values."""
    where: Where = {}
    """Records to take; those of training itself (`evaluation: [trained]`) if evaluations are not compared."""
    axis: str | None = None
    """Axis of final points whose values are the budgets of `iso_flop` or the training lengths of `tokens_to_loss`."""
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
    """The folder that holds the folders of studies."""
    change: Changes = {}
    """Values by dotted key in which all runs of the study differ from `run`."""
    axes: Mapping[Name, Mapping[Name, Changes]] = Field(min_length=1)
    """Values of each axis by name; every combination is a run."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    """Seeds: each sets training.seed and data.seed of a run, and so initial weights and order of the data."""
    adjust: tuple[Adjustment, ...] = ()
    """Changes that are applied after the axes' values, in order."""
    skip: tuple[Where, ...] = ()
    """Combinations of values that are left out."""
    evaluations: Mapping[Name, StudyEvaluation] = {}
    """Evaluations after training, besides that of training itself."""
    recovered: RecoveredConfig | None = None
    """What `recovered_share` and its like of each run are measured against; there are none if not given."""
    tables: tuple[TableConfig, ...] = ()
    """Tables of the results."""
    laws: tuple[LawConfig, ...] = ()
    """Laws that are fitted to the results."""
    parallel: PositiveInt = 1
    """Runs at a time on this machine; processor threads are divided among them."""
    jobs: PositiveInt | None = None
    """Jobs at a time with `--on slurm`; as many as the cluster starts if not given."""
    retries: Annotated[int, Field(ge=0)] = 1
    """How often a run that failed is started again, going on from its last checkpoint; none whose exit code says that
    it would fail the same way, as after a loss that is not finite."""

    @model_validator(mode="after")
    def _names_are_known(self) -> StudyConfig:
        """Refuse axes, values and names that the study does not have, wherever it refers to them."""
        values = {
            **{axis: set(named) for axis, named in self.axes.items()},
            EVALUATION: {TRAINED, *self.evaluations},
            SEED: {str(seed) for seed in self.seeds},
        }
        alternatives = {SEED: "give seeds", EVALUATION: "give evaluations", "run": "take another name"}
        for reserved in sorted(alternatives.keys() & self.axes):
            raise ValueError(f"axes.{reserved}: reserved; {alternatives[reserved]}")
        if repeated := sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1}):
            raise ValueError(f"seeds: {repeated[0]} is given twice; each seed is a run of its own")
        if TRAINED in self.evaluations:
            raise ValueError(f"evaluations.{TRAINED}: reserved for the evaluation at the end of training")
        # runs are chosen by axes and seed, records by their evaluation too
        of_runs = [
            *((f"adjust.{i}.where", adjustment.where) for i, adjustment in enumerate(self.adjust)),
            *((f"skip.{i}", where) for i, where in enumerate(self.skip)),
            *((f"evaluations.{name}.where", evaluation.where) for name, evaluation in self.evaluations.items()),
        ]
        for side in ("local", "full", "control"):
            if isinstance(named := getattr(self.recovered, side, None), Mapping):
                of_runs.append((f"recovered.{side}", {axis: (value,) for axis, value in named.items()}))
        of_records = [
            *((f"tables.{table.name}.where", table.where) for table in self.tables),
            *((f"laws.{law.name}.where", law.where) for law in self.laws),
        ]
        runs_values = {axis: known for axis, known in values.items() if axis != EVALUATION}
        for wheres, known in ((of_runs, runs_values), (of_records, values)):
            for place, where in wheres:
                for axis, chosen in where.items():
                    _among(f"{place}: axis", axis, known)
                    for value in chosen:
                        _among(f"{place}.{axis}:", value, known[axis])
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
    """Raise ValueError where a law names an axis or value that is not there, or that it cannot use."""
    for axis in filter(None, (law.per, law.axis)):
        _among(f"laws.{law.name}: axis", axis, values)
    if law.axis in (EVALUATION, SEED) or (law.axis and law.axis == law.per):
        raise ValueError(f"laws.{law.name}.axis: {law.axis!r} must be an axis of its own")
    if EVALUATION in (law.per, *law.where) and law.points == "validation":
        raise ValueError(f"laws.{law.name}: evaluations have no validations; take final points")
    if law.against is not None and law.per is not None:
        _among(f"laws.{law.name}.against:", law.against, values[law.per])
    for axis in law.x:
        for value in sorted(values.get(axis, ())):
            try:
                float(value)
            except ValueError:
                raise ValueError(f"laws.{law.name}.x: value {value!r} of axis {axis} is no number") from None


def _among(what: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError unless `name` is known. what: what the message calls it."""
    if name not in known:
        raise ValueError(f"{what} {name!r} is none of {', '.join(sorted(known))}")


def evaluations_of(study: StudyConfig, labels: Mapping[str, str]) -> dict[str, StudyEvaluation]:
    """Return the evaluations of the run with these labels, by name."""
    return {name: evaluation for name, evaluation in study.evaluations.items() if matches(evaluation.where, labels)}


def matches(where: Where, labels: Mapping[str, str]) -> bool:
    """Return whether each axis that `where` names has one of its values in `labels`."""
    return all(labels.get(axis) in chosen for axis, chosen in where.items())
