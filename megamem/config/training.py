"""The configuration of training: its length, portions, precision, and what it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megamem.config.base import ConfigModel
from megamem.config.distill import DistillConfig
from megamem.config.extensions import AnyCallback
from megamem.config.objective import AnyObjective
from megamem.config.parts import AnyStartWeights
from megamem.config.phase import PhaseConfig

LayerPart = Literal["mixer", "mlp"]
"""A part of a layer, with the norm before it if there is one."""
Recompute = Literal[False, True, "mixer", "mlp"]
"""What of each layer is computed again in the backward pass: nothing, all of it, or one part."""

WindowOrder = Literal["chunks", "layers"]
"""What a window is read by: chunk after chunk in all layers, or layer after layer in all chunks."""


class TrainingConfig(ConfigModel):
    """How long and in what portions the model is trained."""

    objective: AnyObjective = Field(default="next_token", validate_default=True)
    """What the model is trained to predict: the `next_token`, or another registered objective."""
    steps: PositiveInt | None = None
    """Optimizer steps. Give this or `tokens`; a run folder's configuration has the steps that its `tokens` take."""
    tokens: PositiveInt | None = None
    """Budget of tokens without padding, rounded up to whole steps by the share of padding in the sources. Give this or
    `steps`."""
    stop_after: PositiveInt | None = None
    """End after this step as if by a signal, with a checkpoint: the schedule stays that of all steps."""
    batch_tokens: PositiveInt
    """Positions of one optimizer step over all ranks, padding included; a multiple of data.sequence_length."""
    micro_batch_size: PositiveInt = 1
    """Rows of a micro-batch: sequences that a rank processes at once. `auto`: the planner chooses."""
    bptt_chunks: PositiveInt | None = None
    """Chunks one backward pass spans; gradients through memory stop at its border. The whole sequence if not given."""
    recompute: Recompute = False
    """Activation checkpointing: what of each layer is computed again in the backward pass, where only what it is given
    is kept. `mixer`: mixer and memory; `mlp`: the MLP; `true`: the whole layer. `auto`: the planner chooses."""
    window_order: WindowOrder = "chunks"
    """The order in which windows are read where there is no pipeline. `chunks`: all layers read a chunk, then the next.
    `layers`: a layer reads all chunks of the window, then the next layer; norms, MLPs, the output head and most mixers
    take all of them at once, which pays where chunks are small. Numbers differ in their rounding only. `auto`: the
    planner chooses."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """BF16 keeps master weights, moments, gradient sums and memory coefficients in FP32."""
    init_from: AnyStartWeights | None = None
    """Safetensors file of weights to start from, as a run or `megamem checkpoint merge` writes it; such files of
    single parts of the model, `encoder` and `decoder`; or that of the `base` without the model's memories. What no file
    holds is random. A run that goes on from a checkpoint has its own."""
    freeze: str | None = None
    """What does not learn, and has no gradients and no optimizer state. `base`: all parameters but the new ones, which
    `init_from` holds nothing for; `encoder` or `decoder`: that part of the model. Everything learns if not given."""
    distill: DistillConfig | None = None
    """A teacher whose predictions the model learns besides the text; none if not given."""
    embedding_cache: Path | None = None
    """Folder in which the memories of a frozen encoder are kept: each chunk of text is encoded once, whatever run reads
    it again. Nothing is kept if not given."""
    compile: bool = False
    """torch.compile what lies between matrix products (norms, gates, convolutions), one kernel each; pays on CUDA."""
    kernels: Literal["auto", "torch"] = "auto"
    """Who computes rotary positions, gates of MLPs, short convolutions and gated norms of heads on CUDA. `auto`: the
    kernels of the package flash-linear-attention, where it is installed and finds what torch finds. `torch`: torch
    alone, as on the CPU, and with `compile`, which makes kernels of its own."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights. The data's order has its own (data.seed)."""
    max_bad_steps: PositiveInt = 5
    """Steps in a row that may be skipped for a non-finite loss or gradient before the run is given up."""
    skip_spikes: PositiveFloat | None = None
    """Skip the update of a step whose loss or gradient norm lies so many standard deviations above its mean over the
    steps before; 6 is usual. No step is skipped if not given."""
    spike_window: Annotated[int, Field(ge=4)] = 128
    """Steps of that mean. At the start of a run none is skipped until half of them are there."""
    phases: tuple[PhaseConfig, ...] = ()
    """Later parts of the run that read other data, longer sequences or larger batches (docs/training.md)."""
    callbacks: tuple[AnyCallback, ...] = ()
    """What else happens around training steps, in this order."""

    @model_validator(mode="after")
    def _trained_to_freeze(self) -> TrainingConfig:
        """Raise ValueError where what is frozen would be random weights."""
        if self.freeze == "base" and self.init_from is None:
            raise ValueError("freeze base needs init_from: weights to keep, as `megamem convert from-hf` writes them")
        if self.embedding_cache is not None and self.freeze != "encoder":
            raise ValueError(
                f"embedding_cache {self.embedding_cache} keeps what a frozen encoder makes; use freeze encoder, or "
                "leave it out"
            )
        named = isinstance(self.init_from, Path) or self.freeze in (self.init_from or {})
        if self.freeze not in (None, "base") and not named:
            raise ValueError(
                f"freeze {self.freeze} freezes weights that nothing has trained; name them in init_from, as "
                f"{{{self.freeze}: FILE}} or the file of a whole model"
            )
        return self
