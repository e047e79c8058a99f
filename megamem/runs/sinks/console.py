"""The sink on the console: a readable line per record."""

from __future__ import annotations

from rich.console import Console

from megamem.runs.sinks.base import LogRecord, Sink

_FORMATS = {
    "loss": "loss {:.4f}",
    "val_loss": "validation loss {:.4f}",
    "val_accuracy": "accuracy {:.2%}",
    "val_copy_loss": "copy loss {:.4f}",
    "val_copy_accuracy": "copy accuracy {:.2%}",
    "val_blank_copy_loss": "blank copy loss {:.4f}",
    "val_blank_copy_accuracy": "blank copy accuracy {:.2%}",
    "val_bits_per_byte": "{:.4f} bits/byte",
    "val_beyond_first_chunk_loss": "beyond first chunk {:.4f}",
    "grad_norm": "grad norm {:.3f}",
    "lr": "lr {:.2e}",
    "tokens_per_second_per_device": "{:,.0f} tokens/s/device",
    "mfu": "MFU {:.1%}",
    "data_wait": "data wait {:.1%}",
    "memory_gib": "{:.2f} GiB",
    "skipped": "skipped {}",
    "skipped_spikes": "skipped spikes {}",
}
"""How the figures that are shown are written."""


class ConsoleLines(Sink):
    """A readable line per record."""

    def __init__(self, console: Console, steps: int) -> None:
        """Write to `console`. steps: optimizer steps of the whole run."""
        self.console = console
        self.steps = steps

    def write(self, record: LogRecord) -> None:
        """See `Sink.write`."""
        words = [f"step {record['step']:>{len(str(self.steps))}}/{self.steps}"]
        words += [text for name, value in record.items() if value is not None and (text := _shown(name, value))]
        self.console.print("  ".join(words), highlight=False, soft_wrap=True)


def _shown(name: str, value: float) -> str:
    """Return a figure in words; nothing for one that is not shown."""
    if name == "eta_s":
        minutes, seconds = divmod(round(value), 60)
        return f"ETA {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    if name not in _FORMATS or (name.startswith("skipped") and not value):
        return ""
    return _FORMATS[name].format(value)
