"""Curricula: runs that are trained one after the other, from one YAML file.

What its lessons have in common stands at the top of the file as in that of a run, and what each changes in the list
`lessons`. Each lesson becomes a complete `RunConfig`, which may start from the weights of an earlier one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megamem.config.base import ConfigModel
from megamem.config.load import Tree, merge, parse_config, read_yaml, unknown_key, with_value
from megamem.config.recipe import LESSONS, overridden, read_recipe, validated_run
from megamem.config.run import RunConfig, RunName
from megamem.config.yaml_text import to_yaml
from megamem.errors import ConfigError

FILE = "curriculum.yaml"
"""Name of the file in a curriculum's folder that trains it again."""
_START = "start"
"""Key of a lesson: the earlier lesson, or the file, whose weights it starts from."""
_NOT_OWN = ("name", "runs_folder", "origin", "lesson")
"""Keys of a run that a lesson cannot have."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class _Place(ConfigModel):
    """Where the folders of lessons lie."""

    name: RunName
    runs_folder: Path = Path("runs")


def load_runs(recipe: Path, overrides: Sequence[str] = (), model: Path | None = None) -> list[RunConfig]:
    """Return the run of a file, or those of the lessons of a curriculum, in order.

    Args:
        recipe: YAML file of a run or a curriculum; see `read_recipe`.
        overrides: `section.key=value` for the run or every lesson, `lessons.NAME.section.key=value` for one. They are
            applied last and in order.
        model: YAML file of a `model` section, in the place of what the lessons have in common there.

    Raises: ConfigError with one line that names file and lesson.
    """
    where, tree = str(recipe), read_recipe(recipe, model)
    if LESSONS not in tree:
        return [validated_run(overridden(tree, overrides), where)]
    lessons = _checked(tree.pop(LESSONS), where)
    addressed = list(_addressed(overrides, list(lessons), where))
    shared = overridden(tree, (override for lesson, override in addressed if lesson is None))
    place = parse_config(_Place, {key: shared[key] for key in ("name", "runs_folder") if key in shared}, where)
    folder, runs = place.runs_folder / place.name, dict[str, RunConfig]()
    for number, (name, changes) in enumerate(lessons.items(), 1):
        at = f"{where}: {LESSONS}.{name}"
        lesson = overridden(merge(tree, changes), (override for to, override in addressed if to in (None, name)))
        lesson = _with_start(lesson, runs, list(lessons), at)
        own = {"name": _folder_name(number, name), "runs_folder": str(folder), "lesson": name}
        runs[name] = validated_run({**lesson, **own}, at)
        device, first = (run.parallel.device for run in (runs[name], next(iter(runs.values()))))
        if device != first:
            raise ConfigError(
                f"{at}: parallel.device: {device}, but that of the first lesson is {first}; the same processes train "
                "all lessons, so give all the same device"
            )
    return list(runs.values())


def dump_curriculum(runs: Sequence[RunConfig]) -> str:
    """Return a curriculum's lessons, complete, as YAML that `load_runs` makes equal ones of."""
    folder = runs[0].runs_folder
    trees = [
        {
            "name": run.lesson,
            **{key: value for key, value in run.model_dump(mode="json").items() if key not in _NOT_OWN},
        }
        for run in runs
    ]
    tree = {"name": folder.name, "runs_folder": str(folder.parent), LESSONS: trees}
    return to_yaml(tree)


def lesson_folders(folder: Path) -> list[Path]:
    """Return the run folders of the lessons of a curriculum, in order, those of lessons that have not begun too.

    Raises: ConfigError where the curriculum's file in `folder` cannot be read.
    """
    lessons = _checked(read_yaml(folder / FILE).get(LESSONS), str(folder / FILE))
    return [folder / _folder_name(number, name) for number, name in enumerate(lessons, 1)]


def _folder_name(number: int, lesson: str) -> str:
    """Return the name of the run that a lesson is, and of its folder. number: of the lesson, from 1."""
    return f"{number}-{lesson}"


def _checked(lessons: object, where: str) -> dict[str, Tree]:
    """Return the lessons by name, each with a mapping of what it changes. Raises ConfigError."""
    if not isinstance(lessons, list) or not lessons or not all(isinstance(lesson, dict) for lesson in lessons):
        raise ConfigError(f"{where}: {LESSONS}: expected a list of sections, each with a name, got {lessons!r}")
    checked: dict[str, Tree] = {}
    for number, lesson in enumerate(lessons, 1):
        name = lesson.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: {LESSONS}: the name of lesson {number} is {name!r}; use letters, digits, _ and -"
            )
        if name in checked:
            raise ConfigError(f"{where}: {LESSONS}: two lessons are called {name!r}; give each a name of its own")
        checked[name] = {key: value for key, value in lesson.items() if key != "name"}
        for key in checked[name]:
            _check_key(str(key), f"{where}: {LESSONS}.{name}")
    return checked


def _check_key(key: str, where: str) -> None:
    """Raise ConfigError for a key that no lesson has."""
    if key in _NOT_OWN:
        raise ConfigError(f"{where}.{key}: a lesson has none of its own; its folder is called by its number and name")
    valid = sorted({_START, *RunConfig.__pydantic_fields__} - set(_NOT_OWN))
    if key not in valid:
        raise ConfigError(unknown_key(f"{where}.{key}", valid))


def _addressed(overrides: Sequence[str], lessons: Sequence[str], where: str) -> Iterator[tuple[str | None, str]]:
    """Yield overrides with the lesson that they are for, None for all. Raises ConfigError for an unknown lesson."""
    for override in overrides:
        path, equals, value = override.partition("=")
        first, _, rest = path.strip().partition(".")
        if first != LESSONS:
            yield None, override
            continue
        name, _, key = rest.partition(".")
        if name not in lessons:
            raise ConfigError(f"override {override!r}: {_no_lesson(name, lessons)}")
        if not key:
            raise ConfigError(f"override {override!r}: expected {LESSONS}.{name}.key.path=value")
        _check_key(key.partition(".")[0], f"{where}: {LESSONS}.{name}")
        yield name, f"{key}{equals}{value}"


def _with_start(tree: Tree, earlier: Mapping[str, RunConfig], lessons: Sequence[str], where: str) -> Tree:
    """Return the mapping of a lesson with `training.init_from` in the place of `start`.

    Args:
        earlier: the lessons before it.
        lessons: the names of all.

    Raises: ConfigError that begins with `where`.
    """
    tree = dict(tree)
    start = tree.pop(_START, None)
    if start is None:
        return tree
    training = tree.get("training")
    if isinstance(training, dict) and training.get("init_from") is not None:
        raise ConfigError(f"{where}.{_START}: {start!r}, but training.init_from is given too; leave one of them out")

    def weights(given: object) -> str:
        if isinstance(given, str) and given in earlier:
            return str(earlier[given].weights)
        if given in lessons:
            raise ConfigError(
                f"{where}.{_START}: lesson {given!r} is not before this one; valid: "
                f"{', '.join([*earlier, 'a weights file'])}"
            )
        # no name of a lesson has either of these
        if isinstance(given, str) and ("." in given or "/" in given):
            return given
        raise ConfigError(
            f"{where}.{_START}: {_no_lesson(given, list(earlier))}, or a weights file such as a/b.safetensors"
        )

    found = {part: weights(given) for part, given in start.items()} if isinstance(start, dict) else weights(start)
    return with_value(tree, "training.init_from", found)


def _no_lesson(name: object, lessons: Sequence[str]) -> str:
    """Return the message about a name that is no lesson's, with those that would be valid."""
    near = difflib.get_close_matches(str(name), lessons, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"no lesson {name!r}; {hint}valid: {', '.join(lessons) or 'none'}"
