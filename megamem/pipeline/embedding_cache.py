"""Embeddings of a frozen encoder on disk: each chunk of text is encoded once, whatever reads it again.

A folder holds a subfolder for each encoder and each way of computing (`identity`), so that what is found there is what
would be computed, bit for bit. In it every process that trains has a part of its own, which only grows:

    FOLDER / 3f09a1c2d4e5b6f7 / identity.json           what the embeddings were made with
                                00000.keys  00000.rows   a chunk's key and checksum; its embeddings
                                00001.keys  00001.rows   another process, or the same after it was started again

A chunk's key is a hash of its tokens and of how many chunks were encoded beside each other, as sums of other shapes may
be of another order. Rows are written before their keys: a process that is killed leaves at most a row without a key, or
a part of one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.config.run import RunConfig
from megamem.files import write_json
from megamem.model.encoder_stage import EncoderStage
from megamem.model.stage import Stage
from megamem.pipeline.base import TrainingEngine

KEY_BYTES, CHECKSUM_BYTES = 16, 4
ENTRY_BYTES = KEY_BYTES + CHECKSUM_BYTES
IDENTITY = "identity.json"
_log = logging.getLogger("megamem")


def identity_of(config: RunConfig, stage: Stage, tp_rank: int, device: torch.device) -> dict[str, Any]:
    """Return what the bits of an encoder's embeddings depend on.

    Args:
        config: the run.
        stage: holds the whole encoder, or this tensor-parallel rank's shards of it, with the weights to compute with.
        tp_rank: this rank among those that hold shards.
        device: that it computes on.
    """
    model, training = config.model, config.training
    encoder = model.architecture.parts(model)["encoder"]
    weights = hashlib.sha256()
    for name, parameter in sorted(stage.named_parameters()):
        if encoder.plain_name(name) is not None:
            weights.update(name.encode())
            weights.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    architecture: Any = model.architecture
    shape = model.layer_model(0).model_dump(mode="json", exclude={"layers", "mixer", "memory", "architecture"})
    return {
        "weights": weights.hexdigest(),
        "encoder": [model.mixer_at(layer).model_dump(mode="json") for layer in range(architecture.encoder.layers)],
        "shape": shape,
        "memories_per_chunk": architecture.memories_per_chunk,
        "precision": training.precision,
        "compile": training.compile,
        "tp": config.parallel.tp,
        "tp_rank": tp_rank,
        "sequence_parallel": config.parallel.sequence_parallel,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
    }


class _Place(NamedTuple):
    """Where the embeddings of a chunk lie."""

    file: Path
    row: int
    """Number of its row in the file."""
    checksum: int
    """CRC-32 of the row."""


class EmbeddingCache:
    """The embeddings that one process finds and adds. Several may use a folder at once; each finds what it added itself
    and what was there when it began.

    Nothing that happens to the folder ends a run: what cannot be kept or is damaged is made again, after a warning.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        shape: Sequence[int],
        dtype: torch.dtype,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Open a folder, and begin a part in it.

        Args:
            folder: of embeddings of any encoders.
            identity: what their bits depend on, as plain data.
            shape: of the embeddings of one chunk, [memories, width].
            dtype: of the embeddings.
            agree: whether all processes that compute these embeddings together have them, given whether this one has.
        """
        text = json.dumps(identity, sort_keys=True)
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.shape, self.dtype = tuple(shape), dtype
        self.row_bytes = torch.Size(self.shape).numel() * dtype.itemsize
        self.agree = agree
        self._places: dict[bytes, _Place] = {}
        self._part: tuple[BinaryIO, BinaryIO] | None = None
        self._count = 0
        try:
            # first what asks for no room
            for keys in sorted(self.folder.glob("*.keys")):
                self._read_part(keys)
            if not (self.folder / IDENTITY).exists():
                write_json(self.folder / IDENTITY, dict(identity))
            self._part = self._new_part()
        except OSError as error:
            _warn(self.folder, f"cannot be used ({error.strerror}); nothing more is kept")

    def __len__(self) -> int:
        """Return the number of chunks whose embeddings are known."""
        return len(self._places)

    def find(self, ids: Tensor) -> Tensor | None:
        """Return the embeddings [memories, rows, width] of chunks of ids [chunk_size, rows], one in each row.

        They lie on the device of the ids. None if those of one chunk are not there, or damaged, here or where `agree`
        asks.
        """
        keys = _keys_of(ids)
        data = self._read(keys) if all(key in self._places for key in keys) else None
        # what one process cannot read, all compute together
        if not self.agree(data is not None) or data is None:
            return None
        found = torch.frombuffer(data, dtype=self.dtype).view(len(keys), *self.shape)
        return found.transpose(0, 1).to(ids.device)

    def add(self, ids: Tensor, embeddings: Tensor) -> None:
        """Keep the embeddings [memories, rows, width] of chunks of ids [chunk_size, rows], if they can be kept."""
        if self._part is None:
            return
        keys_file, rows_file = self._part
        rows = embeddings.detach().transpose(0, 1).contiguous().cpu()
        places: dict[bytes, _Place] = {}
        data = entries = b""
        for key, row in zip(_keys_of(ids), rows, strict=True):
            if key in self._places or key in places:
                continue
            one = row.contiguous().view(torch.uint8).numpy().tobytes()
            checksum = zlib.crc32(one)
            places[key] = _Place(Path(rows_file.name), self._count + len(places), checksum)
            data += one
            entries += key + checksum.to_bytes(CHECKSUM_BYTES, "little")
        try:
            _append(rows_file, data)
            _append(keys_file, entries)
        except OSError as error:
            # rows of a part that lost one would be taken for others: this process begins no further one
            _warn(Path(rows_file.name), f"cannot be written ({error.strerror}); nothing more is kept")
            self._part = None
            return
        self._count += len(places)
        self._places |= places

    def _read(self, keys: Sequence[bytes]) -> bytearray | None:
        """Return the rows of some keys, one behind the other; None, and forget those that are damaged, if any is."""
        data, files = bytearray(), dict[Path, BinaryIO]()
        # opened anew: there may be more parts than a process may have open files
        with ExitStack() as stack:
            for key in keys:
                place = self._places[key]
                try:
                    if place.file not in files:
                        files[place.file] = stack.enter_context(place.file.open("rb"))
                    row = os.pread(files[place.file].fileno(), self.row_bytes, place.row * self.row_bytes)
                except OSError as error:
                    self._forget(key, f"cannot be read ({error.strerror})")
                    return None
                if zlib.crc32(row) != place.checksum:
                    self._forget(key, f"the embeddings of chunk {place.row} are damaged")
                    return None
                data += row
        return data

    def _forget(self, key: bytes, why: str) -> None:
        """Take a chunk for one whose embeddings are not there."""
        _warn(self._places.pop(key).file, f"{why}; made again")

    def _read_part(self, keys: Path) -> None:
        """Note what a part holds, as far as both of its files were written."""
        rows = keys.with_suffix(".rows")
        entries = keys.read_bytes()
        whole = min(len(entries) // ENTRY_BYTES, rows.stat().st_size // self.row_bytes)
        for number in range(whole):
            entry = entries[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
            self._places[entry[:KEY_BYTES]] = _Place(rows, number, int.from_bytes(entry[KEY_BYTES:], "little"))

    def _new_part(self) -> tuple[BinaryIO, BinaryIO]:
        """Return the two files of a part that no other process has: of keys, and of rows."""
        number = 0
        while True:
            path = self.folder / f"{number:05d}.rows"
            try:
                rows = path.open("xb", buffering=0)
            except FileExistsError:
                number += 1
                continue
            return path.with_suffix(".keys").open("xb", buffering=0), rows


def _append(file: BinaryIO, data: bytes) -> None:
    """Write all of `data` at the end of an unbuffered file. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _warn(path: Path, what: str) -> None:
    """Tell in one line of a folder or file of kept embeddings."""
    _log.warning("training.embedding_cache %s: %s", path, what)


def keep_embeddings(engine: TrainingEngine, folder: Path) -> None:
    """Let the encoder of an engine whose weights are loaded use the cache in a folder."""
    stage, topology = engine.stage, engine.topology
    assert isinstance(stage, EncoderStage), "only they have frozen encoders"

    def all_know(known: bool) -> bool:
        """Return whether all tensor-parallel ranks know something: what one has to compute, all compute together."""
        if topology.tp_size == 1:
            return known
        flag = torch.tensor(known, dtype=torch.int32, device=topology.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=topology.tp_group)
        return bool(flag)

    identity = identity_of(engine.config, stage, topology.tp_rank, topology.device)
    stage.kept_embeddings = EmbeddingCache(folder, identity, stage.embeddings_shape, engine.dtype, all_know)


def _keys_of(ids: Tensor) -> list[bytes]:
    """Return the key of each chunk of ids [chunk_size, rows]."""
    chunks = ids.t().contiguous().cpu().numpy()
    beside = len(chunks).to_bytes(8, "little")
    return [hashlib.blake2b(chunk.tobytes(), digest_size=KEY_BYTES, salt=beside).digest() for chunk in chunks]
