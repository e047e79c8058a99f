"""From a study to its runs: every combination of the axes' values with every seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from megamem.config.load import Tree, load_config, parse_config, with_value
from megamem.config.recipe import read_recipe
from megamem.config.run import RunConfig, WandbConfig
from megamem.errors import ConfigError
from megamem.study.config import SEED, Changes, StudyConfig, matches, readings_of


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    labels: dict[str, str]
    """Value of each axis, and the seed, by name."""
    tree: Tree
    """Its configuration, as in a file."""
    config: RunConfig
    """The same, validated."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.config.name

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return self.config.run_folder


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> StudyConfig:
    """The study of a YAML file, `run` and `model` made paths of their own. Raises ConfigError."""
    study = load_config(StudyConfig, path, overrides)
    model = None if study.model is None else path.parent / study.model
    return study.model_copy(update={"run": path.parent / study.run, "model": model})


def study_folder(study: StudyConfig) -> Path:
    """Where the study writes."""
    return study.folder / study.name


def planned_runs(study: StudyConfig) -> list[PlannedRun]:
    """All runs, validated. Raises ConfigError naming the combination whose configuration cannot run."""
    shared = _applied(read_recipe(study.run, study.model), [study.change], f"{study.name}: change")
    runs = []
    for labels, changes in _combinations(study):
        where = f"{study.name}: {describe(labels)}"
        own = {"name": "-".join(labels.values()), "runs_folder": str(study_folder(study) / "runs")}
        tree = _applied(shared, [*changes, own], where)
        config = parse_config(RunConfig, tree, where)
        if config.logging.wandb.mode != "disabled":
            tree = _applied(tree, [_wandb(study, labels, config.logging.wandb)], where)
            config = parse_config(RunConfig, tree, where)
        runs.append(PlannedRun(labels, tree, config))
        for name, reading in readings_of(study, labels).items():
            where_read = f"{where}, reading {name}"
            parse_config(RunConfig, _applied(tree, [reading.change], where_read), where_read)
    if not runs:
        raise ConfigError(f"{study.name}: skip leaves no run")
    return runs


def _wandb(study: StudyConfig, labels: Mapping[str, str], given: WandbConfig) -> Changes:
    tags = [*given.tags, *(f"{axis}:{value}"[:64] for axis, value in labels.items())]
    return {"logging.wandb.group": given.group or study.name, "logging.wandb.tags": tags}


def describe(labels: dict[str, str]) -> str:
    """Labels in words."""
    return ", ".join(f"{axis} {value}" for axis, value in labels.items())


def _applied(tree: Tree, changes: Sequence[Changes], where: str) -> Tree:
    """`tree` with values by dotted key."""
    try:
        for change in changes:
            for path, value in change.items():
                tree = with_value(tree, path, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return tree


def _combinations(study: StudyConfig) -> Iterator[tuple[dict[str, str], list[Changes]]]:
    axes = list(study.axes)
    for chosen, seed in product(product(*study.axes.values()), study.seeds):
        labels = {**dict(zip(axes, chosen, strict=True)), SEED: str(seed)}
        if not any(matches(where, labels) for where in study.skip):
            changes = [study.axes[axis][value] for axis, value in zip(axes, chosen, strict=True)]
            changes += [adjustment.change for adjustment in study.adjust if matches(adjustment.where, labels)]
            yield labels, [*changes, {"training.seed": seed, "data.seed": seed}]
