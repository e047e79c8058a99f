"""What the fullest rank holds, for the 760M and 1.3B models in every layout of TP 1-8 and PP 1-4.

    python -m benchmarks.layouts > docs/layouts.md

Built on the meta device, rank by rank; `megamem plan CONFIG --layouts` gives the parts of one configuration.
"""

from __future__ import annotations

from benchmarks.common import ROOT, table
from megamem.config.recipe import load_run
from megamem.planning.ranks import layouts

SIZES = ("760m", "1.3b")
HEAD = """# Bytes per rank

GiB that the fullest rank of a layout holds between steps (BF16 weights, FP32 sums of gradients, FP32 master weights and
moments, for one data-parallel rank: ZeRO 1 divides the last two among more), and with them the memory states of one
sequence of {tokens:,} tokens read to its end. Activations and communication buffers come on top. Counted from what each
rank builds on the meta device. Parts of one configuration: `megamem plan CONFIG --layouts`.

This page: `python -m benchmarks.layouts > docs/layouts.md`.
"""


def main() -> None:
    """Print the page."""
    models = [(path, size) for size in SIZES for path in (ROOT / "configs" / "models").glob(f"*/*-{size}.yaml")]
    columns: list[str] = []
    rows: list[list[str]] = []
    for path, size in sorted(models, key=lambda item: item[0].stem):
        recipe = ROOT / "configs" / "recipes" / f"memory_caching_{size}.yaml"
        config = load_run(recipe, ["training.micro_batch_size=1"], path)
        found = layouts(config)
        if not columns:
            print(HEAD.format(tokens=config.data.sequence_length))
            columns = ["model", "parameters", *(f"TP {tp} PP {pp}" for tp, pp in found)]
        whole = found[1, 1]
        sizes = ["-" if isinstance(rank, str) else f"{rank.total / 2**30:.2f}" for rank in found.values()]
        count = "-" if isinstance(whole, str) else f"{whole.parameters:,}"
        rows.append([path.stem, count, *sizes])
    print(table(columns, rows))


if __name__ == "__main__":
    main()
