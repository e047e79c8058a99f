"""The sink for TensorBoard: event files in the run folder (`logging.tensorboard`)."""

from __future__ import annotations

from pathlib import Path

from megamem.runs.sinks.base import LogRecord, Sink


class TensorBoard(Sink):
    """Event files in the run folder."""

    def __init__(self, folder: Path, step: int) -> None:
        """Open a new file in `folder`. step: where the run resumes, 0 for a new run."""
        from torch.utils.tensorboard import SummaryWriter

        # readers drop what an earlier part of the run wrote for later steps
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: LogRecord) -> None:
        """See `Sink.write`."""
        for name, value in record.items():
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """See `Sink.close`."""
        self._writer.close()
