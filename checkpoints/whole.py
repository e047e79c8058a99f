"""The whole model of a checkpoint of any layout, in one process."""

from __future__ import annotations

import torch

from checkpoints.folder import Checkpoint
from checkpoints.read import read_weights
from megamem.config.model import ModelConfig
from megamem.errors import CheckpointError
from megamem.model.stage import Stage, meta_stage

PORTABLE = {"attention_kernel": "sdpa", "recurrence_kernel": "torch", "deep_memory_kernel": "torch"}
"""Fields of a model's configuration with which it runs anywhere: torch's own kernels."""


def whole_model(checkpoint: Checkpoint, model: ModelConfig, dtype: torch.dtype = torch.float32) -> Stage:
    """Return the model as training computes it, on the CPU, for evaluation.

    model: the one trained, or one that differs in what has no parameters (where a memory is sampled). Attention
        and recurrences run in torch's own kernels, whatever training's need of device and dtype.
    Raises: CheckpointError where a parameter is missing or of another shape.
    """
    stage = meta_stage(model.model_copy(update=PORTABLE))
    expected = {name: parameter.shape for name, parameter in stage.named_parameters()}
    values = {name: value.to(dtype) for name, value in read_weights(checkpoint)}
    if wrong := sorted(expected.keys() ^ values.keys()):
        raise CheckpointError(f"{checkpoint.path}: {wrong[0]} is in the checkpoint or in the model, but not in both")
    for name, value in values.items():
        if value.shape != expected[name]:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {list(value.shape)}, but the model's is {list(expected[name])}"
            )
    stage.load_state_dict(values, assign=True)
    return stage.eval()
