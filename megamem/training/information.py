"""The frozen models of information probes: their shapes, and their weights as one file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoints.read import merge_weights
from checkpoints.trained import open_run
from checkpoints.verify import verify
from checkpoints.weights import IMPORTED_MODEL, IMPORTED_WEIGHTS, WeightsHeader, write_weights
from megamem.config.load import Tree, parse_config, read_yaml
from megamem.config.model import ModelConfig
from megamem.errors import CheckpointError, ConfigError
from megamem.files import read_json, sha256_file, write_json
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters


@dataclass(frozen=True)
class FrozenModel:
    """A model that a probe looks into."""

    model: ModelConfig
    recipe: Tree | None
    """The configuration of its own run; None where there is none."""
    folder: Path
    """Where probes of it go if nothing else is said."""
    source: str
    """What the weights are, so that others can be told from them."""
    write: Callable[[Path], None]
    """Writes its weights as one file."""


def open_frozen(path: Path, untrained: bool = False) -> FrozenModel:
    """Return a model by the path of its run, of a checkpoint, or of what `megamem convert from-hf` wrote.

    untrained: the random weights that it was trained from, in the place of its own.
    Raises: CheckpointError or ConfigError for what cannot be read.
    """
    if (path / IMPORTED_MODEL).is_file():
        tree = read_yaml(path / IMPORTED_MODEL)
        model = parse_config(ModelConfig, tree.get("model", {}), str(path / IMPORTED_MODEL))
        if untrained:
            raise ConfigError(f"--untrained: {path} was not trained from random weights here; give a run")
        if not (path / IMPORTED_WEIGHTS).is_file():
            raise CheckpointError(f"{path / IMPORTED_WEIGHTS}: no such weights file")
        folder, source = path / "probes" / "information", f"weights {sha256_file(path / IMPORTED_WEIGHTS)}"
        return FrozenModel(model, None, folder, source, lambda file: _link(path / IMPORTED_WEIGHTS, file))
    run = open_run(path)
    config = run.config
    name = "untrained" if untrained else f"step-{run.checkpoint.step}"

    def merge(file: Path) -> None:
        verify(run.checkpoint, skip_extents=True)
        merge_weights(run.checkpoint, file)

    def draw(file: Path) -> None:
        stage = build_stage(config.model, PlainLinears())
        initialize_parameters(stage, config.training.seed)
        weights = {key: value.detach() for key, value in stage.named_parameters()}
        write_weights(
            weights, file, WeightsHeader.of_model(config.model, run.checkpoint.run().get("vocabulary_sha256"))
        )

    recipe = config.model_dump(mode="json", exclude={"auto"})
    folder = config.run_folder / "probes" / f"information-{name}"
    if untrained:
        drawn = config.model.model_dump_json() + str(config.training.seed)
        return FrozenModel(config.model, recipe, folder, f"drawn {hashlib.sha256(drawn.encode()).hexdigest()}", draw)
    manifest = json.dumps(run.checkpoint.manifest(), sort_keys=True)
    source = f"checkpoint {hashlib.sha256(manifest.encode()).hexdigest()}"
    return FrozenModel(config.model, recipe, folder, source, merge)


def provide_weights(frozen: FrozenModel, file: Path) -> None:
    """Write a model's weights for a probe, unless they are there, and beside them what they are.

    Raises: ConfigError where the file, or the probe that it was written for, is of other weights; CheckpointError if it
    cannot be written.
    """
    note = file.with_suffix(".json")
    try:
        if (file.exists() or note.exists()) and read_json(note).get("source") != frozen.source:
            raise ConfigError(f"{file}: holds the weights of another model; choose another --out")
        if not file.exists():
            write_json(note, {"source": frozen.source})
            frozen.write(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error.strerror}); choose another --out") from None


def _link(weights: Path, file: Path) -> None:
    """Let `file` be the weights, which are not copied."""
    file.symlink_to(weights.resolve())
