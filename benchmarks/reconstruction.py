"""Table 12 of "Elastic Memory" (appendix B.1): how well a HiPPO-LegS state reproduces synthetic signals.

    python -m benchmarks.reconstruction [--seeds 256] [--output runs/benchmarks/reconstruction.json]

Compresses signals of 1,024 samples into one state of order N, reads the state back at every sample and
reports the mean squared error, over seeds, beside the paper's figure. "edge" reads each sample at the left
edge of its interval, as the paper does; "middle" reads half a sample later, where the held value belongs.

The paper does not state its signals. Here k sine waves are the harmonics 1 .. k of the window, each with
amplitude 1 and a random phase: f(t) = sum_i sin(2 pi i t + phi_i), t in [0, 1). Their errors grow with the
square of the amplitudes and (at the edge) of the frequencies, so only orders of magnitude compare. Noise is
normal with unit variance, where nothing is left to choose; its expected error is also computed exactly.

The three Euler-type rules are for study only. A rule freezes A/t and B/t over a step, at its start (t = k, as
in the paper's appendix E.2; the first step, with t = 0, stores the first value) or at its end (t = k + 1).
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.charts import beside
from megamem.memory.continuous.hippo import kernel, reconstruction
from megamem.memory.continuous.hippo_rules import Rule, backward, bilinear, forward, legs

LENGTH = 1024


@dataclass(frozen=True)
class Row:
    """One line of the table; errors are means over the seeds, `spread` the standard deviation of one seed."""

    signal: str
    order: int
    rule: str
    paper: float
    edge: float
    middle: float
    spread: float
    expected_edge: float | None = None


def sines(count: int, seeds: int, generator: torch.Generator) -> Tensor:
    """[T, seeds] sums of the first `count` harmonics with random phases."""
    t = torch.arange(LENGTH, dtype=torch.float64)[:, None, None] / LENGTH
    frequencies = torch.arange(1, count + 1, dtype=torch.float64)
    phases = 2 * math.pi * torch.rand(seeds, count, generator=generator, dtype=torch.float64)
    return torch.sin(2 * math.pi * frequencies * t + phases).sum(-1)


def noise(seeds: int, generator: torch.Generator) -> Tensor:
    """[T, seeds] of unit-variance normal noise."""
    return torch.randn(LENGTH, seeds, generator=generator, dtype=torch.float64)


def run_rule(rule: Rule, order: int, signal: Tensor, time_shift: int) -> Tensor:
    """State [N, seeds] after the token-by-token recurrence with A/t and B/t frozen at t = k + time_shift."""
    A, B = legs(order)
    state = torch.zeros(order, signal.shape[1], dtype=signal.dtype)
    for k, value in enumerate(signal):
        t = k + time_shift
        if t == 0:
            state[0] = value
        else:
            state = rule(A / t, state, B / t * value)
    return state


def errors(order: int, state: Tensor, signal: Tensor, offset: float) -> Tensor:
    """Mean squared error of each seed: [seeds]."""
    points = torch.arange(LENGTH, dtype=torch.float64) + offset
    return (reconstruction(order, LENGTH, points) @ state - signal).square().mean(0)


def expected_noise_error(order: int) -> float:
    """E of the error of unit white noise read at the left edge: ||R K - I||_F^2 / T, no sampling involved."""
    points = torch.arange(LENGTH, dtype=torch.float64)
    read = reconstruction(order, LENGTH, points) @ kernel(order, 0, LENGTH)
    return (read - torch.eye(LENGTH, dtype=torch.float64)).square().sum().item() / LENGTH


def measure(name: str, order: int, rule: str, paper: float, signal: Tensor, state: Tensor, white: bool = False) -> Row:
    edge, middle = errors(order, state, signal, 0.0), errors(order, state, signal, 0.5)
    expected = expected_noise_error(order) if white else None
    return Row(name, order, rule, paper, edge.mean().item(), middle.mean().item(), edge.std().item(), expected)


def table(seeds: int, seed: int = 0) -> list[Row]:
    """All rows of Table 12, then the Euler-type rules with t = k + 1."""
    generator = torch.Generator().manual_seed(seed)
    hold = kernel(32, 0, LENGTH)
    rows = []
    for count, paper in ((1, 1.2e-5), (3, 2.3e-4), (5, 9.8e-4)):
        signal = sines(count, seeds, generator)
        rows.append(measure(f"{count} sine wave{'s' * (count > 1)}", 32, "ZOH", paper, signal, hold @ signal))
    for shift in (0, 1):
        for rule, paper in ((forward, 3.3e-3), (backward, 2.9e-3), (bilinear, 4.8e-4)):
            label = f"{rule.__name__}, t = {'k + 1' if shift else 'k'}"
            rows.append(measure("5 sine waves", 32, label, paper, signal, run_rule(rule, 32, signal, shift)))
    for order, paper in ((32, 0.97), (128, 0.90), (512, 0.72)):
        signal = noise(seeds, generator)
        state = kernel(order, 0, LENGTH) @ signal
        rows.append(measure("random noise", order, "ZOH", paper, signal, state, white=True))
    return rows


def markdown(rows: list[Row]) -> str:
    """The table as printed in docs/mechanisms/elastic_memory.md."""
    lines = [
        "| signal | N | rule | paper | edge (± one seed) | middle | expected, edge |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        expected = "" if row.expected_edge is None else f"{row.expected_edge:.3f}"
        form = ".3f" if row.signal == "random noise" else ".1e"
        edge, middle = f"{row.edge:{form}} ± {row.spread:{form}}", f"{row.middle:{form}}"
        paper = f"{row.paper:.2f}" if form == ".3f" else f"{row.paper:.1e}"
        lines.append(f"| {row.signal} | {row.order} | {row.rule} | {paper} | {edge} | {middle} | {expected} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table of reconstruction errors and write it as JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=256, help="signals per row")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/reconstruction.json"))
    options = parser.parse_args()
    rows = table(options.seeds)
    print(markdown(rows))
    record = {"length": LENGTH, "seeds": options.seeds, "rows": [asdict(row) for row in rows]}
    named = {f"{row.signal}, N = {row.order}, {row.rule}": row for row in rows}
    series = {key: {name: getattr(row, key) for name, row in named.items()} for key in ("edge", "middle", "paper")}
    beside(options.output.with_suffix(".png"), "Signals read back from a state", "mean squared error", series, True)
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
