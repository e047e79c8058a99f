"""Embeddings of a frozen encoder on disk: each chunk of text is encoded once, whatever reads it again.

A folder holds a subfolder for each encoder and each way of computing (`identity`), so that what is found there is what
would be computed, bit for bit. In it every process that trains has a part of its own, which only grows:

    FOLDER / 3f09a1c2d4e5b6f7 / identity.json           what the embeddings were made with
                                00000.keys  00000.rows   a chunk's key and checksum; its embeddings
                                00001.keys  00001.rows   another process, or the same after it was started again

A chunk's key is a hash of its tokens. Rows are written before their keys: a process that is killed leaves at most a row
without a key, or a part of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megamem.config.run import RunConfig
from megamem.errors import DataError
from megamem.files import sha256_file, write_json

KEY_BYTES, CHECKSUM_BYTES = 16, 4
ENTRY_BYTES = KEY_BYTES + CHECKSUM_BYTES
IDENTITY = "identity.json"


def identity_of(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Return what the bits of an encoder's embeddings depend on. Raises DataError if its weights cannot be read.

    device: that it computes on.
    """
    files, model = config.training.init_from, config.model
    path = files["encoder"] if isinstance(files, dict) else files
    assert path is not None, "only trained encoders are frozen"
    try:
        weights = sha256_file(Path(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    # sums of other shapes may be of another order
    rows = config.training.micro_batch_size * config.bptt_chunks
    architecture: Any = model.architecture
    shape = model.layer_model(0).model_dump(mode="json", exclude={"layers", "mixer", "memory", "architecture"})
    return {
        "weights": weights,
        "encoder": [model.mixer_at(layer).model_dump(mode="json") for layer in range(architecture.encoder.layers)],
        "shape": shape,
        "memories_per_chunk": architecture.memories_per_chunk,
        "chunks_side_by_side": rows,
        "precision": config.training.precision,
        "tp": config.parallel.tp,
        "sequence_parallel": config.parallel.sequence_parallel,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
    }


class EmbeddingCache:
    """The embeddings that one process finds and adds. Several may use a folder at once; each finds what it added itself
    and what was there when it began."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype) -> None:
        """Open a folder, and begin a part in it.

        Args:
            folder: of embeddings of any encoders.
            identity: what their bits depend on, as plain data.
            shape: of the embeddings of one chunk, [memories, width].
            dtype: of the embeddings.
        Raises: DataError if the folder cannot be written to.
        """
        text = json.dumps(identity, sort_keys=True)
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.shape, self.dtype = tuple(shape), dtype
        self.row_bytes = torch.Size(self.shape).numel() * dtype.itemsize
        self._places: dict[bytes, tuple[BinaryIO, int, int]] = {}
        try:
            write_json(self.folder / IDENTITY, dict(identity))
            for keys in sorted(self.folder.glob("*.keys")):
                self._read_part(keys)
            self._keys, self._rows = self._new_part()
        except OSError as error:
            raise DataError(f"training.embedding_cache {self.folder}: cannot be used ({error.strerror})") from None
        self._count = 0

    def __len__(self) -> int:
        """Return the number of chunks whose embeddings are known."""
        return len(self._places)

    def find(self, ids: Tensor) -> Tensor | None:
        """Return the embeddings [memories, rows, width] of chunks of ids [chunk_size, rows], one in each row.

        They lie on the device of the ids. None if those of one chunk are not there. Raises: DataError for damaged ones,
        naming the file.
        """
        places = [self._places.get(key) for key in _keys_of(ids)]
        if any(place is None for place in places):
            return None
        data = bytearray()
        for place in places:
            assert place is not None
            data += self._row(*place)
        found = torch.frombuffer(data, dtype=self.dtype).view(len(places), *self.shape)
        return found.transpose(0, 1).to(ids.device)

    def add(self, ids: Tensor, embeddings: Tensor) -> None:
        """Keep the embeddings [memories, rows, width] of chunks of ids [chunk_size, rows]. Raises DataError."""
        rows = embeddings.detach().transpose(0, 1).contiguous().cpu()
        try:
            entries = b""
            for key, row in zip(_keys_of(ids), rows, strict=True):
                if key in self._places:
                    continue
                data = row.contiguous().view(torch.uint8).numpy().tobytes()
                checksum = zlib.crc32(data)
                self._rows.write(data)
                self._places[key] = self._rows, self._count, checksum
                self._count += 1
                entries += key + checksum.to_bytes(CHECKSUM_BYTES, "little")
            self._rows.flush()
            self._keys.write(entries)
            self._keys.flush()
        except OSError as error:
            raise DataError(f"{self._rows.name}: cannot be written ({error.strerror})") from None

    def _row(self, file: BinaryIO, number: int, checksum: int) -> bytes:
        data = os.pread(file.fileno(), self.row_bytes, number * self.row_bytes)
        if zlib.crc32(data) != checksum:
            raise DataError(f"{file.name}: the embeddings of chunk {number} are damaged; remove the folder")
        return data

    def _read_part(self, keys: Path) -> None:
        """Note what a part holds, as far as both of its files were written."""
        rows = keys.with_suffix(".rows").open("rb")
        entries = keys.read_bytes()
        whole = min(len(entries) // ENTRY_BYTES, os.fstat(rows.fileno()).st_size // self.row_bytes)
        for number in range(whole):
            entry = entries[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
            self._places[entry[:KEY_BYTES]] = rows, number, int.from_bytes(entry[KEY_BYTES:], "little")

    def _new_part(self) -> tuple[BinaryIO, BinaryIO]:
        """Return the two files of a part that no other process has."""
        number = 0
        while True:
            path = self.folder / f"{number:05d}.rows"
            try:
                rows = path.open("xb+")
            except FileExistsError:
                number += 1
                continue
            return path.with_suffix(".keys").open("xb"), rows


def _keys_of(ids: Tensor) -> list[bytes]:
    """Return the key of each chunk of ids [chunk_size, rows]."""
    chunks = ids.t().contiguous().cpu().numpy()
    return [hashlib.blake2b(chunk.tobytes(), digest_size=KEY_BYTES).digest() for chunk in chunks]
