"""`megamem demo`: the main job from nothing, on real text, in minutes on two CPU cores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.options import Overrides
from megamem.cli.output import write_line

VOCABULARY = 4096
PROCESSES = 2


def demo(
    folder: Annotated[Path, typer.Option(help="where corpus, tokenizer and shards go")] = Path("runs/demo-data"),
    config: Annotated[Path, typer.Option(help="the run")] = Path("configs/recipes/demo.yaml"),
    overrides: Overrides = None,
) -> None:
    """Make a trained model on real books from nothing: fetch, tokenize, shard, train on two processes, evaluate."""
    from launchers.local_ranks import run_local
    from megamem.cli.corpus import prepare

    prepare(folder, vocab_size=VOCABULARY, workers=PROCESSES)
    shards = folder / "shards"
    run = [
        "train", str(config),
        time.strftime("name=demo-%Y%m%d-%H%M%S"),
        f"data.sources=[{shards / 'train'}]",
        f"data.validation=[{shards / 'validation'}]",
        f"data.tokenizer={folder / 'tokenizer'}",
        *(overrides or []),
    ]  # fmt: skip
    write_line(f"megamem {' '.join(run)}")
    raise typer.Exit(run_local(PROCESSES, run))
