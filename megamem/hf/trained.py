"""A trained model by its path: a run, a checkpoint, or a model in transformers' form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.weights import IMPORTED_MODEL
from megamem.hf.source import CONFIG

if TYPE_CHECKING:
    from checkpoints.trained import TrainedRun
    from megamem.hf.held_out import ExportedModel
    from megamem.hf.imported import ImportedModel


def is_exported(path: Path) -> bool:
    """Return whether a folder holds a model in transformers' form, not a run or a checkpoint."""
    return (path / CONFIG).is_file()


def is_imported(path: Path) -> bool:
    """Return whether a folder is what `megamem convert from-hf` wrote."""
    return (path / IMPORTED_MODEL).is_file()


def open_trained(path: Path, overrides: Sequence[str] = ()) -> TrainedRun | ExportedModel | ImportedModel:
    """Return a trained model and its configuration with overrides; its tensors are not read yet.

    path: run folder (its newest checkpoint), checkpoint folder, folder of an export, Llama or GPT-2, a GGUF file, or a
        folder of `megamem convert from-hf`.
    overrides: `key.path=value` of the run's configuration.
    Raises: CheckpointError or ConversionError for what cannot be read, ConfigError for overrides that do not fit.
    """
    if is_exported(path) or path.suffix == ".gguf":
        from megamem.hf.held_out import open_exported

        return open_exported(path, overrides)
    if is_imported(path):
        from megamem.hf.imported import open_imported

        return open_imported(path, overrides)
    from checkpoints.trained import open_run

    return open_run(path).changed(overrides)
