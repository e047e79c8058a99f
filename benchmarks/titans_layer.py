"""The deep Titans layer beside the neural memory of the package titans-pytorch, on the CPU.

    pip install -c constraints.txt -e ".[benchmarks]"      # titans-pytorch and what it needs
    python -m benchmarks.titans_layer [--quick] [--tokens N] [--threads N] [--turns N]

The same work: 1,024 tokens of width 256, 4 heads of 64, per head a network of two layers with four times as many units
between, gradients taken at the weights of every 64th token, momentum and decay; forward and backward, FP32. `per token`
is the package with a step of its own for each token, as ours takes them (its chunk_size 1, batch_size 64); `per chunk`
is the package with one step per 64 tokens, which is less work and another model. Layer against layer, and in a model of
4 layers with the same MLPs, embedding and head over half as many tokens. The forms take turns within one run; ratios
are of the same turn. The package keeps the weights of a network for every token: one layer's of 4,096 tokens, or four
layers' of 1,024, do not fit into 24 GiB (and it cannot be computed again in the backward pass: torch.func refuses).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import OUTPUT, fix_threads, interleaved, publish, random_batch, ratio, summary, table
from benchmarks.cpu import spread
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.train_chunk import chunk_places
from megamem.pipeline.window import Window

OURS, PER_TOKEN, PER_CHUNK = "megamem titans", "titans-pytorch, per token", "titans-pytorch, per chunk"
GOALS = {"layer": 4.0, "model": 2.0}
INNER = 64


def shape(quick: bool, chunk: int | None = None) -> ModelConfig:
    """Four Titans layers."""
    sizes = {"layers": 4, "hidden_size": 256, "heads": 4, "vocab_size": 1024, "chunk_size": chunk or 512}
    if quick:
        sizes = {"layers": 1, "hidden_size": 32, "heads": 2, "vocab_size": 64, "chunk_size": chunk or 64}
    return parse_config(ModelConfig, {**sizes, "mixer": {"kind": "titans", "inner_chunk": INNER}}, "benchmark")


class TheirMemory(Mixer):
    """The package's layer in a mixer's place; reads a whole sequence in one call."""

    def __init__(self, model: ModelConfig, step_tokens: int) -> None:
        from titans_pytorch import NeuralMemory

        super().__init__({}, {}, 1)
        self.memory = NeuralMemory(
            dim=model.hidden_size, heads=model.heads, dim_head=model.resolved_head_dim, chunk_size=step_tokens,
            batch_size=INNER, default_model_kwargs={"depth": 2, "expansion_factor": 4.0},
        )  # fmt: skip

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        read, _ = self.memory(hidden.transpose(0, 1))
        return read.transpose(0, 1), state, {}


def our_layer(model: ModelConfig, tokens: int) -> Callable[[], object]:
    """One layer, chunk by chunk, forward and backward."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    mixer, size = stage.own_layers[0].mixer, model.chunk_size
    hidden = torch.randn(tokens, 1, model.hidden_size, requires_grad=True)

    def run() -> None:
        state, outputs = mixer.initial_state(1, hidden.device, hidden.dtype), []
        for start in range(0, tokens, size):
            output, state, _ = mixer(hidden[start : start + size], state, Chunk((start,)))
            outputs.append(output)
        torch.cat(outputs).sum().backward()

    return run


def their_layer(model: ModelConfig, tokens: int, step_tokens: int) -> Callable[[], object]:
    """One layer in one call, forward and backward."""
    layer = TheirMemory(model, step_tokens)
    hidden = torch.randn(tokens, 1, model.hidden_size, requires_grad=True)

    def run() -> None:
        layer(hidden, {}, Chunk((0,)))[0].sum().backward()

    return run


def whole_model(model: ModelConfig, tokens: int, step_tokens: int | None = None) -> Callable[[], object]:
    """A model with our layers, or with theirs in their place."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    for block in stage.own_layers if step_tokens else ():
        block.mixer = TheirMemory(model, step_tokens or 1)
    window, batch = Window(stage, NextToken(stage.config)), random_batch(model, tokens // model.chunk_size, 1)

    def run() -> None:
        stage.zero_grad(set_to_none=True)
        states = stage.initial_states(1, torch.device("cpu"), torch.float32)
        loss, _, _ = window(batch.tokens, batch.labels, chunk_places(batch), states, torch.tensor(1.0 / tokens))
        loss.backward()

    return run


def measure(runs: dict[str, Callable[[], object]], tokens: int, turns: int, budget_s: float) -> dict[str, Any]:
    """Tokens per second, and ours over each of theirs."""
    wall = {name: times.wall for name, times in interleaved(runs, turns, budget_s).items()}
    return {
        "turns": len(wall[OURS]),
        "tokens_per_second": {name: summary([tokens / s for s in seconds]) for name, seconds in wall.items()},
        "ours_over": {name: ratio(wall[name], wall[OURS]) for name in runs if name != OURS},
    }


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument("--threads", type=int, help="torch threads; all usable cores if not given")
    parser.add_argument("--tokens", type=int, default=1024, help="a multiple of 1,024")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=600, help="seconds each part may take (one turn always runs)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "titans_layer.json")
    options = parser.parse_args(arguments)
    if options.tokens < 1024 or options.tokens % 1024:
        parser.error(f"--tokens {options.tokens} is no multiple of 1024, two of the model's chunks")
    count = fix_threads(options.threads)
    print(f"torch {torch.__version__}, {count} threads, FP32, load average {os.getloadavg()[0]:.1f}")
    tokens = 256 if options.quick else options.tokens
    half = tokens // 2
    ours, theirs, shorter = shape(options.quick), shape(options.quick, tokens), shape(options.quick, half)
    found = {
        "layer": {
            OURS: our_layer(ours, tokens),
            PER_TOKEN: their_layer(theirs, tokens, 1),
            PER_CHUNK: their_layer(theirs, tokens, INNER),
        },
        "model": {
            OURS: whole_model(ours, half),
            PER_TOKEN: whole_model(shorter, half, 1),
            PER_CHUNK: whole_model(shorter, half, INNER),
        },
    }
    record: dict[str, Any] = {"torch": torch.__version__, "threads": count, "tokens": tokens, "goals": GOALS}
    for name, runs in found.items():
        result = record[name] = measure(runs, tokens if name == "layer" else half, options.turns, options.budget_s)
        print(f"\n### {name}, {result['turns']} turns\n")
        rows = [
            [form, spread(rate, 0), spread(result["ours_over"][form], 2) if form != OURS else ""]
            for form, rate in result["tokens_per_second"].items()
        ]
        print(table(["form", "tokens/s", "ours over it"], rows))
    publish(record, options.output)


if __name__ == "__main__":
    main()
