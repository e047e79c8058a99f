"""Long generation through transformers: resident memory and tokens/s as the text grows.

    python -m benchmarks.generation [--tokens 20000] [--model configs/recipes/books.yaml]

Greedy, one row, random weights (the time does not depend on them), in portions that continue from one cache. A memory
of fixed size should show a flat line in both; the table and the picture say how flat.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import OUTPUT, fix_threads, model_from, publish, table
from megamem.hf import MegamemCache, MegamemConfig, MegamemForCausalLM

PORTION = 500


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(model: MegamemForCausalLM, tokens: int) -> list[dict[str, float]]:
    """A record per portion: tokens read so far, resident MiB, tokens/s, MiB of the memory state."""
    ids = torch.randint(model.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
    cache, records = MegamemCache(), []
    while ids.shape[1] < tokens:
        begun = time.perf_counter()
        with torch.no_grad():
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=PORTION, do_sample=False)
        records.append(
            {
                "tokens": ids.shape[1],
                "resident_mib": resident_bytes() / 2**20,
                "tokens_per_second": PORTION / (time.perf_counter() - begun),
                "state_mib": cache.bytes / 2**20,
            }
        )
    return records


def draw(records: list[dict[str, float]], path: Path) -> None:
    """Both lines over the tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    for axis, (name, label) in zip(
        axes, {"resident_mib": "resident memory, MiB", "tokens_per_second": "tokens/s"}.items(), strict=True
    ):
        axis.plot([r["tokens"] for r in records], [r[name] for r in records])
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("tokens in the text")
    figure.savefig(path, dpi=120)


def flatness(records: list[dict[str, float]]) -> dict[str, Any]:
    """How much the last quarter differs from the first after warm-up (the first tenth is left out)."""
    steady = records[max(len(records) // 10, 1) :]
    quarter = max(len(steady) // 4, 1)

    def mean(part: list[dict[str, float]], name: str) -> float:
        return sum(r[name] for r in part) / len(part)

    return {
        f"{name}_last_over_first": mean(steady[-quarter:], name) / mean(steady[:quarter], name)
        for name in ("resident_mib", "tokens_per_second", "state_mib")
    } | {"resident_most_over_least": max(r["resident_mib"] for r in steady) / min(r["resident_mib"] for r in steady)}


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--model", type=Path, default=Path("configs/recipes/books.yaml"))
    arguments = parser.parse_args()
    threads = fix_threads()
    torch.manual_seed(0)
    config = model_from(arguments.model)
    model = MegamemForCausalLM(MegamemConfig(megamem=config.model_dump(mode="json"))).eval()
    records = measure(model, arguments.tokens)
    shown = records[:: max(len(records) // 10, 1)]
    rows = [
        (f"{r['tokens']:,}", f"{r['resident_mib']:.0f}", f"{r['tokens_per_second']:.0f}", f"{r['state_mib']:.2f}")
        for r in shown
    ]
    print(table(("tokens", "resident MiB", "tokens/s", "state MiB"), rows))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    draw(records, OUTPUT / "generation.png")
    found = {"threads": threads, **flatness(records), "picture": str(OUTPUT / "generation.png"), "portions": records}
    publish(found, OUTPUT / "generation.json")


if __name__ == "__main__":
    main()
