"""Table 12 of "Elastic Memory" (appendix B.1): how well a HiPPO-LegS state reproduces synthetic signals.

    python -m benchmarks.reconstruction [--output runs/benchmarks/reconstruction.json]
    python -m benchmarks.reconstruction --frames      # how far samples of noise differ between the two times instead

Compresses signals of 1,024 samples into one state of order N, reads the state back and reports the mean squared error
beside the paper's figure, with a document's first token at time 1 and at time 0 (`first_token`).

The paper does not state its signals, times or places. All its digits come out with the code of the HiPPO paper, whose
first input enters at time 1 and whose `reconstruct` reads T samples at linspace(0, 1, T) of the history, and with

    k sine waves    f_j = sum_{i=1..k} sin(2 pi i j / T), j = 0 .. T - 1: amplitudes 1, phases 0
    random noise    torch.manual_seed(42); torch.randn(T)

One draw of noise has little to say, so the error's expectation over draws, and a draw's standard deviation, are
computed exactly as well. "Middles" reads each sample half a token after its left edge, where the held value belongs.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.charts import beside
from megamem.memory.continuous.hippo import Sampling
from megamem.memory.continuous.hippo_bank import Discretization, HippoBank, MatrixStore

LENGTH = 1024
SEED = 42
"""Of the noise."""
PAPER: dict[tuple[str, int, Discretization], str] = {
    ("1 sine wave", 32, "zoh"): "1.2e-05",
    ("3 sine waves", 32, "zoh"): "2.3e-04",
    ("5 sine waves", 32, "zoh"): "9.8e-04",
    ("5 sine waves", 32, "forward"): "3.3e-03",
    ("5 sine waves", 32, "backward"): "2.9e-03",
    ("5 sine waves", 32, "bilinear"): "4.8e-04",
    ("random noise", 32, "zoh"): "0.97",
    ("random noise", 128, "zoh"): "0.90",
    ("random noise", 512, "zoh"): "0.72",
}
"""Error as printed, by signal, order and rule."""
Reading = Literal["paper", "middles"]
FIRST_TOKENS: tuple[Literal[0, 1], ...] = (0, 1)
SAMPLINGS: tuple[Sampling, ...] = ("exponential", "uniform")


@dataclass(frozen=True)
class Row:
    """One line of the table: mean squared errors with the first token at time 1, and at time 0."""

    signal: str
    order: int
    rule: Discretization
    paper: str
    at_1: float
    at_0: float
    middles_at_0: float
    expected_at_1: float | None = None
    """Of noise, over draws."""
    expected_at_0: float | None = None
    spread: float | None = None
    """Standard deviation of one draw, with the first token at time 1."""


def signal(name: str) -> Tensor:
    """Return one of the table's signals, [T, 1] float64."""
    if name == "random noise":
        return torch.randn(LENGTH, generator=torch.Generator().manual_seed(SEED)).double()[:, None]
    t = torch.arange(LENGTH, dtype=torch.float64) / LENGTH
    return torch.stack([torch.sin(2 * math.pi * i * t) for i in range(1, int(name[0]) + 1)]).sum(0)[:, None]


def round_trip(order: int, rule: Discretization, first_token: Literal[0, 1], reading: Reading) -> Tensor:
    """Return R K, which maps a signal to what is read back of it: [T, T] float64."""
    points = torch.linspace(0, 1, LENGTH, dtype=torch.float64)
    if reading == "middles":
        points = (first_token + torch.arange(LENGTH) + 0.5) / (first_token + LENGTH)
    bank = HippoBank(
        order, LENGTH, LENGTH, "custom", 0.0, points=tuple(points.tolist()), discretization=rule,
        first_token=first_token, dtype=torch.float64, store=MatrixStore(1 << 30),
    )  # fmt: skip
    cpu = torch.device("cpu")
    return bank.reconstruction((LENGTH,), cpu)[0] @ bank.update_matrices((0,), cpu)[1][0]


def error(trip: Tensor, original: Tensor) -> float:
    """Return the mean squared error of the signal [T, 1] after `round_trip` [T, T]."""
    return (trip @ original - original).square().mean().item()


def noise_error(trip: Tensor) -> tuple[float, float]:
    """Return expectation and standard deviation of the error of unit white noise after `round_trip` [T, T].

    The error of noise w is w^T G w with G = (R K - I)^T (R K - I) / T: expectation tr G, variance 2 tr G^2.
    """
    wrong = trip - torch.eye(LENGTH, dtype=torch.float64)
    gram = wrong.T @ wrong / LENGTH
    return gram.trace().item(), math.sqrt(2 * gram.square().sum().item())


def table() -> list[Row]:
    """Return all rows of Table 12."""
    rows = []
    for (name, order, rule), paper in PAPER.items():
        original = signal(name)
        at_1, at_0 = (round_trip(order, rule, first, "paper") for first in (1, 0))
        errors = [error(trip, original) for trip in (at_1, at_0, round_trip(order, rule, 0, "middles"))]
        noise = None if name != "random noise" else (*noise_error(at_1), noise_error(at_0)[0])
        of_noise = (None, None, None) if noise is None else (noise[0], noise[2], noise[1])
        rows.append(Row(name, order, rule, paper, *errors, *of_noise))
    return rows


def markdown(rows: list[Row]) -> str:
    """Return the table as it stands in docs/mechanisms/elastic_memory.md."""
    lines = [
        "| signal | N | rule | paper | first token at 1 | first token at 0 | first token at 0, read at the middles of "
        "tokens | first token at 1: expectation ± deviation of one draw | first token at 0: expectation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        form = ".3f" if row.expected_at_1 is not None else ".2e"
        found = [f"{x:{form}}" for x in (row.at_1, row.at_0, row.middles_at_0)]
        noise = "" if row.expected_at_1 is None else f"{row.expected_at_1:.3f} ± {row.spread:.3f}"
        late = "" if row.expected_at_0 is None else f"{row.expected_at_0:.3f}"
        cells = (row.signal, row.order, row.rule, row.paper, *found, noise, late)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def frames_apart(order: int, samples: int, sampling: Sampling, tokens: int, block: int = 2048) -> dict[int, float]:
    """Return how far samples differ with the first token at time 1 instead of 0, relative to those at 0.

    A document of white noise in 64 channels is written block by block.

    Returns: norm of the difference over the norm, by how many tokens have been read: a block, half of all and all.
    """
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    banks = [
        HippoBank(order, block, samples, sampling, offset=0.5, first_token=first, store=MatrixStore(1))
        for first in FIRST_TOKENS
    ]
    states, found = [torch.zeros(1, order, 64) for _ in banks], {}
    for start in range(0, tokens, block):
        noise = torch.randn(1, block, 64, generator=generator)
        for i, bank in enumerate(banks):
            kept, new = bank.update_matrices((start,), cpu)
            states[i] = kept @ states[i] + new @ noise
        seen = start + block
        if seen in (block, tokens // 2, tokens):
            at_0, at_1 = (bank.reconstruction((seen,), cpu) @ state for bank, state in zip(banks, states, strict=True))
            found[seen] = ((at_1 - at_0).norm() / at_0.norm()).item()
    return found


def show_frames() -> None:
    """Print what `frames_apart` gives for the paper's smallest memory and longest text."""
    for sampling in SAMPLINGS:
        apart = frames_apart(540, 512, sampling, 32_768)
        print(f"{sampling}:", ", ".join(f"{share:.2f} after {tokens:,} tokens" for tokens, share in apart.items()))


def main() -> None:
    """Print the table of reconstruction errors and write it as JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/reconstruction.json"))
    parser.add_argument("--frames", action="store_true", help="print how far samples of noise differ; write no file")
    options = parser.parse_args()
    if options.frames:
        show_frames()
        return
    rows = table()
    print(markdown(rows))
    named = {f"{row.signal}, N = {row.order}, {row.rule}": row for row in rows}
    series = {key: {name: float(getattr(row, key)) for name, row in named.items()} for key in ("at_1", "at_0", "paper")}
    beside(options.output.with_suffix(".png"), "Signals read back from a state", "mean squared error", series, True)
    record = {"length": LENGTH, "rows": [asdict(row) for row in rows]}
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {options.output}")


if __name__ == "__main__":
    main()
