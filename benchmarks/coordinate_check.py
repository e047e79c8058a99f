"""Coordinate check of muP: how the sizes of activations go with the width after some steps of training.

    python -m benchmarks.coordinate_check [--widths 64 128 256 512] [--steps 5] [--lr 0.002] [--seeds 1]

For each mechanism, with and without `model.mup`, and with either more heads or wider heads: small models of growing
width take AdamW steps on one batch of random tokens. Of each block's mixer, of the residual stream after it and of the
logits, the mean magnitude of what changed since the start is taken, and its slope over the width, both logarithmic. In
muP it is 0: no part of the model learns faster or slower for being wider. In the standard parametrization it grows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import OUTPUT, fix_threads, publish, table
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.optimizer import OptimizerConfig
from megamem.data.batch import Batch
from megamem.memory.base import Chunk
from megamem.memory.shared.block_attention import AttentionProjections
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.optimizer import parameter_groups

MECHANISMS: dict[str, dict[str, Any]] = {
    "attention": {"kind": "full_attention"},
    "elastic": {"kind": "elastic_memory", "order": 8, "samples": 8},
    "infini": {"kind": "infini_attention"},
    "melodi": {"kind": "melodi", "summaries": 4},
    "memorizing": {"kind": "memorizing_attention", "queue": 32},
    "ssd": {"kind": "ssd", "inner_chunk": 8},
    "delta": {"kind": "delta_net", "decay": True, "inner_chunk": 8},
    "retnet": {"kind": "retnet", "inner_chunk": 8},
    "dla": {"kind": "dla", "inner_chunk": 8},
    "titans": {"kind": "titans", "inner_chunk": 8},
    "memora": {"kind": "memora", "inner_chunk": 8},
    "caching": {"kind": "memory_caching", "memory": {"kind": "titans", "inner_chunk": 8}, "segment": 8},
    "log-linear": {"kind": "log_linear", "memory": {"kind": "linear_attention"}, "segment": 8, "levels": 3},
}
BASE_WIDTH, BASE_HEADS = 64, 4
GROWTH = ("more heads", "wider heads")
CHUNK, CHUNKS, ROWS, VOCABULARY = 16, 2, 4, 16

Sizes = dict[str, float]
"""Mean magnitudes by the place they are taken at."""


def model_of(mixer: Mapping[str, Any], width: int, growth: str, mup: bool, **more: Any) -> ModelConfig:
    """A model of two layers. growth: what becomes of the heads of the base model."""
    heads = BASE_HEADS * width // BASE_WIDTH if growth == "more heads" else BASE_HEADS
    tree = {
        "layers": 2, "hidden_size": width, "heads": heads, "ffn_size": 2 * width, "vocab_size": VOCABULARY,
        "chunk_size": CHUNK, "mixer": mixer,
        "mup": {"base_width": BASE_WIDTH, "base_heads": BASE_HEADS} if mup else None,
        **more,
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "coordinate check")


def counting(seed: int) -> Batch:
    """Rows that count through the vocabulary in steps of their own: something to learn, as texts have."""
    generator = torch.Generator().manual_seed(seed)
    first, step = torch.randint(VOCABULARY, (2, 1, ROWS), generator=generator)
    tokens = (first + step * torch.arange(CHUNKS * CHUNK + 1)[:, None]) % VOCABULARY
    starts = np.arange(0, CHUNKS * CHUNK, CHUNK)[:, None].repeat(ROWS, axis=1)
    return Batch(tokens[:-1], tokens[1:], starts, tuple(range(ROWS)))


@contextmanager
def watched(stage: Stage) -> Iterator[dict[str, list[Tensor]]]:
    """What mixers put out and what blocks pass on meanwhile, call by call."""
    seen: dict[str, list[Tensor]] = {}

    def watch(stack: ExitStack, module: Any, method: str, name: str, made: Callable[[Any], Tensor]) -> None:
        function, seen[name] = getattr(module, method), []

        def watching(*arguments: Any) -> Any:
            output = function(*arguments)
            seen[name].append(made(output).detach())
            return output

        stack.enter_context(mock.patch.object(module, method, watching))

    with ExitStack() as stack:
        for layer, block in enumerate(stage.own_layers):
            watch(stack, block.mixer, "forward", f"mixer {layer}", itemgetter(0))
            watch(stack, block, "forward", f"hidden {layer}", itemgetter(0))
            if isinstance(block.mixer, AttentionProjections):
                watch(stack, block.mixer, "project", f"scores {layer}", partial(scores, block.mixer))
        yield seen


def scores(mixer: AttentionProjections, projected: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the scores of softmax attention, of each token with itself (which rotations leave as they are)."""
    query, key, _ = projected
    key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)  # of several queries each
    return (mixer.scaled_query(query) * key).sum(-1) * mixer.width**-0.5


def read(stage: Stage, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The batch's mean loss, its chunks in one graph, and all that was computed on the way."""
    states = stage.initial_states(batch.tokens.shape[1], torch.device("cpu"), torch.float32)
    losses, logits = [], []
    with watched(stage) as seen:
        for chunk in range(CHUNKS):
            part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            hidden, states, auxiliary = stage(batch.tokens[part], states, Chunk(tuple(batch.starts[chunk].tolist())))
            losses += [stage.token_losses(hidden, batch.labels[part]).mean(), *auxiliary.values()]
            logits.append(stage.logits(hidden).detach())
    found = {name: torch.cat(parts) for name, parts in seen.items()}
    return torch.stack(losses).sum() / CHUNKS, {**found, "logits": torch.cat(logits)}


def sizes(model: ModelConfig, steps: int, lr: float, seed: int = 0) -> tuple[Sizes, Sizes]:
    """Mean magnitudes after `steps` AdamW steps on one batch: of activations, and of their change since the start."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed)
    config = OptimizerConfig(lr=lr)
    groups = parameter_groups(stage.named_parameters(), config)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    batch = counting(seed)
    before: dict[str, Tensor] = {}
    for _ in range(steps):
        loss, found = read(stage, batch)
        before = before or found
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _, after = read(stage, batch)
    size = {name: value.abs().mean().item() for name, value in after.items()}
    return size, {name: (value - before[name]).abs().mean().item() for name, value in after.items()}


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of log value over log width, by least squares."""
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])


def measured(
    mixer: Mapping[str, Any],
    growth: str,
    mup: bool,
    widths: Sequence[int],
    steps: int,
    lr: float,
    seeds: int = 1,
    **more: Any,
) -> tuple[list[Sizes], list[Sizes]]:
    """`sizes` by width, means over `seeds` starts and batches. more: fields of the model."""
    kinds: tuple[list[Sizes], list[Sizes]] = [], []
    for width in widths:
        runs = [sizes(model_of(mixer, width, growth, mup, **more), steps, lr, seed) for seed in range(seeds)]
        for kind, values in zip(kinds, zip(*runs, strict=True), strict=True):
            kind.append({name: statistics.mean(value[name] for value in values) for name in values[0]})
    return kinds


def slopes(widths: Sequence[int], found: Sequence[Sizes]) -> Sizes:
    """Slopes over the width of what was measured at each of them."""
    return {name: slope(widths, [values[name] for values in found]) for name in found[0]}


def draw(path: Path, widths: Sequence[int], curves: Mapping[str, Mapping[str, list[Sizes]]]) -> None:
    """Changes by width: a row of panels for each mechanism, a panel for each parametrization, a line for each place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.6 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    for panels, (mechanism, found) in zip(
        figure.subplots(len(curves), 2, sharey="row", squeeze=False), curves.items(), strict=True
    ):
        for axis, (name, values) in zip(panels, found.items(), strict=True):
            for place in values[0]:
                axis.plot(widths, [value[place] for value in values], marker="o", label=place)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(widths, list(map(str, widths)))
            axis.set_title(f"{mechanism}, {name}", fontsize="medium")
            axis.grid(alpha=0.3)
        panels[0].set_ylabel("mean change")
        panels[1].legend(fontsize="x-small")
    for axis in figure.axes[-2:]:
        axis.set_xlabel("hidden_size")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the slopes; write them and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
    parser.add_argument("--drawn", nargs="*", choices=MECHANISMS, default=["attention", "titans"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=OUTPUT / "coordinate_check.json")
    given = parser.parse_args(arguments)
    fix_threads(1)  # products are small
    curves: dict[str, dict[str, list[Sizes]]] = {}
    record: dict[str, dict[str, Sizes]] = {}
    rows = []
    for name in given.mechanisms:
        for growth in GROWTH:
            line = f"{name}, {growth}"
            for mup in (True, False):
                _, changes = measured(MECHANISMS[name], growth, mup, given.widths, given.steps, given.lr, given.seeds)
                parametrization = "muP" if mup else "standard"
                curves.setdefault(line, {})[parametrization] = changes
                record.setdefault(line, {})[parametrization] = slopes(given.widths, changes)
            found = record[line].values()
            rows.append((line, *(f"{min(made.values()):.2f} to {max(made.values()):.2f}" for made in found)))
            print("; ".join(rows[-1]), flush=True)
    print(table(["", "slopes with muP", "without"], rows))
    if given.drawn:
        chosen = {line: found for line, found in curves.items() if line in [f"{n}, wider heads" for n in given.drawn]}
        draw(given.output.with_suffix(".png"), given.widths, chosen)
    publish({"widths": given.widths, "steps": given.steps, "lr": given.lr, "slopes": record}, given.output)


if __name__ == "__main__":
    main()
