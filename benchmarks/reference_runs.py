"""Records what short training runs compute, and compares a later state of the code with the record bit for bit.

For changes that must not change a number (moved files, new names, another structure): twelve runs of 20 steps on real
text, which together take every family of mechanisms, tensor and pipeline parallelism, ZeRO 0 to 3, BF16 and every way
of feeding. Losses, gradient norms and held-out figures of each are kept as exact numbers.

    megamem corpus prepare runs/demo-data                            # once
    python -m benchmarks.reference_runs record benchmarks/reference/runs.json
    python -m benchmarks.reference_runs compare benchmarks/reference/runs.json

Numbers are equal only on the same kind of processor with the same torch: both are in the record, and `compare` says so
where they differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT

STEPS = 20
FIGURES = ("loss", "grad_norm", "val_loss")
HELD_OUT = (
    "val_loss", "val_bits_per_byte", "first_chunk_loss", "beyond_first_chunk_loss",
    "memory_off_beyond_first_chunk_loss", "sliding_perplexity",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run: what differs from configs/recipes/books.yaml."""

    processes: int
    overrides: tuple[str, ...]


def mixer(text: str) -> str:
    """The override that puts one mixer, as YAML, into every layer."""
    return f"model.mixer={text}"


CASES: dict[str, Case] = {
    "elastic_tp2_zero1": Case(2, ("parallel.tp=2",)),
    "infini_pp2_bf16_zero1": Case(
        2, (mixer("infini_attention"), "parallel.tp=1", "parallel.pp=2", "training.precision=bf16")
    ),
    "melodi_long_dp2_zero2_bf16": Case(
        2,
        (
            mixer("{kind: melodi, summaries: 16, long_memory: 64, long_increment: 16}"),
            "parallel.tp=1", "training.micro_batch_size=1", "parallel.zero_stage=2", "training.precision=bf16",
        ),
    ),
    "memorizing_streams_dp2_zero2": Case(
        2,
        (
            "model.memory=[{layers: [2], mixer: {kind: memorizing_attention, queue: 512}}]",
            "parallel.tp=1", "training.micro_batch_size=1", "parallel.zero_stage=2", "training.precision=bf16",
            "data.feeding=streams", "data.documents=pad",
        ),
    ),
    "full_attention_sequence_parallel": Case(
        2, (mixer("full_attention"), "model.kv_heads=2", "parallel.sequence_parallel=true", "training.recompute=true")
    ),
    "gpt2_shape_pp2_zero0": Case(
        2,
        (
            mixer("{kind: sliding_attention, window: 192}"), "model.memory=[]", "model.norm=layer", "model.mlp=gelu",
            "model.bias=true", "model.positions=learned", "model.max_positions=1024", "model.tie_embeddings=true",
            "parallel.tp=1", "parallel.pp=2", "parallel.zero_stage=0", "training.bptt_chunks=4",
        ),
    ),
    "titans_gated_tp2_pack": Case(
        2,
        (
            mixer("{kind: memory_caching, memory: {kind: titans, inner_chunk: 32}, combine: grm, segment: 64}"),
            "model.memory=[]", "data.documents=pack",
        ),
    ),
    "dla_selective_pp2_zero1": Case(
        2,
        (
            mixer("{kind: memory_caching, memory: {kind: dla, inner_chunk: 32}, combine: ssc, segment: 64}"),
            "model.memory=[]", "parallel.tp=1", "parallel.pp=2", "training.micro_batch_size=1",
        ),
    ),
    "delta_net_log_linear_bf16": Case(
        1,
        (
            mixer("{kind: delta_net, decay: true}"),
            "model.memory=[{layers: [1, 3], mixer: {kind: log_linear, memory: {kind: dla}, segment: 64, levels: 3}}]",
            "parallel.tp=1", "training.precision=bf16", "training.bptt_chunks=2",
        ),
    ),
    "memora_tp2_zero1_bf16": Case(
        2, (mixer("{kind: memora, inner_chunk: 32}"), "model.memory=[]", "training.precision=bf16")
    ),
    "titans_mal_dp2_zero3_bf16": Case(
        2,
        (
            mixer(
                "{kind: sequential, mixers: [{kind: titans, inner_chunk: 32, max_rate: 0.01}, "
                "{kind: sliding_attention, window: 128}]}"
            ),
            "model.memory=[]", "parallel.tp=1", "training.micro_batch_size=1", "parallel.zero_stage=3",
            "optimizer.lr=3.0e-4", "training.precision=bf16",
        ),
    ),
    "retnet_ssd_linear_mup": Case(
        1,
        (
            mixer("retnet"),
            "model.memory=[{layers: [1], mixer: ssd}, {layers: [2], mixer: linear_attention}]",
            "model.mup.base_width=96", "parallel.tp=1", "parallel.zero_stage=0", "data.documents=pad",
        ),
    ),
}  # fmt: skip


def run(case: Case, data: Path, folder: Path) -> dict[str, list[Any]]:
    """Train one case in `folder`; the figures of its log lines and of its last evaluation."""
    command = [
        sys.executable, "-m", "megamem", "train", str(ROOT / "configs/recipes/books.yaml"),
        "--processes", str(case.processes),
        "name=run", f"runs_folder={folder}", f"data.sources=[{data / 'shards/train'}]",
        f"data.validation=[{data / 'shards/validation'}]", f"data.tokenizer={data / 'tokenizer'}",
        f"training.steps={STEPS}", "logging.every=1", "logging.wandb.mode=disabled", "evaluation.every=10",
        "evaluation.final_max_tokens=16384", "evaluation.sliding_max_tokens=8192", *case.overrides,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    figures: dict[str, list[Any]] = {name: [line[name] for line in lines if name in line] for name in FIGURES}
    result = json.loads((folder / "run/evaluation.json").read_text())
    return {**figures, "held_out": [result[name] for name in HELD_OUT]}


def record(data: Path, only: str) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Run every case whose name holds `only`."""
    for name, case in CASES.items():
        if only in name:
            with tempfile.TemporaryDirectory() as folder:
                yield name, run(case, data, Path(folder))


def machine() -> dict[str, str]:
    """What the numbers depend on besides the code."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"torch": torch.__version__, "processor": models[0].partition(": ")[2] if models else "unknown"}


def differences(old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> list[str]:
    """The figures of one case that are not equal, each with the first place where they part."""
    found = []
    for name, before in old.items():
        after = new[name]
        places = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        if len(before) != len(after):
            found.append(f"{name}: {len(after)} numbers, recorded were {len(before)}")
        elif places:
            i = places[0]
            found.append(f"{name}: {len(places)} of {len(before)} differ, first number {i}: {before[i]} -> {after[i]}")
    return found


def main() -> None:
    """Record or compare, as the arguments say; exit code 1 where a number differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path, default=Path("runs/demo-data"), help="what `megamem corpus prepare` wrote")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    given = parser.parse_args()
    if not (given.data / "tokenizer").is_dir():
        raise SystemExit(f"{given.data}: no prepared text; run `megamem corpus prepare {given.data}` first")
    if given.action == "record":
        given.file.parent.mkdir(parents=True, exist_ok=True)
        runs = json.loads(given.file.read_text(encoding="utf-8"))["runs"] if given.file.exists() else {}
        for name, figures in record(given.data, given.only):
            runs[name] = figures
            given.file.write_text(json.dumps({**machine(), "runs": runs}, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: loss {figures['loss'][0]:.6f} to {figures['loss'][-1]:.6f}")
        return
    known = json.loads(given.file.read_text(encoding="utf-8"))
    for name, value in machine().items():
        if known[name] != value:
            print(f"recorded with {name} {known[name]}, this is {value}: numbers may differ for that reason alone")
    failed = 0
    for name, figures in record(given.data, given.only):
        found = differences(known["runs"][name], figures)
        failed += bool(found)
        print(f"{name}: " + ("; ".join(found) or f"{sum(map(len, figures.values()))} numbers equal"))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
