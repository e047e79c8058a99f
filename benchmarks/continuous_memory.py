"""What the infinity-former's signal keeps of the vectors written to it, and what its open choices change.

    python -m benchmarks.continuous_memory

Vectors of white noise, and of a random walk of the same variance, are written chunk by chunk as the mixer writes them.
Then the signal is read where each vector lies. Printed is the mean squared error over the variance, for the newest
chunk and the ones before it; 1 is what reading zeros gives. No learned part takes part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common import table
from megamem.memory.continuous.gaussian_basis import Basis, Padding, Regression, condition_number, operators

CHUNKS, CHANNELS = 5, 64
SHAPES = {
    "GPT-2: 512 functions, 512 tokens": (Basis(512, (0.005, 0.01)), 0.5, 512, 0.5),
    "WikiText-103: 150 functions, 150 tokens": (Basis(150, (0.01, 0.05)), 0.5, 150, 0.5),
    "sorting: 1024 functions, 1024 tokens": (Basis(1024, (0.01, 0.05)), 1.0, 1024, 0.75),
}


def signals(tokens: int) -> dict[str, Tensor]:
    """Return white noise and a random walk, each [tokens, channels] with variance 1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tokens, CHANNELS, dtype=torch.float64, generator=generator)
    walk = noise.cumsum(0)
    return {"noise": noise, "random walk": (walk - walk.mean(0)) / walk.std(0)}


def kept(regression: Regression, vectors: Tensor) -> list[float]:
    """Return the error of each chunk of vectors [tokens, channels], the newest first, after all have been written."""
    matrices = operators(regression, torch.float64, torch.device("cpu"))
    chunks = vectors.split(regression.tokens)
    coefficients = matrices.first @ chunks[0]
    places = [regression.first_places()[0]]
    for chunk in chunks[1:]:
        coefficients = matrices.contract @ coefficients + matrices.new @ chunk
        places = [regression.contraction * old for old in places]
        places.append(regression.later_places()[1])
    errors = [
        float((regression.basis.values(at) @ coefficients - chunk).square().mean() / chunk.var())
        for at, chunk in zip(places, chunks, strict=True)
    ]
    return errors[::-1]


def main() -> None:
    """See the module's documentation."""
    rows = []
    for name, (basis, ridge, tokens, tau) in SHAPES.items():
        for padding in ("zeros", "none"):
            chosen: Padding = "zeros" if padding == "zeros" else "none"
            regression = Regression(basis, ridge, tokens, 512, tau, chosen)
            for kind, vectors in signals(CHUNKS * tokens).items():
                errors = kept(regression, vectors)
                rows.append([name, padding, f"{condition_number(regression):.1e}", kind, *(f"{e:.3f}" for e in errors)])
    ages = ["newest", *(f"{age} before" for age in range(1, CHUNKS))]
    print(table(["shape", "padding", "condition", "vectors", *ages], rows))


if __name__ == "__main__":
    main()
