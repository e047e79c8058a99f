"""The training loop on a device: does the host wait, does memory grow, does the loss fall."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megamem.config.training import Recompute, WindowOrder
from megamem.memory.base import LABEL_IGNORED, Chunk, States
from megamem.model.compiled import compile_pointwise
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.base import StepResult
from megamem.pipeline.train_chunk import dropout_keys
from megamem.pipeline.window import Window, select_states
from megamem.training.callbacks.bad_steps import BadSteps
from megamem.training.callbacks.metrics import Metrics
from megamem.training.loop import Callback
from tests.distributed.training_cases import CHUNK, EVERY, LENGTH, VOCABULARY, run_config

CHUNKS = LENGTH // CHUNK
ROWS = 3
"""One whose document goes on, and two in which another begins; rows are read one by one where they differ."""


@contextmanager
def host_must_not_wait(device: torch.device) -> Iterator[None]:
    """On CUDA every synchronizing call inside raises. On `meta`, where tensors have no values, reading one raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Loop:
    """Windows of a small model with every plain mixer and Elastic Memory, lanes that carry states on."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        recompute: Recompute = False,
        compiled: bool = False,
        anywhere: bool = False,
        dropout: bool = False,
        order: WindowOrder = "chunks",
    ) -> None:
        """anywhere: documents begin at any token; dropout: of values and of shares of attention; order: of a window."""
        drops = {"dropout": 0.1, "attention_dropout": 0.1} if dropout else {}
        config = run_config(model={**EVERY, **drops})
        with torch.device(device):
            self.stage = build_stage(config.model, PlainLinears())
        if device.type != "meta":
            initialize_parameters(self.stage, 0)
        self.stage.to(dtype).recompute = recompute
        if compiled:
            compile_pointwise(self.stage)
        self.window, self.device, self.dtype = Window(self.stage, NextToken(config.model), order=order), device, dtype
        self.states = self.stage.initial_states(ROWS, device, dtype)
        self.anywhere = anywhere

    def batch(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels on the device."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (LENGTH, ROWS), generator=generator)
        labels = tokens.roll(-1, 0)
        labels[-1] = LABEL_IGNORED
        return tokens.to(self.device), labels.to(self.device)

    def places(self, step: int) -> list[Chunk]:
        """`lanes`, and what dropout draws by."""
        keys = dropout_keys(self.stage.config, 0, step, range(ROWS))
        lanes = enumerate(self.lanes(step))
        return [replace(chunk, dropout=keys and keys.after(index * CHUNK)) for index, chunk in lanes]

    def lanes(self, step: int) -> list[Chunk]:
        """Lanes at different places of their documents; in row 1 and 2 one begins inside the window.

        In row 2 it begins inside a chunk where documents begin anywhere.
        """
        starts = (np.arange(CHUNKS)[:, None] + step * CHUNKS).repeat(ROWS, 1) * CHUNK
        for row in (1, 2):
            starts[row:, row] = np.arange(CHUNKS - row) * CHUNK
        if not self.anywhere:
            return [Chunk(tuple(own.tolist())) for own in starts]
        starts[2:, 2] += CHUNK - 3
        borders = [tuple((3,) if (chunk, row) == (1, 2) else () for row in range(ROWS)) for chunk in range(CHUNKS)]
        return [Chunk(tuple(own.tolist()), borders=inside) for own, inside in zip(starts, borders, strict=True)]

    def step(self, step: int, data: tuple[torch.Tensor, torch.Tensor], fresh: bool = False) -> StepResult:
        """Forward and backward of one window; states are carried on unless `fresh`."""
        states: States = self.stage.initial_states(ROWS, self.device, self.dtype) if fresh else self.states
        scale = torch.full((), 1 / (LENGTH * ROWS), device=self.device)
        loss, nats, new = self.window(*data, self.places(step), states, scale)
        loss.backward()
        bad = 1 - loss.detach().isfinite().float()
        self.states = select_states(bad == 0, new, self.states)
        predicted = (data[1] != LABEL_IGNORED).sum().double()
        return StepResult(nats.double(), predicted, predicted, bad, torch.zeros_like(bad), None)


def run_without_waiting(device: torch.device, dtype: torch.dtype, **options: bool) -> None:
    """Steps with new positions each (so that matrices and masks are made and uploaded), and callbacks beside them."""
    loop = Loop(device, dtype, **options)
    data = [loop.batch(step) for step in range(3)]
    loop.step(0, data[0])  # kernels, libraries and compiled code are loaded at first use
    phase = SimpleNamespace(number=0, end=100)
    trainer: Any = SimpleNamespace(step=2, tokens=0, phase=phase, phases=(phase,), data_wait=0.0, paused=0.0)
    callbacks: list[Callback] = [BadSteps(3), Metrics(10, [], [1.0], None)]
    for callback in callbacks:
        callback.start(trainer)
    with host_must_not_wait(device):
        for step in (1, 2):
            result = loop.step(step, data[step], fresh=step == 2)
            trainer.step += 1
            for callback in callbacks:
                callback.after_step(trainer, result)


def memory_after_steps(device: torch.device, dtype: torch.dtype, steps: int) -> list[int]:
    """Bytes allocated after each step of streams; always the same places, so that nothing new is cached."""
    loop = Loop(device, dtype)
    data = loop.batch(0)
    allocated = []
    for _ in range(steps):
        loop.step(1, data)
        loop.stage.zero_grad(set_to_none=True)
        allocated.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
    return allocated


def train(payload: dict[str, Any]) -> dict[str, Any]:
    """Steps of the real engine on one batch: losses, gradient norms, and where the host waited (CUDA only)."""
    from megamem.parallel.topology import Topology
    from megamem.pipeline.engine import build_engine
    from tests.distributed.training_cases import local_batches

    device = payload["device"]
    config = run_config(
        training={"precision": payload["precision"], "compile": payload.get("compile", False)},
        parallel={"zero_stage": payload["zero_stage"], "device": device},
        optimizer={"grad_clip": 1.0},
        data={"feeding": "streams", "documents": "pad"} if payload.get("feeding") == "streams" else {},
    )
    topology = Topology.start(device=device)
    engine = build_engine(config, topology)
    batches = [b.to(topology.device) for b in local_batches(config, topology, 0)]
    losses, norms, waits = [], [], set()
    for step in range(payload["steps"]):
        watch = device == "cuda" and step == payload["steps"] - 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if watch:
                torch.cuda.set_sync_debug_mode("warn")
            result = engine.step(batches, 3e-3)
            if watch:
                torch.cuda.set_sync_debug_mode("default")
        waits |= {f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)}
        losses.append((result.loss_sum / result.predicted).item())
        norms.append(float(result.grad_norm))
    return {"losses": losses, "norms": norms, "waits": sorted(waits)}
