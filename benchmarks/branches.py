"""Branches of one stable run beside separate runs of the same lengths: the same losses, and the steps saved.

    megamem corpus prepare runs/demo-data      # once
    python -m benchmarks.branches     # --steps 50 100 200 400

A small model with Elastic Memory on real text, one process. The longest run is the stable one: it decays at its own
end, and a branch leaves it for every shorter length. Each branch is compared with a WSD run of that length from the
first step on: same seed, same order of data, so final held-out loss and last training loss must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT

DECAY_RATIO = 0.2
WARMUP_STEPS = 10
SHAPE = (
    "model.layers=2", "model.hidden_size=64", "model.heads=4", "model.chunk_size=128",
    "model.memory=[{layers: [1], mixer: {kind: elastic_memory, order: 16, samples: 16}}]", "parallel.tp=1",
    "data.sequence_length=512", "training.batch_tokens=2048", "training.micro_batch_size=4",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """The figures of a run that has ended."""

    training: float
    """Loss of the last log line."""
    held_out: float
    """Loss of the evaluation at the end."""
    computed: int
    """Steps that were computed in this run's folder."""


def branch_point(steps: int) -> int:
    """Return the step after which a run of `steps` decays."""
    return steps - round(DECAY_RATIO * steps)


def command(*words: str) -> None:
    """Run megamem. Raises SystemExit with its output if it fails."""
    done = subprocess.run([sys.executable, "-m", "megamem", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"megamem {' '.join(words)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")


def ended(folder: Path) -> Ended:
    """Read the figures of a finished run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    held_out = json.loads((folder / "evaluation.json").read_text())["val_loss"]
    return Ended(steps[-1]["loss"], held_out, len(steps))


def measure(lengths: list[int], data: Path, folder: Path, overrides: list[str]) -> list[tuple[int, Ended, Ended]]:
    """Train all runs; return length, the branch (or the stable run itself) and the separate run, by length."""
    longest, shorter = max(lengths), sorted(lengths)[:-1]
    common = [
        str(ROOT / "configs/recipes/books.yaml"), f"runs_folder={folder}", f"data.sources=[{data / 'shards/train'}]",
        f"data.validation=[{data / 'shards/validation'}]", f"data.tokenizer={data / 'tokenizer'}", *SHAPE,
        "optimizer.schedule=wsd", f"optimizer.decay_ratio={DECAY_RATIO}", f"optimizer.warmup_steps={WARMUP_STEPS}",
        "logging.every=1", "logging.wandb.mode=disabled", "evaluation.every=0", "evaluation.final_max_tokens=16384",
        "evaluation.sliding_max_tokens=2048", *overrides,
    ]  # fmt: skip
    points = [branch_point(steps) for steps in shorter]
    command("train", *common, "name=stable", f"training.steps={longest}", f"checkpoint.keep_steps={points}")
    found = []
    for steps, point in zip(shorter, points, strict=True):
        command("branch", str(folder / "stable"), "--at", str(point), "--steps", str(steps), "--name", f"to-{steps}")
        command("train", str(folder / f"to-{steps}" / "config.yaml"))
        command("train", *common, f"name=separate-{steps}", f"training.steps={steps}")
        found.append((steps, ended(folder / f"to-{steps}"), ended(folder / f"separate-{steps}")))
    stable = ended(folder / "stable")
    return [*found, (longest, stable, stable)]


def main(arguments: list[str] | None = None) -> None:
    """Measure and print a table; exit code 1 where a branch is not the separate run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 200, 400], help="lengths of the runs")
    parser.add_argument("--data", type=Path, default=Path("runs/demo-data"), help="what `megamem corpus prepare` wrote")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all runs; after --")
    given = parser.parse_args(arguments)
    if not (given.data / "tokenizer").is_dir():
        raise SystemExit(f"{given.data}: no prepared text; run `megamem corpus prepare {given.data}` first")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given.steps, given.data.resolve(), Path(folder), given.overrides)
    print("| steps | held-out loss, branch | separate run | steps computed, branch | separate run |")
    print("|---|---|---|---|---|")
    for steps, branch, separate in rows:
        print(f"| {steps} | {branch.held_out!r} | {separate.held_out!r} | {branch.computed} | {separate.computed} |")
    computed, separately = (sum(row[i].computed for row in rows) for i in (1, 2))  # type: ignore[union-attr]
    print(f"steps computed: {computed} instead of {separately}, {1 - computed / separately:.0%} saved")
    unequal = [row[0] for row in rows if (row[1].training, row[1].held_out) != (row[2].training, row[2].held_out)]
    if unequal:
        raise SystemExit(f"not equal bit for bit: runs of {unequal} steps")
    print("training and held-out losses are equal bit for bit")


if __name__ == "__main__":
    main()
