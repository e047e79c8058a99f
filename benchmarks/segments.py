"""Throughput of segment recurrence and continuous memory on the CPU, beside chunk-local attention and a public package.

    python -m benchmarks.segments [--quick | --published] [--threads N] [--turns N] [--budget-s S]

One shape for all (4 layers of 256, 4 heads, GELU MLPs of 1,024, a vocabulary of 4,096, 8 chunks of 512 tokens, memories
of 512), forward and backward of a whole sequence, FP32, one row, no optimizer. The forms take turns within one run;
ratios are of the same turn. Goals are over chunk-local attention. Of the package compressive-transformer-pytorch, if it
is installed, stands the same shape with and without a compressed memory; without one it is a Transformer-XL with a
learned table of positions. It reads chunk by chunk too, with one backward pass at the end.

With --published it is LaMemo over Transformer-XL instead, in the shape of both papers' WikiText-103 models (16 layers
of 410, chunks and memories of 150, 267,736 words), for training and for reading without gradients. The softmax is
whole, as in the FLOPs that the LaMemo paper publishes: what an adaptive one computes depends on the text.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import (
    OUTPUT,
    fix_threads,
    interleaved,
    model_from,
    publish,
    random_batch,
    ratio,
    shipped_model,
    summary,
    table,
)
from benchmarks.cpu import Shape, spread, unit
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.flops import flops_per_token
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.train_chunk import chunk_places

LOCAL = "chunk-local attention"
PACKAGE = "compressive_transformer_pytorch"
PUBLIC = {"package, Transformer-XL": "transformer_xl", "package, compressive": "compressive_transformer"}
"""The package's forms, and ours that they are compared with."""
GOALS = {"transformer_xl": 0.85, "compressive_transformer": 0.8, "infinity_former": 0.75}
OVER_PACKAGE = 1.3
READING = ", reading"
"""Ends the names of forms that are timed without gradients."""


def models(quick: bool) -> dict[str, ModelConfig]:
    """Every form in one shape."""
    chunk = 32 if quick else 512
    mixers: dict[str, dict[str, Any]] = {
        LOCAL: {"kind": "local_attention"},
        "full_attention": {"kind": "full_attention"},
        "transformer_xl": {"kind": "transformer_xl", "memory_length": chunk},
        "lamemo": {"kind": "lamemo", "memory_length": chunk},
        "compressive_transformer": {
            "kind": "compressive_transformer", "memory_length": chunk, "compressed_length": chunk,
        },
        "infinity_former": {"kind": "infinity_former", "basis": chunk, "samples": chunk},
        "infinity_former, sticky": {"kind": "infinity_former", "basis": chunk, "samples": chunk, "sticky": "random"},
    }  # fmt: skip
    sizes = (2, 32, 64) if quick else (4, 256, 4096)
    shape = dict(zip(("layers", "hidden_size", "vocab_size"), sizes, strict=True))
    shape |= {"heads": 4, "chunk_size": chunk}
    return {
        name: parse_config(ModelConfig, {**shape, "norm": "layer", "mlp": "gelu", "mixer": mixer}, "benchmark")
        for name, mixer in mixers.items()
    }


def package_unit(model: ModelConfig, chunks: int, compressed: bool) -> Callable[[], float]:
    """Return a function that runs one sequence forward and backward through the public package's model."""
    from compressive_transformer_pytorch import CompressiveTransformer

    size = model.chunk_size
    built = CompressiveTransformer(
        num_tokens=model.vocab_size, dim=model.hidden_size, seq_len=size, depth=model.layers, heads=model.heads,
        mem_len=size, cmem_len=size if compressed else 0, cmem_ratio=4 if compressed else 2 * size,
        gru_gated_residual=False,
    )  # fmt: skip
    tokens = torch.randint(model.vocab_size, (1, chunks * size + 1), generator=torch.Generator().manual_seed(0))

    def run() -> float:
        built.zero_grad(set_to_none=True)
        memories, loss = None, torch.zeros(())
        for begin in range(0, chunks * size, size):
            logits, memories, auxiliary = built(tokens[:, begin : begin + size], memories=memories)
            labels = tokens[:, begin + 1 : begin + size + 1]
            loss = loss + F.cross_entropy(logits[0], labels[0]) / chunks + auxiliary.sum() / chunks
        loss.backward()
        return loss.item()

    return run


def measure(forms: dict[str, ModelConfig], chunks: int, turns: int, budget_s: float) -> dict[str, Any]:
    """Return tokens per second, ratios over chunk-local attention and over the package, and FLOPs per token."""
    shape = Shape(forms[LOCAL], chunks, 1, turns)
    runs: dict[str, Callable[[], object]] = {name: unit(model, shape)[1] for name, model in forms.items()}
    if importlib.util.find_spec(PACKAGE) is not None:
        for name in PUBLIC:
            runs[name] = package_unit(forms[LOCAL], chunks, compressed="compressive" in name)
    times = interleaved(runs, turns, budget_s)
    length = chunks * forms[LOCAL].chunk_size
    flops = {name: flops_per_token(model, length)["training"] for name, model in forms.items()}
    return {
        "tokens": shape.tokens,
        "turns": len(times[LOCAL].wall),
        "tokens_per_second": {name: summary([shape.tokens / s for s in t.wall]) for name, t in times.items()},
        "over_local": {name: ratio(times[LOCAL].wall, t.wall) for name, t in times.items()},
        "over_package": {
            ours: ratio(times[name].wall, times[ours].wall) for name, ours in PUBLIC.items() if name in times
        },
        "flops_over_local": {name: flops[LOCAL] / value for name, value in flops.items()},
    }


def measure_published(quick: bool, turns: int, budget_s: float) -> dict[str, Any]:
    """Return tokens per second of LaMemo and Transformer-XL at their published shape, and ratios of both.

    Training is forward and backward, reading is forward without gradients; FLOPs are those of the formula.
    """
    tiny = {"layers": 2, "vocab_size": 64} if quick else {}
    forms = {
        name: model_from(shipped_model(f"{name}-150m"), dropout=0.0, adaptive=None, **tiny)
        for name in ("transformer-xl", "lamemo")
    }
    base, ours = forms
    shape = Shape(forms[base], chunks=2 if quick else 8, rows=1, turns=turns)
    units = {name: unit(model, shape)[1] for name, model in forms.items()}
    runs = units | {name + READING: reading_unit(model, shape) for name, model in forms.items()}
    times = interleaved(runs, turns, budget_s)
    length = shape.chunks * forms[base].chunk_size
    flops = {name: flops_per_token(model, length) for name, model in forms.items()}
    return {
        "tokens": shape.tokens,
        "turns": len(times[base].wall),
        "tokens_per_second": {name: summary([shape.tokens / s for s in t.wall]) for name, t in times.items()},
        "training_ratio": ratio(times[base].wall, times[ours].wall),
        "reading_ratio": ratio(times[base + READING].wall, times[ours + READING].wall),
        "training_flops_ratio": flops[base]["training"] / flops[ours]["training"],
        "reading_flops_ratio": flops[base]["total"] / flops[ours]["total"],
    }


def reading_unit(model: ModelConfig, shape: Shape) -> Callable[[], float]:
    """Return a function that reads one sequence without gradients and returns its summed loss."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    batch = random_batch(model, shape.chunks, shape.rows)

    @torch.inference_mode()
    def run() -> float:
        states, total = stage.initial_states(shape.rows, torch.device("cpu"), torch.float32), 0.0
        for c, chunk in enumerate(chunk_places(batch)):
            part = slice(c * model.chunk_size, (c + 1) * model.chunk_size)
            hidden, states, _ = stage(batch.tokens[part], states, chunk)
            total += stage.token_losses(hidden, batch.labels[part]).sum().item()
        return total

    return run


def report_published(result: dict[str, Any]) -> None:
    """Print the table of `measure_published`."""
    print(f"\n{result['tokens']:,} tokens a pass, {result['turns']} turns\n")
    rates = {name: spread(rate, 0) for name, rate in result["tokens_per_second"].items()}
    rows = [
        [what, *(rates[name + end] for name in ("transformer-xl", "lamemo")), spread(result[f"{what}_ratio"], 3),
         f"{result[f'{what}_flops_ratio']:.2f}"]
        for what, end in (("training", ""), ("reading", READING))
    ]  # fmt: skip
    print(table(["", "Transformer-XL, tokens/s", "LaMemo, tokens/s", "ratio", "its FLOPs would allow"], rows))


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"\n{result['tokens']:,} tokens a pass, {result['turns']} turns\n")
    rows = []
    for name, rate in result["tokens_per_second"].items():
        package = result["over_package"].get(name)
        flops = result["flops_over_local"].get(name)
        rows.append(
            [
                name,
                spread(rate, 0),
                spread(result["over_local"][name], 3),
                str(GOALS.get(name, "")),
                "" if flops is None else f"{flops:.2f}",
                "" if package is None else spread(package, 2),
            ]
        )
    heads = ["model", "tokens/s", "over chunk-local", "goal", "its FLOPs would allow", "over the package"]
    print(table(heads, rows))


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument("--published", action="store_true", help="LaMemo over Transformer-XL at their published shape")
    parser.add_argument("--threads", type=int, help="torch threads; all usable cores if not given")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=600, help="seconds it may take (one turn always runs)")
    parser.add_argument("--output", type=Path, default=OUTPUT / "segments.json")
    options = parser.parse_args(arguments)
    count = fix_threads(options.threads)
    print(f"torch {torch.__version__}, {count} threads, FP32, load average {os.getloadavg()[0]:.1f}")
    chunks, turns = (2, 1) if options.quick else (8, options.turns)
    if options.published:
        result = measure_published(options.quick, turns, options.budget_s)
        report_published(result)
        publish({"torch": torch.__version__, "threads": count, **result}, options.output)
        return
    result = measure(models(options.quick), chunks, turns, options.budget_s)
    report(result)
    publish({"torch": torch.__version__, "threads": count, "goals": GOALS, **result}, options.output)


if __name__ == "__main__":
    main()
