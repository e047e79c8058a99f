"""The sink for Weights & Biases (`logging.wandb`)."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from megamem.config.load import config_hash
from megamem.config.run import RunConfig
from megamem.runs.result import RunResult
from megamem.runs.sinks.base import LogRecord, Sink


class Wandb(Sink):
    """A Weights & Biases run; offline runs lie in the run folder until `megamem wandb sync`."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Start the W&B run, or continue the one that an earlier part of this run has started in `folder`."""
        import wandb

        identity = folder / "wandb-run-id"
        if not identity.exists():
            identity.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
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
