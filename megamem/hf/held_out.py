"""Models in transformers' form, opened for held-out losses: our exports, Llamas and GPT-2s."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoints.whole import PORTABLE
from megamem.config.load import apply_overrides, parse_config
from megamem.config.run import RunConfig
from megamem.errors import ConversionError
from megamem.hf.importing import collect, known_source, source_section
from megamem.hf.source import Source
from megamem.model.stage import Stage, meta_stage


@dataclass(frozen=True)
class ExportedModel:
    """A model in transformers' form, and the configuration that it is evaluated by."""

    source: Source
    kind: str
    """Its architecture: `megamem`, `llama` or `gpt2`."""
    config: RunConfig

    @property
    def origin(self) -> str:
        """Where it lies, for messages."""
        return str(self.source.folder)

    @property
    def title(self) -> str:
        """Its name, for people."""
        return self.config.name

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Stage:
        """Return the whole model. Raises ConversionError where its weights do not fit the configuration."""
        model = self.config.model.model_copy(update=PORTABLE)
        weights, missing = collect(self.source, self.kind, model)
        if missing:
            raise ConversionError(f"{self.origin}: holds nothing for {missing[0]} of the model that was asked for")
        # files of others hold buffers besides weights
        if self.kind == "megamem" and (unused := sorted(self.source.unused())):
            raise ConversionError(f"{self.origin}: {unused[0]} is not in the model that was asked for")
        stage = meta_stage(model)
        stage.load_state_dict({name: value.to(dtype) for name, value in weights.items()}, assign=True)
        return stage.eval().to(device)


def open_exported(path: Path, overrides: Sequence[str]) -> ExportedModel:
    """Return a model in transformers' form; its tensors are not read yet.

    overrides: of a run's configuration: `data.validation=[SHARDS]`, and what of `model` has no parameters.
    Raises: ConversionError for what cannot be read, ConfigError for overrides that do not fit.
    """
    source, kind = known_source(path)
    trained = source.config.get("max_position_embeddings") or source.config.get("n_positions") or 2
    return ExportedModel(source, kind, as_run(path, source_section(source, kind), trained, overrides))


def as_run(path: Path, model: Mapping[str, Any], trained: int, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration by which a model is evaluated that is no run.

    Args:
        path: where it lies.
        model: its `model` section.
        trained: tokens of the sequences that it was trained on.
        overrides: see `open_exported`.
    Raises: ConfigError for overrides that do not fit.
    """
    tree: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._+-]", "-", path.name).lstrip("-._+") or "model",
        "model": dict(model),
        "data": {"sources": ["none"]},  # it trains on nothing
        "training": {"steps": 1, "precision": "fp32"},
    }
    tree = apply_overrides(tree, overrides)
    # the length of a training sequence, in whole chunks; a chunk of no valid size is refused below
    chunk = size if isinstance(size := tree["model"].get("chunk_size"), int) and size > 0 else 1
    length = tree["data"].setdefault("sequence_length", max(trained // chunk, 1) * chunk)
    tree["training"].setdefault("batch_tokens", length)
    return parse_config(RunConfig, tree, f"{path}: as a run")
