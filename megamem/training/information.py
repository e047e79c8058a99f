"""The frozen models of information probes: their shapes, and their weights as one file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoints.folder import verify
from checkpoints.read import merge_weights
from checkpoints.trained import open_run
from checkpoints.weights import write_weights
from megamem.config.load import Tree, parse_config, read_yaml
from megamem.config.model import ModelConfig
from megamem.errors import ConfigError
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

MODEL, WEIGHTS = "model.yaml", "weights.safetensors"
"""What `megamem convert from-hf` writes."""


@dataclass(frozen=True)
class FrozenModel:
    """A model that a probe looks into."""

    model: ModelConfig
    recipe: Tree | None
    """The configuration of its own run; None where there is none."""
    folder: Path
    """Where probes of it go if nothing else is said."""
    write: Callable[[Path], None]
    """Writes its weights as one file."""


def open_frozen(path: Path, untrained: bool = False) -> FrozenModel:
    """Return a model by the path of its run, of a checkpoint, or of what `megamem convert from-hf` wrote.

    untrained: the random weights that it was trained from, in the place of its own.
    Raises: CheckpointError or ConfigError for what cannot be read.
    """
    if (path / MODEL).is_file():
        tree = read_yaml(path / MODEL)
        model = parse_config(ModelConfig, tree.get("model", {}), str(path / MODEL))
        if untrained:
            raise ConfigError(f"--untrained: {path} was not trained from random weights here; give a run")
        return FrozenModel(model, None, path / "probes" / "information", lambda file: _link(path / WEIGHTS, file))
    run = open_run(path)
    config = run.config
    name = "untrained" if untrained else f"step-{run.checkpoint.step}"

    def merge(file: Path) -> None:
        verify(run.checkpoint, skip_extents=True)
        merge_weights(run.checkpoint, file)

    def draw(file: Path) -> None:
        stage = build_stage(config.model, PlainLinears())
        initialize_parameters(stage, config.training.seed)
        write_weights({key: value.detach() for key, value in stage.named_parameters()}, file)

    recipe = config.model_dump(mode="json", exclude={"auto"})
    folder = config.run_folder / "probes" / f"information-{name}"
    return FrozenModel(config.model, recipe, folder, draw if untrained else merge)


def _link(weights: Path, file: Path) -> None:
    """Let `file` be the weights, which are not copied."""
    file.symlink_to(weights.resolve())
