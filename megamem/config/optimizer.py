"""The configuration of the optimizer and of its learning rate over the steps of a run."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from megamem.config.base import ConfigModel


class OptimizerConfig(ConfigModel):
    """AdamW (Loshchilov & Hutter 2019) and its learning rate; defaults of the Elastic Memory paper."""

    lr: PositiveFloat = 2e-3
    """Peak learning rate."""
    new_parameters_lr: PositiveFloat | None = None
    """Peak learning rate of parameters that `training.init_from` lists as new (added memories); lr if not given."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after a linear warm-up. `cosine`: falls over all steps. `wsd` (warm-up, stable, decay): stays at
    its peak and falls over the last steps; runs of other lengths branch off it (docs/training.md)."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end over the peak."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the steps in which the learning rate rises to its peak."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of the warm-up, however long the run is; warmup_ratio of the steps if not given."""
    decay_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the steps in which `wsd` decays, at the end."""
    decay_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of the decay, however long the run is; decay_ratio of the steps if not given."""
    decay_shape: Literal["1-sqrt", "linear"] = "1-sqrt"
    """How `wsd` decays: by one minus the root of the share of the decay that is done (Hägele et al. 2024), or by one
    minus that share."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the moments."""
    eps: PositiveFloat = 1e-7
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of matrices and embeddings; vectors (norms) do not decay."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    def warmup(self, steps: int) -> int:
        """Return the steps of the warm-up of a run of `steps`."""
        return math.ceil(self.warmup_ratio * steps) if self.warmup_steps is None else self.warmup_steps

    def decay(self, steps: int) -> int:
        """Return the steps of the decay of `wsd` in a run of `steps`."""
        return round(self.decay_ratio * steps) if self.decay_steps is None else self.decay_steps
