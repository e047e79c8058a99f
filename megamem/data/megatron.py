"""A store of documents in Megatron's `.bin`/`.idx` pairs."""

import hashlib
import struct
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from megamem.data.file_hash import kept_hash
from megamem.data.store import Int64
from megamem.errors import DataError

HEADER = struct.Struct("<9sQBQQ")
"""The header of an index: magic, version, code of the token type, number of sequences, number of document borders."""
MAGIC = b"MMIDIDX\x00\x00"
LOOKED_AT = 1000
"""Documents, evenly spread, whose last token tells whether the files have ends of documents."""


class MegatronStore:
    """Documents of a Megatron indexed dataset. It names no tokenizer, so ids are checked as they are read."""

    vocab_size: int | None = None
    tokenizer_hash: str | None = None

    def __init__(self, prefix: str, hashes: Path, end_of_document: int | None = None) -> None:
        """Open `PREFIX.bin` and `PREFIX.idx`.

        Args:
            prefix: of both paths.
            hashes: folder where the hash of the tokens is kept, so that they are read for it only once.
            end_of_document: token that is to end every document; it is added where the files do not have it.

        Raises:
            DataError: a file is missing, truncated or foreign, or some documents end with the token and some do not.
        """
        self.path = prefix
        for suffix in (".idx", ".bin"):
            if not Path(prefix + suffix).is_file():
                raise DataError(f"{prefix}{suffix}: missing")
        _check_index(Path(f"{prefix}.idx"))
        found = Path(f"{prefix}.bin").stat().st_size
        if found == 0:
            raise DataError(f"{prefix}.bin: empty corpus")
        self.dataset = IndexedDataset(prefix, mmap=True)
        sizes = self.dataset.sequence_lengths.astype(np.int64)
        expected = int(sizes.sum()) * np.dtype(self.dataset.index.dtype).itemsize
        if found != expected:
            raise DataError(f"{prefix}.bin: truncated or foreign: {found:,} bytes, its index says {expected:,}")
        self.borders = self.dataset.document_indices.astype(np.int64)
        """[documents + 1] first sequence of each document."""
        self.ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        """[sequences + 1] tokens before each sequence, and all tokens. Megatron's sequences are parts of documents."""
        self.lengths = np.diff(self.ends[self.borders])
        self.shard_borders = np.array([0, len(self.lengths)])
        self.end_of_document = end_of_document
        self.added = 0
        """Tokens added to the end of each document: 1 where the files lack the end of document."""
        if end_of_document is not None and not self._ends_with(end_of_document):
            self.added = 1
            self.lengths = self.lengths + 1
        digest = hashlib.sha256(Path(f"{prefix}.idx").read_bytes())
        tokens = kept_hash(Path(f"{prefix}.bin"), hashes)
        contents = f"{tokens} {end_of_document}" if self.added else tokens
        self.fingerprint = hashlib.sha256(digest.digest() + contents.encode()).hexdigest()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def tokens(self, document: int, start: int, stop: int) -> Int64:
        """See `DocumentStore.tokens`. A document may be several of Megatron's sequences."""
        assert 0 <= start <= stop <= self.lengths[document], (document, start, stop)
        if self.added and stop == self.lengths[document] and start < stop:
            return np.append(self._stored(document, start, stop - 1), np.int64(self.end_of_document or 0))
        return self._stored(document, start, stop)

    def _stored(self, document: int, start: int, stop: int) -> Int64:
        """Return tokens of a document as the files have them."""
        base = self.ends[self.borders[document]]
        sequence = int(np.searchsorted(self.ends, base + start, side="right")) - 1
        parts: list[Int64] = []
        while base + start < base + stop:
            offset = int(base + start - self.ends[sequence])
            length = int(min(base + stop, self.ends[sequence + 1]) - base - start)
            if length:
                parts.append(self.dataset.get(sequence, offset, length).astype(np.int64))
            start, sequence = start + length, sequence + 1
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def labels(self, document: int, start: int, stop: int) -> Int64:
        """Return the tokens that follow, [stop - start]."""
        return self.tokens(document, start + 1, stop + 1)

    def name(self, document: int) -> str:
        """Return path and number of the document."""
        return f"{self.path}:{document}"

    def _ends_with(self, token: int) -> bool:
        """Return whether documents end with a token, told by some. Raises DataError if some do and some do not."""
        looked_at = np.unique(np.linspace(0, len(self) - 1, LOOKED_AT).astype(np.int64))
        ends = [token in self.tokens(d, n - 1, n) for d in looked_at.tolist() if (n := int(self.lengths[d]))]
        if any(ends) and not all(ends):
            raise DataError(
                f"{self.path}: {sum(ends)} of {len(ends)} documents looked at end with the end of document {token}, "
                "the others do not; write the files anew with one at every end, or set data.documents to pad"
            )
        return all(ends)


def _check_index(path: Path) -> None:
    """Raise DataError unless an index is whole: the library maps it without a check."""
    with path.open("rb") as file:
        data = file.read(HEADER.size)
    if len(data) < HEADER.size or data[:9] != MAGIC:
        raise DataError(f"{path}: foreign: not the index of a Megatron dataset")
    _, version, code, sequences, borders = HEADER.unpack(data)
    if version != 1 or code not in {dtype.value for dtype in DType}:
        raise DataError(f"{path}: foreign: version {version} with token type {code} is not known")
    size, expected = path.stat().st_size, HEADER.size + 12 * sequences + 8 * borders
    if size != expected:
        raise DataError(f"{path}: truncated or foreign: {size:,} bytes, its header says {expected:,}")
