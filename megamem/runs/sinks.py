"""Where metrics go: a JSON-lines file always, the console, W&B and TensorBoard by switch. Rank 0 only."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from megamem.config.load import config_hash
from megamem.config.run import RunConfig

Record = Mapping[str, Any]


class Sink(Protocol):
    """Takes one record per log line."""

    def write(self, record: Record) -> None:
        """Record a mapping with `step` and `tokens`."""

    def close(self) -> None:
        """Flush and end."""


class JsonLines:
    """`metrics.jsonl`: one JSON object a line, flushed at once."""

    def __init__(self, path: Path, step: int = 0) -> None:
        """step: where the run goes on; records of later steps, which are made again, are dropped."""
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            path.with_suffix(".tmp").write_text("".join(kept), encoding="utf-8")
            path.with_suffix(".tmp").replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """See `Sink.write`. Non-finite numbers become null: JSON has none."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Sink.close`."""
        self._file.close()


class ConsoleLines:
    """A readable line per record."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps

    def write(self, record: Record) -> None:
        """See `Sink.write`."""
        parts = [f"step {record['step']:>{len(str(self.steps))}}/{self.steps}"]
        parts += [text for name, value in record.items() if (text := _shown(name, value))]
        self.console.print("  ".join(parts), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """See `Sink.close`."""


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    formats = {
        "loss": "loss {:.4f}",
        "val_loss": "validation loss {:.4f}",
        "val_bits_per_byte": "{:.4f} bits/byte",
        "val_beyond_first_chunk_loss": "beyond first chunk {:.4f}",
        "grad_norm": "grad norm {:.3f}",
        "lr": "lr {:.2e}",
        "tokens_per_second_per_device": "{:,.0f} tokens/s/device",
        "mfu": "MFU {:.1%}",
        "data_wait": "data wait {:.1%}",
        "memory_gib": "{:.2f} GiB",
        "skipped": "skipped {}",
        "eta_s": "ETA {}",
    }
    if name not in formats or (name == "skipped" and not value):
        return ""
    if name == "eta_s":
        minutes, seconds = divmod(round(value), 60)
        return f"ETA {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    return formats[name].format(value)


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # readers drop what an earlier part of the run wrote for later steps
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: Record) -> None:
        """See `Sink.write`."""
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """See `Sink.close`."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run; offline runs lie in the run folder until `megamem wandb sync`."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        import wandb

        identity = folder / "wandb-run-id"  # a run that goes on is one run
        if not identity.exists():
            identity.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        self._run: Any = wandb.init(
            id=identity.read_text(encoding="utf-8").strip(),
            resume="allow",
            project=config.logging.wandb.project,
            group=config.logging.wandb.group,
            tags=list(config.logging.wandb.tags) or None,
            name=config.name,
            mode=config.logging.wandb.mode,
            dir=str(folder),
            config={**config.model_dump(mode="json"), "config_hash": config_hash(config)},
            settings=wandb.Settings(silent=True, console="off"),
        )

    def write(self, record: Record) -> None:
        """See `Sink.write`."""
        self._run.log({k: v for k, v in record.items() if k != "step" and v is not None}, step=record["step"])

    def evaluation(self, figures: Record) -> None:
        """The figures at the end as summary and table, and their picture."""
        import wandb

        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self._run.summary.update(numbers)
        entry: dict[str, Any] = {
            "figures": wandb.Table(columns=["figure", "value"], data=[[k, float(v)] for k, v in numbers.items()])
        }
        if figures.get("picture"):
            entry["evaluation"] = wandb.Image(str(figures["picture"]))
        self._run.log(entry)

    def close(self) -> None:
        """See `Sink.close`."""
        self._run.finish()


def open_sinks(config: RunConfig, folder: Path, console: Console, step: int = 0) -> list[Sink]:
    """The sinks of rank 0. step: where the run goes on."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", step), ConsoleLines(console, config.steps)]
    if config.logging.tensorboard:
        sinks.append(TensorBoard(folder, step))
    if config.logging.wandb.mode != "disabled":
        sinks.append(Wandb(config, folder))
    return sinks
