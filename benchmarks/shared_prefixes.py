"""Time of eight questions about a context: the context read once and its state forked, or read for each question.

    python -m benchmarks.shared_prefixes [--quick] [--threads N] [--turns N] [--new-tokens N] [--mixers NAME ...]
    python -m benchmarks.shared_prefixes --model FOLDER      # a trained or imported model in their place

A context of 2,000 random tokens, eight questions of 8 to 15 tokens each, as the suite `recall` asks them: 48 new tokens
behind each, the most that it takes, written for all at once, where the context is read once or for each question ("side
by side"), or for one question after the other; and the last eight tokens of each question scored. Ways take turns
within one run; ratios are of the same turn, in processor time, which other processes on the machine do not lengthen
(with one thread: waiting threads spin). The answers are compared too.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import OUTPUT, fix_threads, interleaved, publish, ratio, table
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.evaluation.evaluator import Evaluator
from megamem.hf.trained import open_trained
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

QUESTIONS = 8
MIXERS: dict[str, dict[str, Any]] = {
    "full attention": {"kind": "full_attention"},
    "gated delta net": {"kind": "delta_net", "decay": True},
    "titans": {"kind": "titans", "inner_chunk": 64},
    "elastic memory": {"kind": "elastic_memory", "order": 64},
}


def model_of(mixer: dict[str, Any], quick: bool) -> ModelConfig:
    """Return a model with a mechanism in every layer."""
    size = {"hidden_size": 32, "ffn_size": 64, "layers": 1} if quick else {"hidden_size": 256, "layers": 4}
    shape = {"heads": 4, "ffn_size": 1024, "vocab_size": 1024, "chunk_size": 256, "init_std": 0.1, **size}
    return parse_config(ModelConfig, {**shape, "mixer": mixer}, "benchmark")


def requests(contexts: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return eight prompts for each context."""
    draws = random.Random(0)

    def tokens(count: int) -> list[int]:
        """Return random tokens."""
        return [draws.randrange(vocabulary) for _ in range(count)]

    texts = [tokens(length) for _ in range(contexts)]
    return [text + tokens(8 + question) for text in texts for question in range(QUESTIONS)]


def each_alone(stage: Stage, prompts: list[list[int]], new_tokens: int, rows: int) -> list[list[int]]:
    """Continue prompts, `rows` at a time, each read from its start."""
    evaluator = Evaluator(stage)
    groups = [prompts[i : i + rows] for i in range(0, len(prompts), rows)]
    return [row for group in groups for row in evaluator.generate(group, new_tokens)]


def score_each_alone(stage: Stage, prompts: list[list[int]]) -> list[tuple[float, bool]]:
    """Score the last eight tokens of each prompt, none of which share anything in a call."""
    evaluator = Evaluator(stage, rows=1)
    return [evaluator.score([prompt], [8])[0] for prompt in prompts]


def drawn(model: ModelConfig) -> Stage:
    """Return a model with random weights."""
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed=0)
    return stage


def measure(stage: Stage, quick: bool, turns: int, new_tokens: int) -> dict[str, Any]:
    """Return how many times faster contexts read once are, and whether answers agree."""
    prompts = requests(1, 200 if quick else 2000, stage.config.vocab_size)
    evaluator = Evaluator(stage, rows=QUESTIONS)
    ways: dict[str, Callable[[], object]] = {
        "written": lambda: evaluator.continue_greedily(prompts, [new_tokens] * len(prompts)),
        "written, each": lambda: each_alone(stage, prompts, new_tokens, QUESTIONS),
        "written, one by one": lambda: each_alone(stage, prompts, new_tokens, 1),
        "scored": lambda: evaluator.score(prompts, [8] * len(prompts)),
        "scored, each": lambda: score_each_alone(stage, prompts),
    }
    # each way leaves its answers behind: they are compared without being asked for again
    answers: dict[str, Any] = {}
    calls: dict[str, Callable[[], object]] = {
        name: lambda name=name, way=way: answers.update({name: way()})  # type: ignore[misc]
        for name, way in ways.items()
    }
    times = interleaved(calls, turns, warmup=False)
    pairs = zip(answers["scored"], answers["scored, each"], strict=True)
    return {
        "written": ratio(times["written, each"].processor, times["written"].processor),
        "written_one_by_one": ratio(times["written, one by one"].processor, times["written"].processor),
        "scored": ratio(times["scored, each"].processor, times["scored"].processor),
        "same_texts": answers["written"] == answers["written, each"],
        "same_texts_one_by_one": answers["written"] == answers["written, one by one"],
        "largest_difference_nats": max(abs(once - each) for (once, _), (each, _) in pairs),
    }


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape: checks that the benchmark runs")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--turns", type=int, default=3, help="turns that are measured")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens written behind each question")
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=list(MIXERS), help="mechanisms")
    parser.add_argument("--model", type=Path, help="run, checkpoint, export, or what `megamem convert from-hf` wrote")
    parser.add_argument("--output", type=Path, default=OUTPUT / "shared_prefixes.json")
    options = parser.parse_args(arguments)
    count = fix_threads(options.threads)
    print(f"{count} threads, FP32, load average {os.getloadavg()[0]:.1f}")
    found: dict[str, dict[str, Any]] = {}
    stages: dict[str, Callable[[], Stage]] = {
        name: lambda name=name: drawn(model_of(MIXERS[name], options.quick))  # type: ignore[misc]
        for name in options.mixers
    }
    if options.model is not None:
        trained = open_trained(options.model)
        stages = {trained.title: lambda: trained.load(torch.float32, torch.device("cpu"))}
    for name, stage in stages.items():
        found[name] = measure(stage(), options.quick, options.turns, options.new_tokens)
        print(f"{name}: {found[name]}", flush=True)
    header = [
        "mechanism",
        "times faster than side by side",
        "than one by one",
        "scored",
        "same texts",
        "largest difference, nats",
    ]
    lines = [
        [
            name,
            *(f"{result[way]['median']:.1f}" for way in ("written", "written_one_by_one", "scored")),
            result["same_texts"],
            f"{result['largest_difference_nats']:.0e}",
        ]
        for name, result in found.items()
    ]
    print("\n" + table(header, lines))
    publish({"threads": count, "new_tokens": options.new_tokens, "mixers": found}, options.output)


if __name__ == "__main__":
    main()
