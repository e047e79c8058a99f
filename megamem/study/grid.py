"""From a study to its runs: every combination of the axes' values with every seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megamem.config.load import Tree, load_config, parse_config, read_yaml, with_value
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.study.config import SEED, StudyConfig, matches


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    labels: dict[str, str]
    """Value of each axis, and the seed, by name."""
    tree: Tree
    """Its configuration."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return str(self.tree["name"])

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.tree["runs_folder"]) / self.name


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> StudyConfig:
    """The study of a YAML file, `run` made a path of its own. Raises ConfigError."""
    study = load_config(StudyConfig, path, overrides)
    return study.model_copy(update={"run": path.parent / study.run})


def study_folder(study: StudyConfig) -> Path:
    """Where the study writes."""
    return study.folder / study.name


def planned_runs(study: StudyConfig) -> list[PlannedRun]:
    """All runs, validated. Raises ConfigError naming the combination whose configuration cannot run."""
    shared = changed(read_yaml(study.run), study.change)
    runs = []
    for labels, changes in _combinations(study):
        tree = shared
        for change in changes:
            tree = changed(tree, change)
        tree = changed(tree, {"name": "-".join(labels.values()), "runs_folder": str(study_folder(study) / "runs")})
        parse_config(RunConfig, tree, f"{study.name}: {describe(labels)}")
        runs.append(PlannedRun(labels, tree))
    if not runs:
        raise ConfigError(f"{study.name}: skip leaves no run")
    return runs


def describe(labels: dict[str, str]) -> str:
    """Labels in words."""
    return ", ".join(f"{axis} {value}" for axis, value in labels.items())


def changed(tree: Tree, changes: Any) -> Tree:
    """`tree` with values by dotted key."""
    for path, value in changes.items():
        tree = with_value(tree, path, value)
    return tree


def _combinations(study: StudyConfig) -> Iterator[tuple[dict[str, str], list[Any]]]:
    axes = list(study.axes)
    for values in product(*study.axes.values(), study.seeds):
        *chosen, seed = values
        labels = {**dict(zip(axes, map(str, chosen), strict=True)), SEED: str(seed)}
        if not any(matches(where, labels) for where in study.skip):
            changes = [study.axes[axis][str(value)] for axis, value in zip(axes, chosen, strict=True)]
            changes += [adjustment.change for adjustment in study.adjust if matches(adjustment.where, labels)]
            yield labels, [*changes, {"training.seed": seed, "data.seed": seed}]
