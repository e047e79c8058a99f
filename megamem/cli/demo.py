"""`megamem demo`: the main job from nothing, on real text, in minutes on two CPU cores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from launchers.local_ranks import run_local
from megamem.cli import data as cli_data

VOCABULARY = 4096
PROCESSES = 2


def run_demo(folder: Path, config: Path, overrides: Sequence[str], console: Console) -> int:
    """Data, then the run under a fresh name on two processes; returns the job's exit code."""
    cli_data.prepare(folder, vocab_size=VOCABULARY, workers=PROCESSES)
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
