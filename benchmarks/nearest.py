"""Exact top-k search as Memorizing Transformer does it, beside the indexes of faiss, on the CPU.

    pip install -c constraints.txt -e ".[benchmarks]"      # faiss-cpu
    python -m benchmarks.nearest [--queries 512] [--top-k 32]

A block of queries of 8 heads of 90 asks a queue of keys that changes with every block, so an index is built each time.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import fix_threads, table

HEADS, WIDTH, TURNS = 8, 90, 5


def milliseconds(run: Callable[[], object]) -> float:
    """Mean over some turns, after one that is not counted."""
    run()
    begin = time.perf_counter()
    for _ in range(TURNS):
        run()
    return (time.perf_counter() - begin) / TURNS * 1e3


def searches(query: Tensor, key: Tensor, top_k: int) -> dict[str, Callable[[], object]]:
    """What is compared, for queries [heads, queries, width] and keys [heads, keys, width]."""
    faiss = importlib.import_module("faiss")

    def indexed(make: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for q, k in zip(query.numpy(), key.numpy(), strict=True):
                index = make()
                index.add(k)  # type: ignore[attr-defined]
                index.search(q, top_k)  # type: ignore[attr-defined]

        return run

    return {
        "torch, exact": lambda: (query @ key.mT).topk(top_k, dim=-1),
        "faiss, exact": indexed(lambda: faiss.IndexFlatIP(WIDTH)),
        "faiss, HNSW": indexed(lambda: faiss.IndexHNSWFlat(WIDTH, 16, faiss.METRIC_INNER_PRODUCT)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=32)
    options = parser.parse_args()
    fix_threads()
    rows: dict[int, dict[str, float]] = {}
    for keys in (540, 2160, 8640):
        query, key = torch.randn(HEADS, options.queries, WIDTH), torch.randn(HEADS, keys, WIDTH)
        rows[keys] = {name: milliseconds(run) for name, run in searches(query, key, options.top_k).items()}
    names = list(rows[540])
    print(
        table(["keys", *(f"{n}, ms" for n in names)], [[k, *(f"{r[n]:.1f}" for n in names)] for k, r in rows.items()])
    )


if __name__ == "__main__":
    main()
