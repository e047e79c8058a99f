"""The documents of files and folders: `.txt`, and `.jsonl(.gz/.zst)` and `.parquet` with a field `text`."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from megamem.errors import DataError

PARQUET_ROWS = 64
"""Rows of a parquet file that are read at a time; a row may be a whole book."""


@dataclass(frozen=True)
class Document:
    """One document of an input file."""

    name: str
    """Its name within the corpus."""
    text: str
    """Its text."""
    source_bytes: int
    """Bytes of its file that were read for it."""


@dataclass(frozen=True)
class InputFile:
    """A readable file."""

    path: Path
    """Where it lies."""
    name: str
    """What the names of its documents begin with."""


def input_files(inputs: Sequence[Path]) -> list[InputFile]:
    """Return the readable files of files and folders (searched recursively), sorted by name within each input.

    Raises:
        DataError: an input does not exist or holds no readable file.
    """
    files: list[InputFile] = []
    for root in inputs:
        if not root.exists():
            raise DataError(f"{root}: no such file or folder")
        candidates = sorted(root.rglob("*")) if root.is_dir() else [root]
        readable = [path for path in candidates if path.is_file() and _reader(path)]
        if not readable:
            raise DataError(f"{root}: no readable file (known: {', '.join(_READERS)})")
        parent = root.absolute().parent
        files += [InputFile(path, path.absolute().relative_to(parent).as_posix()) for path in readable]
    return files


def documents(files: Sequence[InputFile]) -> Iterator[Document]:
    """Yield the non-empty documents of `files` in order. Raises DataError naming a file (and line) it cannot read."""
    for file in files:
        reader = _reader(file.path)
        assert reader is not None, file.path
        for document in reader(file):
            if document.text:
                yield document


def expansion(path: Path) -> int:
    """Return roughly how many bytes of text a byte of this file holds."""
    return 1 if path.suffix in (".txt", ".jsonl") else 4


def _reader(path: Path) -> "Callable[[InputFile], Iterator[Document]] | None":
    """Return the function that reads files of this suffix; None for other files."""
    return next((reader for suffix, reader in _READERS.items() if path.name.endswith(suffix)), None)


def _text_file(file: InputFile) -> Iterator[Document]:
    """Yield the file as one document."""
    data = file.path.read_bytes()
    try:
        yield Document(file.name, data.decode("utf-8-sig"), len(data))
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path}: not UTF-8 at byte {error.start}; convert it first") from None


def _json_lines(file: InputFile) -> Iterator[Document]:
    """Yield the field `text` of each line."""
    with file.path.open("rb") as raw, _decompressed(raw, file.path.suffix) as stream:
        consumed = 0
        try:
            for number, line in enumerate(stream, start=1):
                position = raw.tell()
                if line.strip():
                    text = _text_field(line, f"{file.path}:{number}")
                    yield Document(f"{file.name}:{number}", text, position - consumed)
                    consumed = position
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"{file.path}: damaged ({error})") from None


def _decompressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    """Return the stream behind a compressed file's suffix."""
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, reader)))
    return raw


def _text_field(line: bytes, where: str) -> str:
    """Return the field `text` of a line. Raises DataError naming `where`."""
    try:
        record = json.loads(line)
    except ValueError:
        raise DataError(f"{where}: not valid JSON") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where}: no string field 'text'")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = json.dumps(text[error.start])
        raise DataError(f"{where}: field 'text' holds {half}, half a character that UTF-8 cannot write") from None
    return text


def _parquet(file: InputFile) -> Iterator[Document]:
    """Yield the column `text` row by row."""
    try:
        table = pq.ParquetFile(file.path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file.path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    with table:
        if "text" not in table.schema_arrow.names:
            raise DataError(f"{file.path}: no column 'text' (columns: {', '.join(table.schema_arrow.names)})")
        if (kind := table.schema_arrow.field("text").type) not in _TEXT_TYPES:
            raise DataError(f"{file.path}: column 'text' holds {kind}, not strings")
        share = file.path.stat().st_size // max(table.metadata.num_rows, 1)
        for row, text in enumerate(_column(table, file.path), start=1):
            yield Document(f"{file.name}:{row}", text or "", share)


_TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()))
"""Types of a parquet column of strings; the last is that of categories."""


def _column(table: pq.ParquetFile, path: Path) -> Iterator[str | None]:
    """Yield the values of the column `text`. Raises DataError where the file is damaged."""
    try:
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=["text"]):
            yield from batch.column(0).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged ({str(error).splitlines()[0]})") from None


_READERS: dict[str, Callable[[InputFile], Iterator[Document]]] = {
    ".txt": _text_file,
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".jsonl.zst": _json_lines,
    ".parquet": _parquet,
}
