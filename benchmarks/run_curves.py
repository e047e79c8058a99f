"""Draw figures of several runs over the tokens they were trained on, a curve per run and a panel per figure.

    python -m benchmarks.run_curves frozen=runs/frozen all=runs/all --figures val_accuracy val_loss --output curves.png

What stands before a folder's `=` is the name of its curve. Figures are those of `metrics.jsonl`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from megamem.evaluation.metrics import read_points


def draw_runs(runs: Mapping[str, Path], figures: Sequence[str], output: Path) -> None:
    """Draw a panel for each figure with a curve for each run that has it.

    Args:
        runs: folders of runs by the names of their curves.
        figures: names in metrics.jsonl, such as `val_loss`.
        output: the PNG to write.
    Raises:
        SystemExit: no run has one of the figures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(4.1 * len(figures), 3.2), layout="constrained")
    FigureCanvasAgg(picture)
    for panel, figure in zip(picture.subplots(1, len(figures), squeeze=False)[0], figures, strict=True):
        curves = {name: read_points(folder / "metrics.jsonl", figure) for name, folder in runs.items()}
        if not any(curves.values()):
            raise SystemExit(f"{figure}: in no metrics.jsonl of {', '.join(map(str, runs.values()))}")
        for name, points in curves.items():
            panel.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
        panel.set_xlabel("tokens")
        panel.set_ylabel(figure)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    output.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(output, dpi=120)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="NAME=FOLDER of each run")
    parser.add_argument("--figures", nargs="+", default=["val_loss"], help="names in metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="the PNG to write")
    options = parser.parse_args()
    named = [run.partition("=") for run in options.runs]
    if wrong := [name for name, equals, _ in named if not equals]:
        parser.error(f"{wrong[0]}: give each run as NAME=FOLDER")
    draw_runs({name: Path(folder) for name, _, folder in named}, options.figures, options.output)


if __name__ == "__main__":
    main()
