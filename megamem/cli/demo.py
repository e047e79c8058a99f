"""`megamem demo`: the main job from nothing, on real text, in minutes on two CPU cores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.options import Overrides
from megamem.cli.output import write_line
from megamem.errors import ConfigError

VOCABULARY = 4096
PROCESSES = 2
WITHOUT = ("model.mixer=local_attention", "model.memory=[]")
"""What makes a model without a memory of the demo's."""


def demo(
    folder: Annotated[Path, typer.Option(help="where corpus, tokenizer and shards go")] = Path("runs/demo-data"),
    config: Annotated[Path, typer.Option(help="the run")] = Path("configs/recipes/demo.yaml"),
    overrides: Overrides = None,
) -> None:
    """Train a model with a memory and one without on real books, from nothing, and compare them.

    Fetches the books, trains a tokenizer, writes shards, trains and evaluates both models on two processes. Ends with
    what the memory gives: against the model without one, and token by token.
    """
    from megamem.cli.compare import compare
    from megamem.cli.corpus import prepare
    from megamem.cli.remembered import remembered

    given = overrides or []
    if own := [override for override in given if override.partition("=")[0].strip() == "name"]:
        raise ConfigError(f"{own[0]}: the demo's two runs have names of their own; runs_folder=FOLDER sets their place")
    name = time.strftime("demo-%d-%H%M%S")  # no wider than the table has room for
    prepare(folder, vocab_size=VOCABULARY, workers=PROCESSES)
    without = _train(config, folder, [f"name={name}-without", *given, *WITHOUT])
    memory = _train(config, folder, [f"name={name}-memory", *given])
    compare(without, [memory], out=memory.with_name(f"{name}-comparison"))
    remembered(memory, out=memory.with_name(f"{name}-remembered"))


def _train(config: Path, folder: Path, overrides: list[str]) -> Path:
    """Train and evaluate a model on the prepared data and return its run's folder; exit where that fails."""
    from launchers.local_ranks import run_local
    from megamem.config.load import load_config
    from megamem.config.run import RunConfig

    shards = folder / "shards"
    settings = [
        f"data.sources=[{shards / 'train'}]",
        f"data.validation=[{shards / 'validation'}]",
        f"data.tokenizer={folder / 'tokenizer'}",
        *overrides,
    ]
    run = load_config(RunConfig, config, settings)
    write_line(f"megamem train {config} {' '.join(settings)}")
    if code := run_local(PROCESSES, ["train", str(config), *settings]):
        raise typer.Exit(code)
    return run.run_folder
