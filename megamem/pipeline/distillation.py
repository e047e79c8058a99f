"""Distillation: a model learns the predictions of a teacher on the same tokens (Hinton, Vinyals and Dean, 2015).

    loss = cross-entropy + weight * sum over predicted tokens of KL(p_teacher || p_model)

The teacher is a model of the same shape with another attention, as the base of a model with memories with attention to
the whole sequence. It reads each micro-batch once, without gradients, and what is kept of it is its last hidden states:
logits are made of some tokens at a time, here and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megamem.config.load import parse_config
from megamem.config.model import MixerConfig, ModelConfig
from megamem.config.predictions import settings_without_tensors
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError
from megamem.memory.base import LABEL_IGNORED, Chunk
from megamem.model.stage import Stage
from megamem.ops.linear_cross_entropy import slice_count
from megamem.pipeline.start_weights import base_names, check_tokenizer, load_base, open_weights

DISTILLATION = "distillation"
"""Name of the divergence among the losses of a step."""


class Teacher:
    """A frozen model whose predictions are learned. No module, so that nothing of it is taken for the model's own."""

    def __init__(self, stage: Stage, weight: float) -> None:
        """Take the teacher as it lies. weight: factor of the divergence."""
        self.stage, self.weight = stage, weight

    @torch.no_grad()
    def read(self, tokens: Tensor, places: Sequence[Chunk]) -> Tensor:
        """Return the teacher's last hidden states [tokens, batch, hidden_size] of a micro-batch.

        tokens: [tokens, batch] int64 from where its sequences begin; places: where each chunk lies in its documents.
        """
        parameter = next(self.stage.parameters())
        states = self.stage.initial_states(tokens.shape[1], parameter.device, parameter.dtype)
        found = []
        for part, chunk in zip(tokens.split(tokens.shape[0] // len(places)), places, strict=True):
            # it drops nothing
            hidden, states, _ = self.stage.read_documents(part, states, Chunk(chunk.starts, borders=chunk.borders))
            found.append(hidden)
        return torch.cat(found)

    def divergence(self, stage: Stage, hidden: Tensor, taught: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted sum over predicted tokens of KL(p_teacher || p_model), a scalar in float32.

        Args:
            stage: the model that learns.
            hidden: [tokens, batch, hidden_size] as its `read_chunk` returns it; taught: the same of `read`.
            labels: [tokens, batch] int64; what is ignored has no part in it.
        """
        total = hidden.new_zeros((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        predicted = labels != LABEL_IGNORED
        slices = slice_count(labels.numel(), stage.config.vocab_size)

        def of_slice(own: Tensor, theirs: Tensor, counted: Tensor) -> Tensor:
            """Return the sum of some tokens: own, theirs [tokens, 1, hidden_size]; counted [tokens, 1]."""
            ours = self._log_probabilities(stage, own)
            with torch.no_grad():
                wanted = self._log_probabilities(self.stage, theirs)
            return ((wanted.exp() * (wanted - ours)).sum(-1) * counted).sum()

        # the tokens of all rows one after the other
        parts = (whole.flatten(0, 1)[:, None].chunk(slices) for whole in (hidden, taught, predicted))
        for part in zip(*parts, strict=True):
            total = total + cast(Tensor, checkpoint(of_slice, *part, use_reentrant=False))
        return self.weight * total

    @staticmethod
    def _log_probabilities(stage: Stage, hidden: Tensor) -> Tensor:
        """Return log p over the vocabulary [tokens, batch, vocabulary], hidden [tokens, batch, hidden_size]."""
        logits = stage.logits(hidden)[..., : stage.config.vocab_size]
        return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def teacher_model(mixer: MixerConfig, model: ModelConfig) -> ModelConfig:
    """Return a teacher's configuration: that of the model that learns, with `mixer` in all layers and no memories.

    Raises: ConfigError for a mixer that does not go with the model.
    """
    tree = {**model.model_dump(mode="json"), "mixer": mixer.model_dump(mode="json"), "memory": [], "dropout": 0.0}
    return parse_config(ModelConfig, tree, "training.distill.mixer")


def check_teacher(config: RunConfig, tokenizer: str | None) -> None:
    """Refuse a teacher that is of another model or tokenizer than the run's, before weights are read.

    tokenizer: the hash of the vocabulary of the run's, if it has one.
    Raises: ConfigError as `teacher_model`, CheckpointError for a file that cannot be read or does not fit.
    """
    distill = config.training.distill
    if distill is not None:
        file = open_weights(distill.teacher)
        model = teacher_model(distill.mixer, config.model)
        base_names(file, model)
        check_tokenizer(file, tokenizer)
        ours = settings_without_tensors(model)
        # the teacher is built like the model that learns, and its weights would make other predictions then
        for name, theirs in file.settings.items():
            if ours.get(name, theirs) != theirs:
                raise CheckpointError(
                    f"{file.path}: was trained with {name} {theirs}, model.{name} is {ours[name]}; a teacher is of the "
                    "model's own kind"
                )


def open_teacher(
    path: Path, mixer: MixerConfig, weight: float, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Teacher:
    """Return the teacher of a model. Raises CheckpointError for weights that are not of such a model.

    Args:
        path: the file of its weights.
        mixer: what mixes tokens in all of its layers.
        weight: factor of the divergence.
        model: the model that learns; the teacher has its shape.
        dtype, device: of the teacher's weights.
    """
    stage = load_base(path, teacher_model(mixer, model)).to(device, dtype).eval()
    return Teacher(stage.requires_grad_(False), weight)
