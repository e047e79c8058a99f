"""Writes every figure: python -m docs.figures."""

from pathlib import Path

from docs.figures import FIGURES

for name, draw in FIGURES.items():
    (Path("docs/pictures") / f"{name}.svg").write_text(draw(), encoding="utf-8")
