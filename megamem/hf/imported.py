"""Models as `megamem convert from-hf` has written them, before any training, and what runs that began so began from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints.weights import IMPORTED_MODEL, IMPORTED_TOKENIZER, IMPORTED_WEIGHTS
from checkpoints.whole import PORTABLE
from megamem.config.load import parse_config, read_yaml
from megamem.config.model import ModelConfig
from megamem.config.parts import BASE
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError
from megamem.hf.held_out import as_run
from megamem.model.stage import Stage
from megamem.pipeline.start_weights import check_tokenizer, load_base, open_weights, shown_files
from tokenization.tokenizer import vocabulary_hash


@dataclass(frozen=True)
class ImportedModel:
    """Weights that a run can start from, and the configuration that they are evaluated by."""

    weights: Path
    config: RunConfig
    title: str
    """Its name, for people."""

    @property
    def origin(self) -> str:
        """Where it lies, for messages."""
        return str(self.weights)

    @property
    def tokenizer(self) -> Path | None:
        """Folder of the tokenizer that came with it; None if none did."""
        folder = self.weights.parent / IMPORTED_TOKENIZER
        return folder if folder.is_dir() else None

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Stage:
        """Return the whole model; what is new starts as in a run.

        Raises: CheckpointError for weights that do not fit.
        """
        model = self.config.model.model_copy(update=PORTABLE)
        return load_base(self.weights, model, self.config.training.seed).eval().to(device, dtype)


def open_imported(path: Path, overrides: Sequence[str]) -> ImportedModel:
    """Return what `megamem convert from-hf` wrote; its tensors are not read yet.

    overrides: of a run's configuration: `data.validation=[SHARDS]`, and what of `model` has no parameters.
    Raises: CheckpointError where there are no weights, ConfigError for overrides that do not fit.
    """
    section = read_yaml(path / IMPORTED_MODEL).get("model")
    model = parse_config(ModelConfig, section or {}, str(path / IMPORTED_MODEL))
    weights = path / IMPORTED_WEIGHTS
    if not weights.is_file():
        raise CheckpointError(f"{weights}: no such weights file")
    given = [f"training.init_from={weights}", *overrides]
    return ImportedModel(weights, as_run(path, model.model_dump(mode="json"), model.chunk_size, given), path.name)


def like(path: Path, run: RunConfig, overrides: Sequence[str]) -> ImportedModel:
    """Return what `megamem convert from-hf` wrote, to be evaluated on the text of a run.

    overrides: those that the run has been given too.
    Raises: as `open_imported`; CheckpointError where the run's tokenizer is another one.
    """
    imported = open_imported(path, overrides)
    check_tokenizer(open_weights(imported.weights), vocabulary_hash(run.data.tokenizer))
    tree = {**run.model_dump(mode="json"), "model": imported.config.model.model_dump(mode="json")}
    return ImportedModel(imported.weights, parse_config(RunConfig, tree, str(path)), path.name)


def base_of(run: RunConfig, mixer: str, origin: str) -> ImportedModel:
    """Return the pretrained model that a run began from, without its memories and with `mixer` in all layers.

    Args:
        run: the configuration of the run, which names the weights that it began from.
        mixer: kind of an attention, as `local_attention` or `full_attention`.
        origin: what messages call the run.
    Raises: ConfigError for a run that began from no weights of a plain decoder.
    """
    files = run.training.init_from
    weights = files.get(BASE) if isinstance(files, dict) else files
    if not isinstance(weights, Path) or run.model.architecture.kind != "decoder":
        raise ConfigError(
            f"{origin}: began from no weights that `megamem convert from-hf` wrote of a decoder "
            f"(training.init_from {shown_files(files)}); give --local and --full"
        )
    tree = run.model_dump(mode="json")
    tree["model"] |= {"mixer": {"kind": mixer}, "memory": []}
    config = parse_config(RunConfig, tree, f"{origin}: with {mixer}")
    return ImportedModel(weights, config, f"{weights.parent.name}, {mixer}")
