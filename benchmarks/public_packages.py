"""Models of public packages beside ours of one shape, in one run on the CPU.

    pip install -c constraints.txt -e ".[benchmarks]"      # titans-pytorch and what it needs
    python -m benchmarks.public_packages [--tokens 4096] [--turns 5] [--models NAME ...] [--by-layer]

The shape of `benchmarks.caching` (4 layers of 256, 4 heads, a vocabulary of 1,024), forward and backward of one
sequence, FP32, one thread, no optimizer. From outside come

    Hugging Face Llama      all tokens at once, torch's fused attention, an MLP as wide as ours
    Hugging Face Mamba2     its path in torch operations: state 64, twice as wide inside, no MLPs
    titans-pytorch          its neural memory in the place of our mixers: a step per 64 tokens, less work than ours

The models take turns. Ratios are of the same turn, in processor time, which other processes do not lengthen: how many
times as fast a model is as Hugging Face's Llama.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.caching import STORED, models, run_of
from benchmarks.common import OUTPUT, fix_threads, interleaved, publish, ratio, summary, table
from benchmarks.titans_layer import INNER, whole_model
from megamem.config.model import ModelConfig
from megamem.config.training import WindowOrder

LLAMA, MAMBA, TITANS = "Hugging Face Llama", "Hugging Face Mamba2", "titans-pytorch, a step per 64 tokens"
WHOLE = "full attention, all tokens at once"
IN_CHUNKS, BY_LAYER = "full attention, in chunks of 512", "full attention, in chunks of 512, layer by layer"
IN_CHUNK = 512
"""Tokens of a chunk in `benchmarks.caching`."""
SKIPPED = ("full attention", "sliding attention")
Run = Callable[[], object]


def theirs(model: ModelConfig, tokens: int) -> dict[str, Callable[[], Run]]:
    """What makes the models of other packages."""

    def llama() -> Run:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = LlamaConfig(
            hidden_size=model.hidden_size, num_hidden_layers=model.layers, num_attention_heads=model.heads,
            intermediate_size=model.resolved_ffn_size, vocab_size=model.vocab_size, max_position_embeddings=tokens,
            attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        return _of_transformers(LlamaForCausalLM(sizes), model, tokens)

    def mamba() -> Run:
        from transformers import Mamba2Config, Mamba2ForCausalLM

        inside = 2 * model.hidden_size
        sizes = Mamba2Config(
            hidden_size=model.hidden_size, num_hidden_layers=model.layers, num_heads=inside // 64, head_dim=64,
            state_size=64, n_groups=1, vocab_size=model.vocab_size, use_cache=False,
        )  # fmt: skip
        return _of_transformers(Mamba2ForCausalLM(sizes), model, tokens)

    def titans() -> Run:
        return whole_model(model.model_copy(update={"chunk_size": tokens}), tokens, INNER)

    return {LLAMA: llama, MAMBA: mamba, TITANS: titans}


def _of_transformers(language_model: Any, model: ModelConfig, tokens: int) -> Run:
    """Return what takes a sequence forward and backward in a model of transformers."""
    language_model.train()
    ids = torch.randint(model.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        language_model.zero_grad(set_to_none=True)
        language_model(input_ids=ids, labels=ids).loss.backward()

    return run


def ours(tokens: int, order: WindowOrder) -> dict[str, Callable[[], Run]]:
    """What makes our models; order: in which memories read the window."""
    forms = models(quick=False)
    full = forms["full attention"]
    whole = full.model_copy(update={"chunk_size": tokens})
    made: dict[str, Callable[[], Run]] = {
        WHOLE: lambda: run_of(whole, tokens),
        IN_CHUNKS: lambda: run_of(full, tokens),
        BY_LAYER: lambda: run_of(full, tokens, "layers"),
    }
    for name, form in forms.items():
        if name not in SKIPPED:
            made[name] = lambda form=form: run_of(form, tokens, order)  # type: ignore[misc]
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="all if not given; Llama always runs")
    parser.add_argument("--by-layer", action="store_true", help="memories too, with training.window_order: layers")
    parser.add_argument("--output", type=Path, default=OUTPUT / "public_packages.json")
    options = parser.parse_args(arguments)
    if options.tokens % IN_CHUNK or not 0 < options.tokens <= STORED:
        parser.error(f"--tokens {options.tokens}: not a multiple of {IN_CHUNK} up to {STORED:,}, what is kept at once")
    fix_threads(1)
    order: WindowOrder = "layers" if options.by_layer else "chunks"
    makers = theirs(models(quick=False)["full attention"], options.tokens) | ours(options.tokens, order)
    chosen = {name: make for name, make in makers.items() if not options.models or name in {LLAMA, *options.models}}
    if options.models and (unknown := set(options.models) - set(makers)):
        parser.error(f"--models {', '.join(sorted(unknown))}: none of {', '.join(makers)}")
    times = interleaved({name: make() for name, make in chosen.items()}, options.turns)
    seconds = {name: each.processor for name, each in times.items()}
    found = {
        name: {
            "tokens_per_second": summary([options.tokens / each for each in every]),
            "over_llama": ratio(seconds[LLAMA], every),
        }
        for name, every in seconds.items()
    }
    rows = []
    for name, each in found.items():
        over = each["over_llama"]
        spread = f"{over['median']:.2f} ({over['low']:.2f}-{over['high']:.2f})"
        rows.append([name, f"{each['tokens_per_second']['median']:,.0f}", spread])
    print(f"\n{options.tokens:,} tokens, {options.turns} turns, one thread, torch {torch.__version__}\n")
    print(table(["model", "tokens/s of processor time", "times as fast as Llama (quartiles)"], rows))
    publish({"tokens": options.tokens, "turns": options.turns, "models": found}, options.output)


if __name__ == "__main__":
    main()
