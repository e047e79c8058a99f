"""Held-out losses beyond the first chunk less those of another model, paired by document, with standard errors.

    python -m benchmarks.paired_losses LOCAL RUN ...

Folders of evaluated runs, on the same text; nats per token. Beside the difference: how many documents gain, and what
each model loses when every chunk is read as if its document began there. Standard errors are over documents.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import table
from megamem.evaluation.reading import Float64
from megamem.evaluation.recovered import ModelLosses, check_same, read_losses
from megamem.evaluation.suites.result import ratio_and_error


def row(local: ModelLosses, model: ModelLosses) -> list[str]:
    """Return a line of the table. Raises ConfigError for a model that was evaluated on other text or chunks."""
    check_same(local, model)
    # [D]: sums over the chunks behind the first
    nats, without, others, tokens = (
        values[:, 1:].sum(1) for values in (model.nats, model.memory_off_nats, local.nats, model.tokens)
    )
    loss = nats.sum() / tokens.sum()
    gains = f"{(nats < others).sum()} of {len(nats)}"
    return [
        model.title, f"{loss:.3f}", _with_error(nats - others, tokens), gains, _with_error(without - nats, tokens)
    ]  # fmt: skip


def _with_error(nats: Float64, tokens: Float64) -> str:
    """Write a difference per token of documents [D] with its standard error."""
    value, error = ratio_and_error(nats.tolist(), tokens.tolist())
    return f"{value:+.3f} ± {error:.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("local", type=Path, metavar="LOCAL", help="the run that others are compared with")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    options = parser.parse_args()
    local = read_losses(options.local)
    head = ["model", "loss", f"less that of {local.title}", "documents that gain", "what the memory gives"]
    print(table(head, [row(local, read_losses(run)) for run in options.runs]))


if __name__ == "__main__":
    main()
