"""The configuration of distillation: whose predictions a model learns besides the text."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat

from megamem.config.base import ConfigModel
from megamem.config.data import DataConfig
from megamem.config.model import AnyMixer, ModelConfig
from megamem.config.objective import ObjectiveConfig
from megamem.config.parallel import ParallelConfig


class DistillConfig(ConfigModel):
    """Learn the predictions of a teacher too: the model's own base with another attention, on the same tokens."""

    teacher: Path
    """Safetensors file of the teacher's weights, a model of the same shape without memories, as `megamem convert
    from-hf` writes it."""
    mixer: AnyMixer = Field(default="full_attention", validate_default=True)
    """What mixes tokens in all layers of the teacher."""
    weight: PositiveFloat = 1.0
    """Factor of the divergence in the sum that is trained on."""

    def check(self, model: ModelConfig, parallel: ParallelConfig, data: DataConfig, objective: ObjectiveConfig) -> None:
        """Raise ValueError where a run cannot have a teacher, naming field, value and what would be valid."""
        if model.architecture.kind != "decoder" or model.adaptive is not None:
            kind = "an adaptive vocabulary" if model.adaptive else f"architecture {model.architecture.kind}"
            raise ValueError(f"training.distill does not go with {kind}; teachers are plain decoders")
        if parallel.tp != 1 or parallel.pp != 1:
            raise ValueError(
                f"training.distill does not go with parallel.tp {parallel.tp} and parallel.pp {parallel.pp}: the "
                "teacher lies whole on each rank; use 1 and 1"
            )
        if data.feeding != "sequences":
            raise ValueError(
                f"training.distill does not go with data.feeding {data.feeding}: the teacher keeps nothing from step "
                "to step; use sequences"
            )
        if objective.kind != "next_token":
            raise ValueError(f"training.distill does not go with objective {objective.kind}; use next_token")
