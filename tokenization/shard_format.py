"""The format of token shards, shared by writer and readers.

A folder holds `shard-000000.tar`, ... (uncompressed webdataset tars), `index.json` (this module's `ShardIndex`)
and `index.npy`, one `DOCUMENT` record per document. In a tar each document is one sample: `KEY.tokens`, its
little-endian tokens, the last of which is eos, and `KEY.json`, its name, sizes and text hash. `KEY` is the
document's number within the folder. Nothing is compressed, so a document's tokens lie at a known byte offset.
Where shards were written in parts (tokenization/parts.py), each part is such a folder inside, and the outer one holds
an index over all.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from megamem.errors import DataError

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
DOCUMENTS_FILE = "index.npy"
TAR_BLOCK = 512
"""Tar headers are one block, and members start at multiples of it."""

DOCUMENT = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("tokens", "<u8"), ("text_bytes", "<u8")])
"""A document: its shard, byte offset of its tokens in the tar, token count with eos, UTF-8 bytes."""


@dataclass(frozen=True)
class FileRecord:
    """A file of the folder."""

    file: str
    """Name of the file."""
    size: int
    """Its bytes."""
    sha256: str
    """Its hash."""


@dataclass(frozen=True)
class ShardHeader:
    """What all shards of a folder share. Writing continues only under an equal header."""

    dtype: Literal["uint16", "uint32"]
    """Type of a token on disk."""
    tokenizer_sha256: str
    """Hash of the tokenizer's file."""
    vocab_size: int
    """Bound of the token ids."""
    eos_id: int
    """The token that ends every document."""
    inputs_sha256: str
    """Hash over the input files' names and sizes."""
    shard_text_bytes: int
    """A shard is closed when it holds this much text."""
    part: str | None = None
    """`K/N` where the folder is part K of N; `inputs_sha256` is that of all parts' inputs then."""


_IN_WORDS = {"tokenizer_sha256": "another tokenizer", "inputs_sha256": "other input files or another --text-field"}
"""Fields of a header whose names say little on the command line."""


def difference(name: str, *values: object) -> tuple[str, ...]:
    """Return in words that a field of two headers differs, and its values, hashes cut to 12 digits."""
    return _IN_WORDS.get(name, f"another {name}"), *(str(value)[:12] for value in values)


@dataclass(frozen=True)
class ShardIndex:
    """Contents of `index.json`."""

    header: ShardHeader
    """What all shards share."""
    shards: tuple[FileRecord, ...]
    """The tars, in order."""
    documents_file: FileRecord
    """The document table."""
    documents: int
    """Number of documents."""
    tokens: int
    """Number of tokens, the end of each document included."""
    text_bytes: int
    """UTF-8 bytes of all texts."""
    first_documents: tuple[int, ...] = (0,)
    """The number of each part's first document; in the tars of a part, documents are counted from there."""
    format_version: int = FORMAT_VERSION
    """Version of the format."""

    def to_dict(self) -> dict[str, object]:
        """Return the JSON object of `index.json`."""
        return asdict(self)

    @classmethod
    def parse(cls, data: bytes, where: str) -> "ShardIndex":
        """Read the bytes of an `index.json`.

        where: names it in errors.

        Raises:
            DataError: it is no index, damaged, or of another version.
        """
        try:
            value = json.loads(data)
            version = value["format_version"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{where}: not an index of token shards") from None
        if version != FORMAT_VERSION:
            raise DataError(f"{where}: format_version {version}, this version reads {FORMAT_VERSION}")
        try:
            header = ShardHeader(**value.pop("header"))
            shards = tuple(FileRecord(**record) for record in value.pop("shards"))
            documents_file = FileRecord(**value.pop("documents_file"))
            first = tuple(value.pop("first_documents", (0,)))
            return cls(header=header, shards=shards, documents_file=documents_file, first_documents=first, **value)
        except (TypeError, KeyError, AttributeError):
            raise DataError(f"{where}: damaged index of token shards") from None

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokens: the hashes of all shards and of the document table."""
        hashes = [record.sha256 for record in (*self.shards, self.documents_file)]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def key_of(document: int) -> str:
    """Return the key of a document's sample in its tar."""
    return f"{document:09d}"


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smaller type that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def padded(size: int) -> int:
    """Return the bytes that a tar member's data of `size` bytes takes."""
    return -(-size // TAR_BLOCK) * TAR_BLOCK
