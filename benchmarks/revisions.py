"""This checkout beside an older revision of it: time and memory of models of one shape, model by model.

    python -m benchmarks.revisions REVISION [--turns N] [--models NAME ...] [--tokens N] [--chunk-size N] [--by-layer]
        [--compile]

The models are those of `benchmarks.caching`, and one of each other family that both revisions have. The older
revision is checked out beside this one for the time being (`git worktree`). For each model both run in
processes of their own, by their own code, and take turns: forward and backward of one sequence in one window, FP32, one
thread. Ratios are of the same turn, in processor time, which other processes do not lengthen. Memory is what a process
has resident at most, above what it had before it built the model. With `--by-layer` this checkout reads its windows
layer by layer (`training.window_order: layers`), with `--compile` it compiles what lies between products
(`training.compile`); the older one does neither.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.caching import SEGMENT, SHAPE, mixers
from benchmarks.common import OUTPUT, ROOT, publish, ratio, summary, table

CHUNK = SHAPE["chunk_size"]
OTHERS: dict[str, dict[str, Any]] = {
    "local attention": {"kind": "local_attention"},
    "transformer-xl": {"kind": "transformer_xl", "memory_length": CHUNK},
    "lamemo": {"kind": "lamemo", "memory_length": CHUNK},
    "compressive": {"kind": "compressive_transformer", "memory_length": CHUNK, "compressed_length": CHUNK},
    "infinity-former": {"kind": "infinity_former", "basis": CHUNK, "samples": CHUNK},
    "memorizing": {"kind": "memorizing_attention"},
    "infini": {"kind": "infini_attention"},
    "melodi": {"kind": "melodi"},
    "elastic memory": {"kind": "elastic_memory"},
    "ssd": {"kind": "ssd"},
}
"""Mixers of the families that `benchmarks.caching` has none of."""
MIXERS = {**mixers(SEGMENT), **OTHERS}
SIDE = """
import json, resource, sys, time
import torch
from benchmarks.caching import run_of
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
torch.set_num_threads(1)
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
model, tokens = parse_config(ModelConfig, json.loads(sys.argv[1]), "model"), int(sys.argv[2])
before = most()
run = run_of(model, tokens, *sys.argv[3:4], *(True for _ in sys.argv[4:]))
run()
for _ in sys.stdin:
    begin = time.process_time()
    run()
    print(time.process_time() - begin, most() - before, flush=True)
"""
"""What each side runs: a turn for each line that it reads, of which it prints processor time and MiB."""


class Side:
    """A process that measures one model with the code of one folder."""

    def __init__(self, folder: Path, model: dict[str, Any], tokens: int, *way: str) -> None:
        """Start it; it warms up by itself. tokens: of a sequence; way: the window's order, and a word to compile."""
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SIDE, json.dumps(model), str(tokens), *way],
            cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def turn(self) -> tuple[float, float]:
        """Run a turn; return its seconds of processor time, and the most MiB so far. Raises RuntimeError if it ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        words = self._process.stdout.readline().split()
        if len(words) != 2:
            raise RuntimeError(f"a side ended with {self._process.wait()} instead of a turn")
        return float(words[0]), float(words[1])


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Check a revision out for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="megamem-revision-") as parent:
        folder = Path(parent) / "old"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, revision], cwd=ROOT, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def compare(
    old: Path, mixer: str, tokens: int, chunk_size: int, turns: int, by_layer: bool = False, compiled: bool = False
) -> dict[str, Any]:
    """Return the time of the old code over the new one's, and what both take."""
    model = {**SHAPE, "chunk_size": chunk_size, "mixer": MIXERS[mixer]}
    way = ["layers" if by_layer else "chunks", *(["compiled"] if compiled else [])]
    with ExitStack() as stack:
        made = {"old": Side(old, model, tokens), "new": Side(ROOT, model, tokens, *way)}
        sides = {name: stack.enter_context(side) for name, side in made.items()}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(turns):
            # A B, B A, ...: neither is always the first
            for name in list(sides) if turn % 2 == 0 else reversed(sides):
                found[name].append(sides[name].turn())
    seconds = {name: [each[0] for each in seen] for name, seen in found.items()}
    return {
        "times_faster": ratio(seconds["old"], seconds["new"]),
        "tokens_per_second": {name: summary([tokens / each for each in every]) for name, every in seconds.items()},
        "mib": {name: max(each[1] for each in seen) for name, seen in found.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="of git")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MIXERS, default=list(MIXERS), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--by-layer", action="store_true", help="this checkout reads windows layer by layer")
    parser.add_argument("--compile", action="store_true", help="this checkout compiles what lies between products")
    parser.add_argument("--output", type=Path, default=OUTPUT / "revisions.json")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, Any]] = {}
    with checked_out(options.revision) as old:
        for name in options.models:
            sizes = (options.tokens, options.chunk_size, options.turns)
            found[name] = compare(old, name, *sizes, options.by_layer, options.compile)
            print(f"{name}: {found[name]['times_faster']['median']:.2f} times as fast", flush=True)
    rows = []
    for name, each in found.items():
        speed, rates, mib = each["times_faster"], each["tokens_per_second"], each["mib"]
        times = f"{speed['median']:.2f} ({speed['low']:.2f}-{speed['high']:.2f})"
        speeds = (f"{rates[side]['median']:,.0f}" for side in ("old", "new"))
        rows.append([name, *speeds, times, *(f"{mib[side]:,.0f}" for side in ("old", "new"))])
    heads = ["model", "tokens/s, old", "new", "times as fast (quartiles)", "MiB at most, old", "new"]
    print(f"\n{options.tokens:,} tokens in chunks of {options.chunk_size:,}, {options.turns} turns")
    ways = [*(["windows layer by layer"] if options.by_layer else []), *(["compiled"] if options.compile else [])]
    print(f"old: {options.revision}, new: {', '.join(['this checkout', *ways])}\n")
    print(table(heads, rows))
    how = {
        "tokens": options.tokens,
        "chunk_size": options.chunk_size,
        "by_layer": options.by_layer,
        "compiled": options.compile,
    }
    publish({"revision": options.revision, **how, "models": found}, options.output)


if __name__ == "__main__":
    main()
