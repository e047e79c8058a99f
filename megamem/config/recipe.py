"""The configuration of a run, from a recipe and, where the recipe leaves the model open, a model file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megamem.config.auto import without_auto
from megamem.config.load import Tree, apply_override, parse_config, read_yaml
from megamem.config.run import RunConfig
from megamem.errors import ConfigError

LESSONS = "lessons"
"""The section that makes a file that of a curriculum."""


def read_recipe(recipe: Path, model: Path | None = None) -> Tree:
    """Return the mapping of a recipe; with a model file, its `model` section whole and the run named after the file.

    Args:
        recipe: YAML file of a run, with or without a model of its own.
        model: YAML file of a `model` section and nothing else, which replaces the recipe's.

    Raises: ConfigError where a file cannot be read, or the model file holds other sections, which would be lost.
    """
    tree = read_yaml(recipe)
    if model is None:
        return tree
    given = read_yaml(model)
    if set(given) != {"model"}:
        raise ConfigError(f"{model}: a model file holds a `model:` section and nothing else, got {sorted(given)}")
    return {**tree, "model": given["model"], "name": model.stem}


def load_run(recipe: Path, overrides: Sequence[str] = (), model: Path | None = None) -> RunConfig:
    """Return the validated configuration of a run: see `read_recipe`; overrides are applied last.

    Raises: ConfigError with one line per problem.
    """
    tree = read_recipe(recipe, model)
    check_single(tree, recipe)
    return validated_run(overridden(tree, overrides), str(recipe))


def check_single(tree: Tree, recipe: Path) -> None:
    """Raise ConfigError where the mapping of a file is a curriculum's, which is several runs."""
    if LESSONS in tree:
        raise ConfigError(
            f"{recipe}: a curriculum, where the file of one run is expected; megamem train and megamem plan take "
            "curricula, and each lesson that has begun has a config.yaml in its folder"
        )


def overridden(tree: Tree, overrides: Iterable[str]) -> Tree:
    """Return the mapping of a run with overrides applied, the last one last. Raises ConfigError naming an override."""
    for override in overrides:
        # a field that is given by hand is no longer left to the planner
        tree = without_auto(apply_override(tree, override), override.partition("=")[0].strip())
    return tree


def validated_run(tree: Tree, where: str) -> RunConfig:
    """Return the configuration of a run's mapping. Raises ConfigError that begins with `where`."""
    if "model" not in tree:
        raise ConfigError(f"{where}: model: required, but not given; add --model FILE, such as those of configs/models")
    return parse_config(RunConfig, tree, where)


def auto_overrides(config: RunConfig) -> list[str]:
    """Return the overrides that give another reader of the recipe what was chosen for its `auto` fields."""
    if not config.auto.fields:
        return []
    values = [f"{field}={str(value).lower()}" for field, value in config.auto_values.items()]
    chosen = [*values, f"auto.fields=[{','.join(config.auto.fields)}]", f"auto.devices={config.auto.devices}"]
    return chosen if config.lesson is None else [f"{LESSONS}.{config.lesson}.{override}" for override in chosen]
