"""Saves checkpoints while the run goes on: a copy at the step's border, everything else in a thread of its own.

The thread's collectives have a process group of their own, on the CPU. A save that fails on one rank fails on all; the
run is told at its next step border and ends with the cause.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from checkpoints.folder import PARTIAL, RUN, SavedRun, complete, folder_name, prune, sync
from checkpoints.fragments import Fragments, Piece, SavePlanner
from checkpoints.storage import INDEX, SafeWriter, data_file
from megamem.config.checkpoint import CheckpointConfig
from megamem.errors import CheckpointError, MegamemError
from megamem.files import sha256_file

THREAD = "checkpoint"
"""Name of the thread that writes."""
WAITING = "waiting for the checkpoint to be written"
"""What a run is at that waits for this thread."""


@dataclass(frozen=True)
class SaveTimes:
    """Seconds of one save on this rank."""

    waited: float
    """For the save before to end."""
    copied: float
    """For the copy, which the step waits for."""
    written: float
    """In the background."""


class Saver:
    """Writes checkpoints of one run into `folder`. All ranks make the same calls."""

    def __init__(self, folder: Path, config: CheckpointConfig, group: ProcessGroup) -> None:
        """group: of all ranks, on gloo, used by nobody else."""
        self.folder, self.config, self.group = folder, config, group
        self.rank = group.rank()
        self.times: list[SaveTimes] = []
        self._thread: threading.Thread | None = None
        self._error: MegamemError | None = None
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        if self.rank == 0 and folder.is_dir():
            for remains in folder.glob(f"*{PARTIAL}"):  # of a process that was killed while it wrote
                shutil.rmtree(remains)

    def save(
        self,
        step: int,
        tensors: dict[str, Fragments],
        run: SavedRun,
        wait: bool = False,
        watch: Callable[[str], None] = lambda action: None,
    ) -> None:
        """Begin a save; returns once the tensors are copied, or written if `wait` or the configuration says so.

        What is waited for is written from where it lies, without a copy.

        Args:
            step: finished optimizer steps.
            tensors: this rank's fragments by name; may change as soon as the call returns.
            run: what run.json holds; rank 0's counts.
            watch: as in `wait`.
        Raises: as `wait`, for this save or the one before.
        """
        begun = time.monotonic()
        self.wait(watch)
        waited = time.monotonic()
        direct = wait or not self.config.asynchronous
        own = {name: fragments for name, fragments in tensors.items() if fragments.writes}
        staged = own if direct else self._copied(own)
        self._settle(own)
        copied = time.monotonic()
        self._thread = threading.Thread(
            target=self._write, name=THREAD, args=(step, staged, run, waited - begun, copied - waited)
        )
        self._thread.start()
        if direct:
            self.wait(watch)

    @property
    def writing(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def failed(self) -> bool:
        """Whether a save has failed on this rank; costs nothing."""
        return self._error is not None

    def wait(self, watch: Callable[[str], None] = lambda action: None) -> None:
        """Until nothing is being written.

        watch: told at first, then each second in which the thread has read or written something: a disk that does not
            answer is no progress.
        Raises: CheckpointError with the cause if a save failed, MegamemError if that was because a rank was lost.
        """
        moved = None
        while self._thread is not None:
            if (now := _moved(self._thread)) != moved:
                moved = now
                watch(WAITING)
            self._thread.join(1.0)
            if not self._thread.is_alive():
                self._thread = None
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error

    def release(self) -> None:
        """Give the memory of the copy back, at the run's end."""
        self._buffers.clear()

    def _copied(self, tensors: dict[str, Fragments]) -> dict[str, Fragments]:
        """A copy in CPU memory, in buffers that are used again by the next save: one copy at most exists."""
        return {
            name: Fragments(
                fragments.shape,
                [Piece(piece.offsets, self._copy((name, piece.offsets), piece.tensor)) for piece in fragments.pieces],
            )
            for name, fragments in tensors.items()
        }

    @staticmethod
    def _settle(tensors: dict[str, Fragments]) -> None:
        """Wait for what is under way on the device: copies, and the step whose results are read."""
        devices = {piece.tensor.device for fragments in tensors.values() for piece in fragments.pieces}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _copy(self, key: tuple[str, tuple[int, ...]], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _write(self, step: int, tensors: dict[str, Fragments], run: SavedRun, waited: float, copied: float) -> None:
        begun = time.monotonic()
        try:
            self._write_all(step, tensors, run)
            self.times.append(SaveTimes(waited, copied, time.monotonic() - begun))
        except RuntimeError as error:
            # of a collective, all else comes as told by a rank: another start may get through
            self._error = MegamemError(f"checkpoint after step {step}: {_cause(error)}")
        except BaseException as error:
            self._error = CheckpointError(f"checkpoint after step {step}: {_cause(error)}")

    def _write_all(self, step: int, tensors: dict[str, Fragments], run: SavedRun) -> None:
        final = self.folder / folder_name(step)
        partial = final.with_name(final.name + PARTIAL)
        self._together(lambda: self._prepare(partial) if self.rank == 0 else None)
        state_dict_saver.save(
            tensors,
            storage_writer=SafeWriter(partial, self.rank),
            planner=SavePlanner(),
            process_group=self.group,
        )
        files = self._together(lambda: self._hash(partial, run))
        self._together(lambda: self._complete(step, partial, final, files) if self.rank == 0 else None)

    def _prepare(self, partial: Path) -> None:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)

    def _hash(self, partial: Path, run: SavedRun) -> dict[str, Any]:
        """Force this rank's files to the disk and hash them as they are there."""
        names = [data_file(self.rank)]
        if self.rank == 0:
            (partial / RUN).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
            names += [INDEX, RUN]
        for name in names:
            sync(partial / name)
        return {
            name: {"bytes": (partial / name).stat().st_size, "sha256": sha256_file(partial / name)} for name in names
        }

    def _complete(self, step: int, partial: Path, final: Path, files: list[dict[str, Any] | None]) -> None:
        complete(partial, final, {name: entry for part in files for name, entry in (part or {}).items()})
        with contextlib.suppress(OSError):  # what cannot be removed now is tried again after the next save
            prune(self.folder, self.config.keep_last, self.config.keep_every, self.config.keep_best, newest=step)

    def _together(self, work: Any) -> list[Any]:
        """Every rank's result of `work`, on every rank; an error on one is an error on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = _cause(caught)
        results: list[Any] = [None] * self.group.size()
        dist.all_gather_object(results, (result, error), group=self.group)
        for rank, (_, told) in enumerate(results):
            if told is not None:
                raise CheckpointError(f"rank {rank}: {told}")
        return [found for found, _ in results]


def _moved(thread: threading.Thread) -> int:
    """Bytes that a thread has read and written so far; 0 once it has ended, or where the kernel does not count them."""
    with contextlib.suppress(OSError):
        counts = Path(f"/proc/self/task/{thread.native_id}/io").read_text(encoding="ascii")
        return sum(int(count) for count in re.findall(r"^[rw]char: (\d+)$", counts, re.MULTILINE))
    return 0


def _cause(error: BaseException) -> str:
    """One line that says what went wrong."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
