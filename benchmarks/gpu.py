"""Tokens per second and MFU of training on one CUDA device: Transformer++ and Elastic Memory.

    python -m benchmarks.gpu [--models 760m 400m 100m] [--lengths 4096 8192 16384 32768] [--budget-s 500]

Models are those of configs/models, in BF16 through the real training engine (DeepSpeed ZeRO 1, one process, NCCL), one
micro-batch and one window over the whole sequence a step, optimizer included. Micro-batches hold about `--tokens`
tokens, fewer where memory is short; if a single sequence does not fit, blocks are recomputed in the backward pass.
Each cell is measured plain and with `training.compile`. Times are medians over steps after warm-up.

First the rates of the device are measured and written for plans (`benchmarks/gpu_rates.py`), unless `--no-rates`.

Without a CUDA device it says so and ends. `--device cpu --tiny` checks the benchmark itself.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_rates
from benchmarks.common import OUTPUT, model_from, publish, random_batch, shipped_model, summary, table
from benchmarks.gpu_engines import Trainable, build, missing_libraries
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.devices import device_peak
from megamem.costs.flops import flops_per_token
from megamem.hardware import avoid_broken_amx
from megamem.model.compiled import compile_pointwise, restore_pointwise

KINDS = ("transformer", "elastic")
NAMES = {"transformer": "Transformer++", "elastic": "Elastic Memory"}
GOALS = {"transformer_mfu": 0.40, "elastic_over_transformer": 0.9}
GOAL_SIZE, GOAL_LENGTH = "760m", 4096
MEMORY_SHARE = 0.85


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    size: str
    kind: str
    length: int
    rows: int
    compile: bool
    recompute: bool
    tokens_per_second: dict[str, float]
    """Median and quartiles over steps."""
    mfu: float | None
    """None where the device's dense peak is not known."""
    peak_memory_gib: float | None
    loss: float
    """Nats per token of the last step on random tokens: a sign of life."""


def tiny_model(kind: str) -> ModelConfig:
    """A model of no size, for checking the benchmark."""
    memory = [{"layers": [1], "mixer": {"kind": "elastic_memory", "order": 8}}] if kind == "elastic" else []
    sizes = {"layers": 2, "hidden_size": 32, "heads": 2, "vocab_size": 64, "chunk_size": 16}
    return parse_config(ModelConfig, {**sizes, "memory": memory}, "tiny")


def model_of(size: str, kind: str) -> ModelConfig:
    """The model of configs/models, or the tiny one."""
    return tiny_model(kind) if size == "tiny" else model_from(shipped_model(f"{kind}-{size}"))


class Bench:
    """Measures the cells of one model on one device within a deadline."""

    def __init__(self, options: argparse.Namespace, engine: str, size: str, kind: str, deadline: float) -> None:
        self.options, self.engine_kind, self.size, self.kind = options, engine, size, kind
        self.device = torch.device(options.device)
        self.deadline = deadline
        self.model = model_of(size, kind)
        self.notes: list[str] = []
        self.engine: Trainable | None = None
        self.bytes_per_token = 0.0

    def run(self) -> list[Cell]:
        """All lengths, plain and compiled, until the deadline."""
        cells = []
        for length in self.options.lengths:
            for compiled in (False, True) if self.options.compile else (False,):
                what = f"{self.size} {self.kind} {length}{' compiled' if compiled else ''}"
                if time.monotonic() > self.deadline:
                    self.notes.append(f"{what}: not measured, time was up")
                    continue
                cell = self._fitted(length, compiled, what)
                if cell is not None:
                    cells.append(cell)
        return cells

    def _fitted(self, length: int, compiled: bool, what: str) -> Cell | None:
        """The cell with the largest micro-batch that fits."""
        recompute = False
        if self.engine is None:
            self._build(length)
        rows = self._rows(length)
        engine = self.engine
        assert engine is not None
        while True:
            try:
                return self._cell(engine, length, rows, compiled, recompute)
            except torch.OutOfMemoryError:
                self.engine = None
                del engine
            except Exception as error:
                if not compiled:
                    raise
                self.notes.append(f"{what}: torch.compile failed, {type(error).__name__}: {str(error)[:100]}")
                self.engine = None
                return None
            self._free()
            if rows == 1 and recompute:
                self.notes.append(f"{what}: out of memory with one sequence and recomputation")
                return None
            rows, recompute = max(rows // 2, 1), rows == 1
            engine = self._build(length)

    def _build(self, length: int) -> Trainable:
        self._free()
        engine = build(self.engine_kind, self.model, length, 1, self.options.device)
        self.engine = engine
        return engine

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rows(self, length: int) -> int:
        """Sequences of a micro-batch: the wanted tokens, or what memory holds by the measure of one short sequence."""
        wanted = max(1, self.options.tokens // length)
        if self.device.type != "cuda":
            return wanted
        if not self.bytes_per_token:
            self.bytes_per_token = self._probe()
        free = torch.cuda.mem_get_info(self.device)[1] * MEMORY_SHARE - torch.cuda.memory_allocated(self.device)
        return max(1, min(wanted, int(free / (self.bytes_per_token * length))))

    def _probe(self) -> float:
        """Bytes per token at the peak of a step on one sequence of the first length."""
        assert self.engine is not None
        length = self.options.lengths[0]
        self.engine.resize(length, 1)
        batch = random_batch(self.model, length // self.model.chunk_size, 1).to(self.device)
        try:
            self.engine.step(batch)  # optimizer states exist from here on
            resting = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.engine.step(batch)
        except torch.OutOfMemoryError:
            self._build(length)
            return float("inf")
        return (torch.cuda.max_memory_allocated(self.device) - resting) / length

    def _cell(self, engine: Trainable, length: int, rows: int, compiled: bool, recompute: bool) -> Cell:
        engine.resize(length, rows)
        engine.stage.recompute = recompute
        batch = random_batch(self.model, length // self.model.chunk_size, rows).to(self.device)
        cuda = self.device.type == "cuda"
        if compiled:
            compile_pointwise(engine.stage, backend=self.options.backend)
        try:
            for _ in range(self.options.warmup):
                engine.step(batch)
            if cuda:
                torch.cuda.synchronize(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            seconds, nats = self._timed(engine, batch)
        finally:
            restore_pointwise(engine.stage)
        rates = summary([rows * length / s for s in seconds])
        peak = device_peak(torch.cuda.get_device_name(self.device), "bf16") if cuda else None
        return Cell(
            self.size,
            self.kind,
            length,
            rows,
            compiled,
            recompute,
            rates,
            rates["median"] * flops_per_token(self.model, length)["training"] / peak if peak else None,
            torch.cuda.max_memory_allocated(self.device) / 2**30 if cuda else None,
            nats / (rows * length),
        )

    def _timed(self, engine: Trainable, batch: Any) -> tuple[list[float], float]:
        seconds = []
        for _ in range(self.options.steps):
            begun = time.perf_counter()
            nats = engine.step(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - begun)
            if time.monotonic() > self.deadline:
                break
        return seconds, nats.item()


def goals(cells: Sequence[Cell]) -> dict[str, float | None]:
    """The figures with a goal, best of plain and compiled; None where they were not measured."""

    def best(kind: str) -> Cell | None:
        found = [c for c in cells if (c.size, c.kind, c.length) == (GOAL_SIZE, kind, GOAL_LENGTH)]
        return max(found, key=lambda c: c.tokens_per_second["median"], default=None)

    transformer, elastic = best("transformer"), best("elastic")
    over = None
    if transformer and elastic:
        over = elastic.tokens_per_second["median"] / transformer.tokens_per_second["median"]
    return {"transformer_mfu": transformer.mfu if transformer else None, "elastic_over_transformer": over}


def report(cells: Sequence[Cell], notes: Sequence[str]) -> None:
    """Print the table."""
    rows = []
    for c in cells:
        rate = c.tokens_per_second
        rows.append(
            [
                c.size,
                NAMES[c.kind],
                f"{c.length:,}",
                f"{c.rows}{' (recompute)' if c.recompute else ''}",
                "yes" if c.compile else "no",
                f"{rate['median']:,.0f} ({rate['low']:,.0f}-{rate['high']:,.0f})",
                "unknown peak" if c.mfu is None else f"{c.mfu:.1%}",
                "-" if c.peak_memory_gib is None else f"{c.peak_memory_gib:.1f}",
            ]
        )
    header = ["model", "kind", "sequence", "rows", "compile", "tokens/s (quartiles)", "MFU", "peak GiB"]
    print(table(header, rows))
    for note in notes:
        print(f"- {note}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["760m", "400m", "100m"], help="sizes of configs/models")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a micro-batch where they fit")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a cell")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--budget-s", type=float, default=500, help="seconds in all, shared evenly by the models")
    parser.add_argument("--engine", choices=["auto", "real", "minimal"], default="auto")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="plain cells only")
    parser.add_argument("--no-rates", dest="rates", action="store_false", help="leave the device's rates out")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and lengths: checks the benchmark itself")
    parser.add_argument("--output", type=Path, default=OUTPUT / "gpu.json")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.models, options.lengths, options.tokens = ["tiny"], [32, 64], 64
        options.steps, options.warmup = 2, 1
    return options


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    options = parse(arguments)
    begun = time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: needs a CUDA device and torch finds none; nothing measured")
        return
    avoid_broken_amx()
    if options.device == "cuda" and options.rates:
        gpu_rates.main(["--output", str(options.output.with_name("device.yaml"))])
    missing = missing_libraries() if options.engine == "auto" else None
    engine = "minimal" if missing or options.engine == "minimal" else "real"
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, BF16, engine: {engine}")
    notes = [f"the real engine is missing ({missing}); figures are the minimal trainer's"] if missing else []
    todo = [(size, kind) for size in options.models for kind in options.kinds]
    cells: list[Cell] = []
    for done, (size, kind) in enumerate(todo):
        now = time.monotonic()
        left = options.budget_s - (now - begun)
        bench = Bench(options, engine, size, kind, now + left / (len(todo) - done))
        cells += bench.run()
        notes += bench.notes
        del bench
    report(cells, notes)
    reached = goals(cells)
    for goal, value in reached.items():
        shown = "not measured" if value is None else f"{value:.3f}"
        print(f"{goal} at {GOAL_SIZE}, {GOAL_LENGTH:,} tokens: {shown} (goal {GOALS[goal]})")
    publish(
        {
            "device": name,
            "torch": torch.__version__,
            "engine": engine,
            "seconds": time.monotonic() - begun,
            "cells": [asdict(cell) for cell in cells],
            "notes": notes,
            "goals": GOALS,
            "reached": reached,
        },
        options.output,
    )


if __name__ == "__main__":
    main()
