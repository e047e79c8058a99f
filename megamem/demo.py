"""`megamem demo`: the main job from nothing, on real text, in minutes on two CPU cores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from launchers.local import run_local
from megamem import cli_data
from tokenization.tokenizer import Tokenizer

VOCABULARY = 4096
PROCESSES = 2


def prepare_data(folder: Path) -> None:
    """Fetch the default corpus, train a byte-level BPE on its training part, write shards of each part.

    What is there already is checked and kept.
    """
    corpus, tokenizer = folder / "corpus", folder / "tokenizer"
    cli_data.fetch(corpus)
    if tokenizer.exists():
        Tokenizer.load(tokenizer)
    else:
        cli_data.train_tokenizer([corpus / "train"], tokenizer, VOCABULARY)
    for split in ("train", "validation", "test"):
        cli_data.write([corpus / split], tokenizer, folder / "shards" / split, workers=PROCESSES, shard_mib=None)


def run_demo(folder: Path, config: Path, overrides: Sequence[str], console: Console) -> int:
    """Data, then the run under a fresh name on two processes; returns the job's exit code."""
    prepare_data(folder)
    shards = folder / "shards"
    run = [
        "train", str(config),
        time.strftime("name=demo-%Y%m%d-%H%M%S"),
        f"data.sources=[{shards / 'train'}]",
        f"data.validation=[{shards / 'validation'}]",
        f"data.tokenizer={folder / 'tokenizer'}",
        *overrides,
    ]  # fmt: skip
    console.print(f"megamem {' '.join(run)}", highlight=False)
    return run_local(PROCESSES, run)
