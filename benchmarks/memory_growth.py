"""How large deep memories grow over a long document, with and without the layer norm inside them.

    python -m benchmarks.memory_growth                    # --tokens 16384, --models dla-760m titans-760m ...

One layer of each model of the papers' scale with its start weights reads a document of random inputs of root mean
square 1. A share of their power is the same for all tokens, as in real hidden states: with 0 tokens have nothing in
common. What the table has is the root mean square of what the memory has added to its start weights, the largest over
its matrices, and that of the layer's outputs; it stops where numbers are not finite.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import OUTPUT, model_from, shipped_model
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.training.callbacks.memory_sizes import accumulated

MODELS = (
    "dla-760m",
    "titans-760m",
    "memora-760m",
    "dla-grm-760m",
    "dla-1.3b",
    "titans-1.3b",
    "memora-1.3b",
    "dla-grm-1.3b",
)
SHARES = (0.0, 0.5, 0.9)
SHOWN = (2048, 4096, 8192, 16384)
"""Tokens after which the table has a column; chunks have 2,048."""


class Size(NamedTuple):
    """Root mean squares after so many tokens."""

    tokens: int
    memory: float
    output: float


def one_layer(name: str, layer_norm: bool) -> ModelConfig:
    """Return a shipped model's first layer, its vocabulary cut; memories under Memory Caching are written on."""
    model = model_from(shipped_model(name)).model_dump(mode="json")
    mixer: dict[str, Any] = model["mixer"]
    (mixer["memory"] if mixer["kind"] == "memory_caching" else mixer)["layer_norm"] = layer_norm
    if mixer["kind"] == "memory_caching":
        mixer["write"] = "continued"
    cut = {"layers": 1, "vocab_size": 64, "padded_vocab_size": None, "memory": []}
    return parse_config(ModelConfig, {**model, **cut, "mixer": mixer}, name)


def inputs(model: ModelConfig, tokens: int, share: float, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the chunks of one document, [chunk_size, 1, hidden_size] each, of root mean square 1."""
    common = torch.randn(model.hidden_size, generator=generator)
    common *= math.sqrt(share) * common.numel() ** 0.5 / common.norm()
    for _ in range(tokens // model.chunk_size):
        own = torch.randn(model.chunk_size, 1, model.hidden_size, generator=generator)
        yield common + math.sqrt(1 - share) * own


def grow(model: ModelConfig, share: float, tokens: int) -> list[Size]:
    """Return the sizes of the first layer's memory after each chunk, up to the first that is not finite."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    mixer = stage.own_layers[0].mixer
    state, sizes = mixer.initial_state(1, torch.device("cpu"), torch.float32), []
    with torch.no_grad():
        for hidden in inputs(model, tokens, share, torch.Generator().manual_seed(1)):
            output, state, _ = mixer(hidden, state, Chunk((len(sizes) * model.chunk_size,)))
            largest = max(rms(tensor) for tensor in accumulated(mixer.specs, state))
            sizes.append(Size((len(sizes) + 1) * model.chunk_size, largest, rms(output)))
            if not math.isfinite(largest + sizes[-1].output):
                break
    return sizes


def rms(tensor: Tensor) -> float:
    """Return the root mean square of a tensor [...], taken in float64."""
    return tensor.double().square().mean().sqrt().item()


def written(size: Size) -> str:
    """Return a cell of the table."""
    return f"{size.memory:.2g} ({size.output:.2g})"


def main() -> None:
    """Measure, print the table as Markdown as it comes, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--without", action="store_true", help="also without the layer norm")
    options = parser.parse_args()
    found = []
    columns = ["model", "layer norm", "common share", *(f"{n:,} tokens" for n in SHOWN if n <= options.tokens)]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in options.models:
        for layer_norm in (True, False) if options.without else (True,):
            for share in SHARES:
                sizes = grow(one_layer(name, layer_norm), share, options.tokens)
                found.append({"model": name, "layer_norm": layer_norm, "share": share, "sizes": sizes})
                at = {size.tokens: written(size) for size in sizes}
                cells = " | ".join(at.get(after, "not finite") for after in SHOWN if after <= options.tokens)
                print(f"| {name} | {'yes' if layer_norm else 'no'} | {share} | {cells} |", flush=True)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "memory_growth.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
