"""The shipped runs: every recipe with the models that docs/recipes.md lists for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from megamem.config.recipe import load_run
from megamem.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
MODELS, RECIPES = ROOT / "configs" / "models", ROOT / "configs" / "recipes"


@dataclass(frozen=True)
class Shipped:
    """One recipe with one model."""

    recipe: Path
    model: Path
    overrides: tuple[str, ...]

    def load(self, *overrides: str) -> RunConfig:
        return load_run(self.recipe, [*self.overrides, *overrides], self.model)


def _listed() -> dict[str, Shipped]:
    lines = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith("| model | what it is |")]
    table = takewhile(lambda line: line.startswith("|"), lines[start:])
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    recipes = [RECIPES / f"{name.strip('`')}.yaml" for name in head[2:]]
    found: dict[str, Shipped] = {}
    for row in rows:
        for recipe, cell in zip(recipes, row[2:], strict=True):
            overrides = tuple(re.findall(r"`([^`]+)`", cell))
            for size in re.findall(r"\b[\d.]+[mb]\b", cell):
                model = MODELS / f"{row[0].strip('`')}-{size}.yaml"
                assert model.stem not in found, f"{model.stem} is listed twice"
                found[model.stem] = Shipped(recipe, model, overrides)
    return found


SHIPPED = _listed()


def shipped(name: str, *overrides: str) -> RunConfig:
    """The run of a model file by its name, such as `elastic-100m`."""
    return SHIPPED[name].load(*overrides)


def model_file(name: str) -> Path:
    """The model file of a name."""
    return SHIPPED[name].model
