"""What embeddings retain of a text: untrained models, models of language, autoencoders; masked mixers, attention.

    megamem corpus prepare runs/books-512 --vocab-size 512
    python -m benchmarks.information                       # --seeds 0 1 2 --parallel 2

Table 1 of Badger, "Language Model Memory and Memory Models for Language", at a size that two CPU cores train in an hour
(configs/studies/memory_models/information_small.yaml). Each encoder is frozen and gets a decoder of its own size
(`megamem probe information`); an autoencoder as trained, with the decoder it was trained with, is the row `validation`.
What has ended is kept: the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT
from megamem.config.load import read_yaml
from megamem.evaluation.information import entropy_ratio

RECIPE = ROOT / "configs/studies/memory_models/information_small.yaml"
MIXERS = {"masked_mixer": "masked mixer", "local_attention": "transformer"}
OWN = {
    "masked_mixer": ("model.hidden_size=256", "optimizer.lr=3e-3"),
    "local_attention": ("model.hidden_size=128", "optimizer.lr=2e-3"),
}
"""Width and peak learning rate: mixers are twice as wide as transformers, as the paper's are."""
ROWS = {
    "validation": "autoencoder, as trained",
    "autoencoder": "autoencoder, frozen, new decoder",
    "causal": "causal, frozen, new decoder",
    "untrained": "untrained, frozen, new decoder",
}
AUTOENCODER = (
    "model.architecture={kind: autoencoder, encoder: {layers: 2}}", "model.layers=4", "training.objective=autoencode",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What one decoder could tell."""

    loss: float
    entropy_ratio: float
    accuracy: float


def command(*words: str) -> None:
    """Run megamem on one core. Raises SystemExit with its output if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "megamem", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"megamem {' '.join(words)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")


def measure(folder: Path, mixer: str, seed: int, overrides: Sequence[str]) -> dict[str, Found]:
    """Train the models of one seed and the decoders behind them; return the figures by row."""
    own = [
        *overrides,
        f"runs_folder={folder}",
        *OWN[mixer],
        f"training.seed={seed}",
        f"data.seed={seed}",
    ]
    runs = {kind: folder / f"{kind}-{mixer}-{seed}" for kind in ("autoencoder", "causal")}
    for kind, run in runs.items():
        more = AUTOENCODER if kind == "autoencoder" else ()
        command("train", str(RECIPE), "--processes", "1", f"name={run.name}", f"model.mixer={mixer}", *more, *own)
    found = {"validation": of_run(runs["autoencoder"])}
    for row, run in {**runs, "untrained": runs["causal"]}.items():
        more = ["--untrained"] if row == "untrained" else []
        out = folder / f"probe-{row}-{mixer}-{seed}"
        command("probe", "information", str(run), "--out", str(out), "--processes", "1", *more)
        found[row] = of_run(out)
    return found


def of_run(run: Path) -> Found:
    """Return the figures of an autoencoder's run."""
    result = json.loads((run / "result.json").read_text())
    size = int(read_yaml(run / "config.yaml")["model"]["vocab_size"])
    return Found(result["val_loss"], entropy_ratio(result["val_loss"], size), result["val_accuracy"])


def spread(values: Sequence[float], form: str) -> str:
    """Return mean and standard deviation over seeds."""
    mean = format(statistics.fmean(values), form)
    return f"{mean} ± {format(statistics.stdev(values), form)}" if len(values) > 1 else mean


def main() -> None:
    """Measure, print the table as Markdown and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/information"))
    parser.add_argument("overrides", nargs="*", help="section.key=value of the models' runs")
    options = parser.parse_args()
    folder = options.out.resolve()
    cells = [(mixer, seed) for seed in options.seeds for mixer in MIXERS]
    with ThreadPoolExecutor(options.parallel) as pool:
        results = list(pool.map(lambda cell: measure(folder, *cell, options.overrides), cells))
    by_cell = dict(zip(cells, results, strict=True))
    print("| encoder | mixer | loss | entropy ratio | accuracy |\n|---|---|---|---|---|")
    for row, name in ROWS.items():
        for mixer, called in MIXERS.items():
            found = [by_cell[mixer, seed][row] for seed in options.seeds]
            columns = (
                spread([one.loss for one in found], ".3f"), spread([one.entropy_ratio for one in found], ".3f"),
                spread([one.accuracy for one in found], ".1%"),
            )  # fmt: skip
            print(f"| {name} | {called} | {' | '.join(columns)} |")
    figures = {
        f"{mixer}-{seed}": {row: vars(one) for row, one in found.items()} for (mixer, seed), found in by_cell.items()
    }
    (folder / "information.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
