"""Figure 7 of "LaMemo" (appendix): why positions that are signed distances can make scores ahead and behind differ.

    python -m benchmarks.signed_distances [--width 64] [--output runs/benchmarks/signed_distances.json]

Transformer-XL scores a distance x by the product of a query, or of what is learned in its place, with sines and cosines
of x w_k, where w_k = 10000^(-2k/d) for k = 1 .. d/2. If all numbers of the other factor have variance s and each two of
them the covariance c, the paper has for the score's variance

    d/2 s + 2 c g(x),    g(x) = sum_k sum_(l != k) sin(w_k x) cos(w_l x)

which leaves out pairs of two sines or two cosines (the same ahead and behind) and of one frequency (few). g is odd and
rises by (d/2 - 1) sum_k w_k a token at 0, of the order of d^2: what c adds to the variance of scores behind, it takes
from those ahead. LaMemo looks ahead, so it learns vectors of its own for that side (`positions: disentangled`). Prints
g near 0 and draws it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import OUTPUT, publish, table

SHOWN = 100
"""Tokens in each direction that the picture shows."""


def frequencies(width: int) -> Tensor:
    """Return w_k of Transformer-XL's positions [d/2], in float64; width: d."""
    return 10000.0 ** (-2 * torch.arange(1, width // 2 + 1, dtype=torch.float64) / width)


def odd_part(distances: Tensor, width: int) -> Tensor:
    """Return g of distances [N]; width: d."""
    angles = distances.double()[:, None] * frequencies(width)
    sines, cosines = angles.sin(), angles.cos()
    # over all pairs, less those of a frequency with itself
    return sines.sum(1) * cosines.sum(1) - (sines * cosines).sum(1)


def slope(width: int) -> float:
    """Return the derivative of g at 0; width: d."""
    return float((width / 2 - 1) * frequencies(width).sum())


def picture(path: Path, width: int) -> None:
    """Draw g for distances ahead, which are negative, and behind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    distances = torch.linspace(-SHOWN, SHOWN, 20 * SHOWN + 1)
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.plot(distances.tolist(), odd_part(distances, width).tolist())
    axis.axhline(0, color="gray", linewidth=0.8)
    axis.axvline(0, color="gray", linewidth=0.8)
    axis.set_xlabel("distance in tokens: negative ahead, positive behind")
    axis.set_ylabel("g")
    axis.set_title(f"What a score's variance has by the sign of the distance, d = {width}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="d, numbers of a position's vector")
    parser.add_argument("--output", type=Path, default=OUTPUT / "signed_distances.json")
    options = parser.parse_args(arguments)
    shown = [1, 2, 4, 8, 16, 64]
    behind, ahead = (odd_part(sign * torch.tensor(shown), options.width).tolist() for sign in (1, -1))
    print(table(["tokens", "g behind", "g ahead"], [
        [distance, f"{one:.1f}", f"{other:.1f}"] for distance, one, other in zip(shown, behind, ahead, strict=True)
    ]))  # fmt: skip
    print(f"\nslope at 0: {slope(options.width):.1f}; half the width, the factor of s: {options.width // 2}")
    drawn = options.output.with_suffix(".png")
    picture(drawn, options.width)
    record = {"width": options.width, "slope": slope(options.width), "g": dict(zip(shown, behind, strict=True))}
    publish({**record, "picture": str(drawn)}, options.output)


if __name__ == "__main__":
    main()
