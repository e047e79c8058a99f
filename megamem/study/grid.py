"""The runs of a study: every combination of the axes' values with every seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from megamem.config.load import Tree, load_config, parse_config, with_value
from megamem.config.logs import WandbConfig
from megamem.config.recipe import check_single, read_recipe
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.study.config import SEED, Changes, StudyConfig, evaluations_of, matches


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    labels: dict[str, str]
    """Value of each axis, and the seed, by the name of the axis."""
    tree: Tree
    """The configuration as in a file."""
    config: RunConfig
    """The configuration, validated."""

    @property
    def name(self) -> str:
        """Name of the run and of its folder."""
        return self.config.name

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.config.run_folder


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> StudyConfig:
    """Return the study of a YAML file, with `run` and `model` as paths from the working folder. Raises ConfigError."""
    study = load_config(StudyConfig, path, overrides)
    model = None if study.model is None else path.parent / study.model
    return study.model_copy(update={"run": path.parent / study.run, "model": model})


def study_folder(study: StudyConfig) -> Path:
    """Return the folder that the study writes to."""
    return study.folder / study.name


def planned_runs(study: StudyConfig) -> list[PlannedRun]:
    """Return all runs, their evaluations validated too.

    Raises: ConfigError naming the combination whose configuration cannot run.
    """
    recipe = read_recipe(study.run, study.model)
    check_single(recipe, study.run)
    shared = _applied(recipe, [study.change], f"{study.name}: change")
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
        for name, evaluation in evaluations_of(study, labels).items():
            at = f"{where}, evaluation {name}"
            parse_config(RunConfig, _applied(tree, [evaluation.change], at), at)
    if not runs:
        raise ConfigError(f"{study.name}: skip leaves no run")
    return runs


def _wandb(study: StudyConfig, labels: Mapping[str, str], given: WandbConfig) -> Changes:
    """Return the group and tags under which Weights & Biases shows a run."""
    tags = [*given.tags, *(f"{axis}:{value}"[:64] for axis, value in labels.items())]
    return {"logging.wandb.group": given.group or study.name, "logging.wandb.tags": tags}


def describe(labels: dict[str, str]) -> str:
    """Return labels in words: `model memory, seed 0`."""
    return ", ".join(f"{axis} {value}" for axis, value in labels.items())


def _applied(tree: Tree, changes: Sequence[Changes], where: str) -> Tree:
    """Return `tree` with the values of `changes` set. Raises ConfigError that begins with `where`."""
    try:
        for change in changes:
            for path, value in change.items():
                tree = with_value(tree, path, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return tree


def _combinations(study: StudyConfig) -> Iterator[tuple[dict[str, str], list[Changes]]]:
    """Return labels and changes of each run: those of its values, of adjustments that hold for it, and of its seed."""
    axes = list(study.axes)
    for chosen, seed in product(product(*study.axes.values()), study.seeds):
        labels = {**dict(zip(axes, chosen, strict=True)), SEED: str(seed)}
        if not any(matches(where, labels) for where in study.skip):
            changes = [study.axes[axis][value] for axis, value in zip(axes, chosen, strict=True)]
            changes += [adjustment.change for adjustment in study.adjust if matches(adjustment.where, labels)]
            yield labels, [*changes, {"training.seed": seed, "data.seed": seed}]
