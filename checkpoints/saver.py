"""The saving of checkpoints while training continues: a copy between two steps, all else in a thread of its own.

The thread's collectives have a process group of their own, on the CPU. A save that fails on one rank fails on all; the
run learns of it after its next step and ends with the cause.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from checkpoints.folder import RUN, folder_name
from checkpoints.fragments import Fragments, Piece, SavePlanner
from checkpoints.location import Location, ObjectPath, is_outage
from checkpoints.records import FileEntry, SavedRun
from checkpoints.retention import prune, remove_unfinished
from checkpoints.storage import SafeWriter
from checkpoints.target import Target, target
from megamem.config.checkpoint import CheckpointConfig
from megamem.errors import CheckpointError, MegamemError, StoreError

T = TypeVar("T")
THREAD = "checkpoint"
"""Name of the thread that writes."""
WAITING = "waiting for the checkpoint to be written"
"""The action of a run that waits for this thread."""


@dataclass(frozen=True)
class SaveTimes:
    """Seconds of one save on this rank."""

    waited: float
    """Seconds until the save before had ended."""
    copied: float
    """Seconds of the copy, which the step waits for."""
    written: float
    """Seconds of writing, in the background."""


class Saver:
    """Writes checkpoints of one run into `folder`. All ranks make the same calls."""

    def __init__(
        self,
        folder: Location,
        config: CheckpointConfig,
        group: ProcessGroup,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Prepare to save; remains of an earlier process that was killed while it wrote are removed.

        Args:
            folder: the run's folder of checkpoints.
            config: which checkpoints are kept, and whether saves are asynchronous.
            group: all ranks, on gloo, used by nobody else.
            report: told in one line of a store that does not answer for now, and of folders that cannot be removed.
        """
        self.folder, self.config, self.group, self.report = folder, config, group, report
        self.rank = group.rank()
        self.times: list[SaveTimes] = []
        self._thread: threading.Thread | None = None
        self._error: MegamemError | None = None
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self.completed: tuple[int, float] | None = None
        """Step of the last checkpoint that was completed, and seconds since 1970; on rank 0."""
        self._target: Target | None = None
        self._told: set[Location] = set()
        # those in an object store go with the next save
        if self.rank == 0 and isinstance(folder, Path) and folder.is_dir():
            self._tell(remove_unfinished(folder))

    def save(
        self,
        step: int,
        tensors: dict[str, Fragments],
        run: SavedRun,
        wait: bool = False,
        watch: Callable[[str], None] = lambda action: None,
    ) -> None:
        """Begin a save; return once the tensors are copied, or written if `wait` or the configuration says so.

        A save that is waited for is written from where the tensors lie, without a copy.

        Args:
            step: finished optimizer steps.
            tensors: this rank's fragments by name; they may change as soon as the call returns.
            run: the contents of run.json; rank 0's are written.
            wait: return only once the checkpoint is complete.
            watch: as in `wait`.

        Raises:
            MegamemError: as `wait` does, for this save or the one before.
        """
        started = time.monotonic()
        self.wait(watch)
        waited = time.monotonic()
        direct = wait or not self.config.asynchronous
        own = {name: fragments for name, fragments in tensors.items() if fragments.writes}
        staged = own if direct else self._copied(own)
        self._settle(own)
        copied = time.monotonic()
        self._thread = threading.Thread(
            target=self._write, name=THREAD, args=(step, staged, run, waited - started, copied - waited)
        )
        self._thread.start()
        if direct:
            self.wait(watch)

    @property
    def writing(self) -> bool:
        """True while a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def failed(self) -> bool:
        """Return whether a save has failed on this rank; costs nothing."""
        return self._error is not None

    def wait(self, watch: Callable[[str], None] = lambda action: None) -> None:
        """Wait until nothing is being written.

        watch: called at first, then each second in which the thread has read or written something: a disk that does not
            answer is no progress.

        Raises:
            CheckpointError: a save failed; the message has the cause.
            StoreError: likewise, as a store has not answered for `checkpoint.retry_minutes`.
            MegamemError: a save failed because a rank was lost.
        """
        before = None
        while self._thread is not None:
            now = _bytes_transferred(self._thread), self._target.progress if self._target else 0
            if now != before:
                before = now
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
        """Copy tensors to CPU memory, into buffers that the next save uses again: at most one copy exists."""
        return {
            name: Fragments(
                fragments.shape,
                [Piece(piece.offsets, self._copy((name, piece.offsets), piece.tensor)) for piece in fragments.pieces],
            )
            for name, fragments in tensors.items()
        }

    @staticmethod
    def _settle(tensors: dict[str, Fragments]) -> None:
        """Wait for work under way on the device: copies, and the step whose results are read."""
        devices = {piece.tensor.device for fragments in tensors.values() for piece in fragments.pieces}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _copy(self, key: tuple[str, tuple[int, ...]], tensor: Tensor) -> Tensor:
        """Copy a piece, `tensor` [N, ...] of any dtype, into the buffer of `key`."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _write(self, step: int, tensors: dict[str, Fragments], run: SavedRun, waited: float, copied: float) -> None:
        """Write a checkpoint and note its times, or the error: the body of the thread."""
        started = time.monotonic()
        try:
            self._write_all(step, tensors, run)
            self.times.append(SaveTimes(waited, copied, time.monotonic() - started))
        except RuntimeError as error:
            # a collective failed, as all other errors come through `_together`: a new start may succeed
            self._error = MegamemError(f"checkpoint after step {step}: {_cause(error)}")
        except BaseException as error:
            self._error = _failure(error, f"checkpoint after step {step}: ")

    def _write_all(self, step: int, tensors: dict[str, Fragments], run: SavedRun) -> None:
        """Write a checkpoint, together with all ranks."""
        into = self._target = target(self.folder / folder_name(step), 60 * self.config.retry_minutes, self._report)
        self._together(lambda: into.prepare() if self.rank == 0 else None)
        state_dict_saver.save(
            tensors, storage_writer=SafeWriter(into, self.rank), planner=SavePlanner(), process_group=self.group
        )
        files = self._together(lambda: self._written(into, run))
        self._together(lambda: self._complete(step, into, files) if self.rank == 0 else None)

    def _report(self, line: str) -> None:
        """Tell of a store that does not answer, with the rank's number."""
        self.report(f"checkpoint: rank {self.rank}: {line}")

    def _written(self, into: Target, run: SavedRun) -> dict[str, FileEntry]:
        """Return this rank's files, which are where they are to stay by then."""
        if self.rank == 0:
            into.write_text(RUN, json.dumps(run, indent=1) + "\n")
        return into.written()

    def _complete(self, step: int, into: Target, files: list[dict[str, FileEntry]]) -> None:
        """Make what was written a checkpoint, and remove those that are not to be kept."""
        into.complete({name: entry for part in files for name, entry in part.items()})
        # what cannot be removed now is tried again after the next save
        with contextlib.suppress(OSError, CheckpointError):
            kept = self.config
            pruned = prune(self.folder, kept.keep_last, kept.keep_every, kept.keep_best, kept.keep_steps, newest=step)
            self._tell(pruned.failed)
            if self.completed is None and isinstance(self.folder, ObjectPath):
                self.folder.abort_uploads()
        self.completed = step, time.time()

    def _tell(self, failed: Mapping[Location, str]) -> None:
        """Tell, once each, of folders that cannot be removed."""
        for path, reason in failed.items():
            if path not in self._told:
                self._told.add(path)
                self.report(f"{path}: cannot be removed ({reason}); tried again after each save")

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return the results of all, by rank; an error on one is an error on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = _failure(caught)
        outcomes: list[tuple[T, MegamemError | None]] = [None] * self.group.size()  # type: ignore[list-item]  # filled below
        dist.all_gather_object(outcomes, (result, error), group=self.group)
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise type(failure)(f"rank {rank}: {failure}")
        return [found for found, _ in outcomes]


def _bytes_transferred(thread: threading.Thread) -> int:
    """Return the bytes that a thread has read and written so far; 0 once it has ended, or where none are counted."""
    with contextlib.suppress(OSError):
        counts = Path(f"/proc/self/task/{thread.native_id}/io").read_text(encoding="ascii")
        return sum(int(count) for count in re.findall(r"^[rw]char: (\d+)$", counts, re.MULTILINE))
    return 0


def _failure(error: BaseException, place: str = "") -> MegamemError:
    """Return what ends the run, `place` before its line: a store that does not answer may do so after another start."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    kind = StoreError if isinstance(cause, StoreError) or is_outage(cause) else CheckpointError
    return kind(f"{place}{_cause(error)}")


def _cause(error: BaseException) -> str:
    """Return one line that says what went wrong."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
