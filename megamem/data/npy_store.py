"""A store of documents in `.npy` files of tokens, such as OLMo's: one after the other, each with an end."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megamem.data.cache import locked
from megamem.data.file_hash import kept_hash
from megamem.data.store import Int64
from megamem.errors import DataError
from megamem.files import read_json, write_json
from megamem.patience import reason
from tokenization.shard_format import DOCUMENTS_FILE

MAGIC = b"\x93NUMPY"
DOCUMENT = np.dtype([("file", "<u4"), ("start", "<i8"), ("tokens", "<i8")])
"""A document: its file, its first token's place there, its tokens with the end."""
_log = logging.getLogger("megamem")
SCANNED = 1 << 26
"""Tokens that are searched for ends at a time."""

RawType = Literal["uint16", "uint32"]


def is_npy(path: str) -> bool:
    """Return whether a path is that of an `.npy` file, or of a folder that holds such files and is no shard folder."""
    return path.endswith(".npy") or bool(_in_folder(path))


class NpyStore:
    """Documents in one `.npy` file or in those of a folder, in the order of their names; the tokens stay mapped files.

    Where documents begin is found once, by reading all tokens, and kept in the folder of the shard cache: a mapped
    table that all processes of a node share. The files name no tokenizer, so ids are checked as they are read.
    """

    vocab_size: int | None = None
    tokenizer_hash: str | None = None

    def __init__(self, path: str, end_of_document: int | None, raw_type: RawType | None, tables: Path) -> None:
        """Map the files and open the table of documents, which is made if need be.

        Args:
            path: the file or the folder.
            end_of_document: token that ends every document. What follows the last one of a file is a document whose
                end is added.
            raw_type: type of the tokens in files without NumPy's header.
            tables: folder where the table is kept.

        Raises:
            DataError: the end is not known, or a file is missing, truncated, foreign or without an end.
        """
        self.path = path
        if end_of_document is None:
            raise DataError(f"{path}: does not state the token that ends its documents; give data.end_of_document")
        self.end_of_document: int | None = end_of_document
        self.files = [Path(path)] if path.endswith(".npy") else _in_folder(path)
        self.arrays = [_mapped(file, raw_type) for file in self.files]
        states = [(file.absolute(), file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        types = [array.dtype.str for array in self.arrays]
        hashes = [kept_hash(file, tables) for file in self.files]
        key = hashlib.sha256(repr((*states, types, end_of_document, hashes)).encode()).hexdigest()[:24]
        self.table, self.fingerprint = self._table(tables / key, end_of_document, repr((types, hashes)))
        self.lengths: Int64 = self.table["tokens"]
        self.shard_borders: Int64 = np.searchsorted(self.table["file"], np.arange(len(self.files) + 1)).astype(np.int64)

    def _table(self, place: Path, end: int, made_of: str) -> tuple[npt.NDArray[np.void], str]:
        """Return the table of documents and its fingerprint: the one that is kept, or else a new one, which is kept.

        Where it cannot be kept this process has it in its own memory.

        Args:
            place: what the names of the table's files begin with.
            end: token that ends every document.
            made_of: types and hashes of the files, for the fingerprint.
        """
        table, facts = place.with_suffix(".documents.npy"), place.with_suffix(".documents.json")
        found = None
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with locked(place.with_suffix(".lock")):
                # the facts come last: with them the table is whole
                if not facts.exists():
                    found = self._find_documents(end)
                    np.save(table, found, allow_pickle=False)
                    write_json(facts, {"fingerprint": _fingerprint(found, made_of)})
            return np.load(table, mmap_mode="r", allow_pickle=False).view(np.ndarray), read_json(facts)["fingerprint"]
        except (OSError, DataError, KeyError, ValueError) as error:
            found = self._find_documents(end) if found is None else found
            _log.warning("%s: the places of documents cannot be kept (%s); kept in memory", place.parent, reason(error))
            return found, _fingerprint(found, made_of)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.table)

    def tokens(self, document: int, start: int, stop: int) -> Int64:
        """See `DocumentStore.tokens`."""
        file, first, length = self.table[document].item()
        assert 0 <= start <= stop <= length, (document, start, stop)
        found: Int64 = self.arrays[file][first + start : first + stop].astype(np.int64)
        # a file may lack the end of its last document
        return found if len(found) == stop - start else np.append(found, np.int64(self.end_of_document or 0))

    def labels(self, document: int, start: int, stop: int) -> Int64:
        """Return the tokens that follow, [stop - start]."""
        return self.tokens(document, start + 1, stop + 1)

    def name(self, document: int) -> str:
        """Return the file and the place of the document's first token in it."""
        file, first, _ = self.table[document].item()
        return f"{self.files[file]}:{first}"

    def _find_documents(self, end: int) -> npt.NDArray[np.void]:
        """Return the table of documents, [documents] of type `DOCUMENT`. Raises DataError for a file without an end."""
        tables = []
        for number, (file, array) in enumerate(zip(self.files, self.arrays, strict=True)):
            ends = [
                np.flatnonzero(array[first : first + SCANNED] == end) + first + 1
                for first in range(0, len(array), SCANNED)
            ]
            borders = np.concatenate([np.zeros(1, np.int64), *ends])
            if len(borders) == 1:
                raise DataError(f"{file}: none of its {len(array):,} tokens is the end of document {end}")
            if borders[-1] < len(array):
                borders = np.append(borders, len(array) + 1)
            table = np.empty(len(borders) - 1, DOCUMENT)
            table["file"], table["start"], table["tokens"] = number, borders[:-1], np.diff(borders)
            tables.append(table)
        return np.concatenate(tables)


def _fingerprint(table: npt.NDArray[np.void], made_of: str) -> str:
    """Return the fingerprint of a table of documents, [documents], of files of these types and hashes."""
    return hashlib.sha256(made_of.encode() + table.tobytes()).hexdigest()


def _in_folder(path: str) -> Sequence[Path]:
    """Return the files of tokens in a folder, by name."""
    folder = Path(path)
    return sorted(file for file in folder.glob("*.npy") if file.name != DOCUMENTS_FILE) if folder.is_dir() else []


def _mapped(path: Path, raw_type: RawType | None) -> npt.NDArray[np.integer]:
    """Map the tokens of a file, [tokens]. Raises DataError where it is missing, truncated or of other things."""
    try:
        with path.open("rb") as file:
            has_header = file.read(len(MAGIC)) == MAGIC
        if has_header:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        elif raw_type is None:
            raise DataError(f"{path}: has no NumPy header; if it holds bare tokens, as OLMo's do, give data.raw_tokens")
        else:
            array = np.memmap(path, np.dtype(raw_type).newbyteorder("<"), "r")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise DataError(f"{path}: truncated or damaged ({str(error).splitlines()[0]})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise DataError(f"{path}: holds {array.dtype} of shape {array.shape}; tokens are one axis of integers")
    tokens: npt.NDArray[np.integer] = array.view(np.ndarray)
    return tokens
