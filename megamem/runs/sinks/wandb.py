"""The sink for Weights & Biases (`logging.wandb`)."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from megamem.config.load import config_hash
from megamem.config.run import RunConfig
from megamem.runs.result import RunResult
from megamem.runs.sinks.base import LogRecord, Sink

FOLDERS = {"WANDB_DATA_DIR": "data", "WANDB_CACHE_DIR": "cache"}
"""Variables that name folders of W&B's outside the run's, and what takes their place in it."""


class Wandb(Sink):
    """A Weights & Biases run; offline runs lie in the run folder until `megamem wandb sync`.

    So does all else that W&B writes, tables that wait for their upload among it, unless variables of W&B's say where:
    by itself it writes to the home folder, which compute nodes need not be able to write.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Start the W&B run, or continue the one that an earlier part of this run has started in `folder`."""
        import wandb

        identity = folder / "wandb-run-id"
        if not identity.exists():
            identity.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        own = {name: str(folder / "wandb" / place) for name, place in FOLDERS.items()}
        self._variables = {name: path for name, path in own.items() if name not in os.environ}
        os.environ |= self._variables
        self._run: Any = wandb.init(
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            project=config.logging.wandb.project,
            group=config.logging.wandb.group,
            tags=list(config.logging.wandb.tags) or None,
            name=config.full_name,
            mode=config.logging.wandb.mode,
            dir=str(folder),
            config={**config.model_dump(mode="json"), "config_hash": config_hash(config)},
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, record: LogRecord) -> None:
        """See `Sink.write`."""
        figures = {name: value for name, value in record.items() if name != "step" and value is not None}
        self._run.log(figures, step=record["step"])

    def finish(self, result: RunResult) -> None:
        """See `Sink.finish`. The figures become summary and table; their picture goes beside them."""
        import wandb

        figures = result.to_dict()
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self._run.summary.update(numbers)
        table = wandb.Table(columns=["figure", "value"], data=[[name, float(value)] for name, value in numbers.items()])
        entry: dict[str, object] = {"figures": table}
        if figures.get("picture"):
            entry["evaluation"] = wandb.Image(str(figures["picture"]))
        self._run.log(entry)

    def close(self) -> None:
        """See `Sink.close`."""
        self._run.finish()
        for name in self._variables:
            os.environ.pop(name, None)
