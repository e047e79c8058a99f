"""What the CUDA benchmark trains with: the real engine, or a minimal one where its libraries are missing."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.data.batch import Batch
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, info, initialize_parameters
from megamem.pipeline.train_chunk import chunk_places
from megamem.pipeline.window import Window

LR = 1e-4


class Trainable(Protocol):
    """A model with its optimizer."""

    stage: Stage
    description: str

    def resize(self, length: int, rows: int) -> None:
        """Expect one micro-batch of `rows` sequences of `length` tokens a step."""

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step; summed cross-entropy, left on the device."""


def run_config(model: ModelConfig, length: int, rows: int, device: str) -> RunConfig:
    """A run of one micro-batch a step, BF16, ZeRO 1, one window over the whole sequence."""
    tree = {
        "name": "benchmark",
        "model": model.model_dump(mode="json"),
        "data": {"sources": "none", "sequence_length": length},
        "training": {"steps": 1, "batch_tokens": rows * length, "micro_batch_size": rows, "precision": "bf16"},
        "parallel": {"zero_stage": 1, "device": device},
    }
    return parse_config(RunConfig, tree, "benchmark")


def missing_libraries() -> str | None:
    """Why the real engine cannot be used, or None."""
    try:
        import deepspeed
        import megatron.core

        assert deepspeed
        assert megatron.core
    except Exception as error:  # a broken CUDA toolkit raises more than ImportError while they load
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return None


class Real:
    """`megamem.pipeline.engine.WindowEngine` in one process: DeepSpeed ZeRO 1 over Megatron layers, NCCL on CUDA."""

    description = "WindowEngine, ZeRO 1"

    def __init__(self, model: ModelConfig, length: int, rows: int, device: str) -> None:
        from megamem.parallel.topology import Topology
        from megamem.pipeline.engine import build_engine

        self._model, self._device = model, device
        config = run_config(model, length, rows, device)
        self._engine = build_engine(config, Topology.start(device=device))
        self.stage = self._engine.stage

    def resize(self, length: int, rows: int) -> None:
        """See `Trainable.resize`: DeepSpeed counts backward passes, of which there is one whatever the size."""
        self._engine.config = run_config(self._model, length, rows, self._device)

    def step(self, batch: Batch) -> Tensor:
        """See `Trainable.step`."""
        return self._engine.step([batch], LR).loss_sum


class Minimal:
    """BF16 weights, FP32 master weights in fused AdamW, clipping; torch's own layers, no DeepSpeed, no Megatron."""

    description = "minimal trainer (torch layers, fused AdamW), not the real engine"

    def __init__(self, model: ModelConfig, length: int, rows: int, device: str) -> None:
        settings = run_config(model, length, rows, device).optimizer
        with torch.device(device):
            self.stage = build_stage(model, PlainLinears())
        initialize_parameters(self.stage, seed=0)
        parameters = list(self.stage.parameters())
        self._masters = [p.detach().clone().requires_grad_() for p in parameters]
        decays = [info(p).decay for p in parameters]
        self.stage.bfloat16()
        self._weights = list(self.stage.parameters())
        groups = [
            {
                "params": [m for m, d in zip(self._masters, decays, strict=True) if d is decay],
                "weight_decay": settings.weight_decay * decay,
            }
            for decay in (True, False)
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LR, betas=settings.betas, eps=settings.eps, fused=True)
        self._clip = settings.grad_clip
        self._window = Window(self.stage, NextToken(self.stage.config))
        self._device = torch.device(device)

    def resize(self, length: int, rows: int) -> None:
        """See `Trainable.resize`."""

    def step(self, batch: Batch) -> Tensor:
        """See `Trainable.step`."""
        states = self.stage.initial_states(batch.tokens.shape[1], self._device, torch.bfloat16)
        scale = torch.full((), 1 / math.prod(batch.tokens.shape), device=self._device)
        loss, nats, _ = self._window(batch.tokens, batch.labels, chunk_places(batch), states, scale)
        loss.backward()
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, self._clip, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
        return nats


def build(kind: str, model: ModelConfig, length: int, rows: int, device: str) -> Trainable:
    """The engine called `real` or `minimal`."""
    engines: dict[str, Any] = {"real": Real, "minimal": Minimal}
    engine: Trainable = engines[kind](model, length, rows, device)
    return engine
