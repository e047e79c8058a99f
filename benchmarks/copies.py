"""Copy and next-token accuracy of the memory models that configs/curricula/copies_small.yaml trains.

    megamem corpus prepare runs/books-512 --vocab-size 512
    megamem train configs/curricula/copies_small.yaml
    python -m benchmarks.copies runs/copies

After Table 3 and Figure 4 of Badger, "Language Model Memory and Memory Models for Language". Every model is read three
times: as text, as copies, and as copies of which all that is read is a blank. Figures are of held-out text; the entropy
ratio is 1 - loss / ln(vocabulary).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import ROOT
from megamem.evaluation.information import entropy_ratio

VOCABULARY, DELIMITER = 513, 512
READINGS = {
    "next tokens": "next_token",
    "copies": f"{{kind: copy, delimiter: {{token: {DELIMITER}}}}}",
    "blank copies": f"{{kind: blank_copy, delimiter: {{token: {DELIMITER}}}}}",
}


class Cell(NamedTuple):
    """What a model makes of one reading."""

    entropy_ratio: float
    accuracy: float


def lessons(curriculum: Path) -> list[Path]:
    """Return the run folders of a curriculum's memory models that have ended, in order."""
    ended = (folder.parent for folder in curriculum.glob("*/result.json"))
    return sorted(
        (run for run in ended if not run.name.endswith("-autoencode")), key=lambda run: int(run.name.split("-")[0])
    )


def measure(run: Path, objective: str) -> Cell:
    """Evaluate a run under an objective, in one process. Raises SystemExit with its output if that fails."""
    words = ["evaluate", str(run), f"training.objective={objective}", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "megamem", *words], cwd=ROOT, env={**os.environ}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"megamem {' '.join(words)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return Cell(entropy_ratio(figures["val_loss"], VOCABULARY), figures["val_accuracy"])


def main() -> None:
    """Measure, print the table as Markdown and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curriculum", type=Path, help="folder of the curriculum's runs")
    options = parser.parse_args()
    curriculum = options.curriculum.resolve()
    print(f"| trained on | {' | '.join(READINGS)} |\n|---|{'---|' * len(READINGS)}")
    found: dict[str, dict[str, Cell]] = {}
    for run in lessons(curriculum):
        name = run.name.partition("-")[2]
        found[name] = {reading: measure(run, objective) for reading, objective in READINGS.items()}
        cells = (f"{cell.accuracy:.1%} ({cell.entropy_ratio:.3f})" for cell in found[name].values())
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    rows = {name: {reading: cell._asdict() for reading, cell in cells.items()} for name, cells in found.items()}
    (curriculum / "copies.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
