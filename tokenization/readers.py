"""The readers of input files, one for each format: they yield documents from local and remote files alike."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from megamem.errors import DataError, DependencyError, MegamemError
from megamem.patience import reason
from tokenization.remote_file import open_remote

PARQUET_ROWS = 64
"""Rows of a parquet file that are read at a time; a row may be a whole book."""
ZSTD_BYTES = 1 << 17
"""Bytes of a zstd file that are read at a time."""
TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()))
"""Types of a parquet or Arrow column of strings; the last is that of categories."""


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
    """A file of documents."""

    path: str
    """Where it lies: a local path or a URL."""
    name: str
    """What the names of its documents begin with."""
    size: int
    """Its bytes."""
    field: str = "text"
    """The field or column that holds the text."""
    stamp: str = ""
    """What changes with its content: times of a local file, what a store says of its object; empty if not known."""

    def open(self) -> AbstractContextManager[BinaryIO]:
        """Open it for reading; a remote one is streamed, and read on where its store has failed for a while."""
        if "://" in self.path:
            return open_remote(self.path, self.size)
        return Path(self.path).open("rb")


Reader = Callable[[InputFile], Iterator[Document]]


def reader_of(name: str) -> Reader | None:
    """Return the function that reads files of this name; None for other files."""
    last = name.rpartition("/")[2]
    return next((reader for pattern, reader in READERS.items() if fnmatchcase(last, _glob(pattern))), None)


def _glob(pattern: str) -> str:
    """Return a pattern of whole names; a suffix stands for all names that end in it."""
    return f"*{pattern}" if pattern.startswith(".") else pattern


def expansion(name: str) -> int:
    """Return roughly how many bytes of text a byte of a file of this name holds."""
    return 4 if name.endswith((".gz", ".zst", ".parquet")) else 1


def _text_file(file: InputFile) -> Iterator[Document]:
    """Yield the file as one document."""
    with file.open() as raw:
        data = raw.read()
    yield Document(file.name, _decoded(data, file.path), len(data))


def _decoded(data: bytes, where: str) -> str:
    """Return UTF-8 as text. Raises DataError naming `where`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{where}: not UTF-8 at byte {error.start}, on line {line}; convert it first") from None


def _wikitext(file: InputFile) -> Iterator[Document]:
    """Yield the articles of a file of WikiText; laid end to end, they are the file."""
    lines: list[bytes] = []
    begun, number, after_empty = False, 0, True

    def article() -> Document:
        data = b"".join(lines)
        where = f"{file.path}, article {number}"
        return Document(f"{file.name}:{number}", _decoded(data, where), len(data))

    with file.open() as raw:
        for line in raw:
            # what stands before the first title belongs to the first article where it is empty lines only
            if begun and after_empty and _is_title(line):
                number += 1
                yield article()
                lines, begun = [], False
            lines.append(line)
            after_empty = not line.strip()
            begun = begun or not after_empty
    if lines:
        number += 1
        yield article()


def _is_title(line: bytes) -> bool:
    """Return whether a line of WikiText is an article's title, ` = Title = `; ` = = Section = = ` is none."""
    words = line.split()
    return len(words) > 2 and words[0] == words[-1] == b"=" and b"=" not in (words[1], words[-2])


def _json_lines(file: InputFile) -> Iterator[Document]:
    """Yield the text field of each line."""
    with file.open() as raw, _decompressed(raw, file.path) as stream:
        consumed = number = 0
        try:
            for number, line in enumerate(stream, start=1):
                position = raw.tell()
                if line.strip():
                    text = _text_field(line, file.field, f"{file.path}:{number}")
                    yield Document(f"{file.name}:{number}", text, position - consumed)
                    consumed = position
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"{file.path}: damaged{_after('line', number)} ({error})") from None


def _decompressed(raw: BinaryIO, path: str) -> BinaryIO:
    """Return the stream behind a compressed file's suffix."""
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.endswith(".zst"):
        return cast(BinaryIO, io.BufferedReader(_ZstdFrames(raw), ZSTD_BYTES))
    return raw


class _ZstdFrames(io.RawIOBase):
    """What the frames of a zstd file hold. zstandard's own reader takes a file that ends within a frame for whole."""

    def __init__(self, raw: BinaryIO) -> None:
        """Read from `raw`."""
        self._raw, self._decompressor = raw, zstandard.ZstdDecompressor()
        self._frame: Any = None  # the frame that is being read; zstandard's type of it has no public name
        self._rest, self._found = b"", memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the start of a writable buffer and return the bytes; 0 at the end. Raises EOFError within a frame."""
        while not self._found:
            data = self._rest or self._raw.read(ZSTD_BYTES)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            frame = self._frame or self._decompressor.decompressobj()
            self._found = memoryview(frame.decompress(data))
            self._frame, self._rest = (None, frame.unused_data) if frame.eof else (frame, b"")
        count = min(len(buffer), len(self._found))
        buffer[:count], self._found = self._found[:count], self._found[count:]
        return count


def _text_field(line: bytes, field: str, where: str) -> str:
    """Return a field of an object in JSON. Raises DataError naming `where`."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise DataError(f"{where}: JSON that is nested too deeply to be read") from None
    except ValueError:
        raise DataError(f"{where}: not valid JSON") from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where}: no string field {field!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = json.dumps(text[error.start])
        raise DataError(f"{where}: field {field!r} holds {half}, half a character that UTF-8 cannot write") from None
    return text


def _parquet(file: InputFile) -> Iterator[Document]:
    """Yield the text column row by row."""
    with file.open() as given, _seekable(given, file.path) as raw:
        try:
            # read by this thread alone: one that waits for a store must hear a signal to stop
            table = pq.ParquetFile(raw, pre_buffer=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file.path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
        _check_column(table.schema_arrow, file)
        share = file.size // max(table.metadata.num_rows, 1)
        batches = table.iter_batches(batch_size=PARQUET_ROWS, columns=[file.field], use_threads=False)
        for row, text in _rows(batches, file):
            yield Document(f"{file.name}:{row}", text, share)


def _arrow(file: InputFile) -> Iterator[Document]:
    """Yield the text column row by row, of a stream or a file in Arrow's IPC format."""
    with file.open() as given, _seekable(given, file.path) as raw:
        is_file = raw.read(6) == b"ARROW1"
        raw.seek(0)
        try:
            reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file.path}: not a readable Arrow file ({str(error).splitlines()[0]})") from None
        _check_column(reader.schema, file)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
        consumed = 0
        for row, text in _rows((batch.select([file.field]) for batch in batches), file):
            position = max(raw.tell(), consumed)
            yield Document(f"{file.name}:{row}", text, position - consumed)
            consumed = position


@contextmanager
def _seekable(raw: BinaryIO, where: str) -> Iterator[IO[bytes]]:
    """Give a file that can be read from any place: itself, or a copy on disk where its server gives it whole only.

    Raises: DataError naming `where` if there is no room for a copy.
    """
    if raw.seekable():
        yield raw
        return
    with TemporaryFile() as copy:
        try:
            copyfileobj(raw, copy)
            copy.seek(0)
        except OSError as error:
            raise DataError(
                f"{where}: cannot be copied to {gettempdir()} ({reason(error)}); TMPDIR names another"
            ) from None
        yield copy


def _check_column(schema: pa.Schema, file: InputFile) -> None:
    """Raise DataError unless a table has the text column, once, and it holds strings."""
    if file.field not in schema.names:
        raise DataError(f"{file.path}: no column {file.field!r} (columns: {', '.join(schema.names)})")
    if schema.names.count(file.field) > 1:
        raise DataError(f"{file.path}: has {schema.names.count(file.field)} columns {file.field!r}; rename all but one")
    if (kind := schema.field(file.field).type) not in TEXT_TYPES:
        raise DataError(f"{file.path}: column {file.field!r} holds {kind}, not strings")


def _rows(batches: Iterable[Any], file: InputFile) -> Iterator[tuple[int, str]]:  # pyarrow ships no types
    """Yield each row's number and text of batches of one column; an empty text where there is none.

    Raises: DataError naming the row from which on the file is damaged, or that is not UTF-8.
    """
    row = 0
    try:
        for batch in batches:
            for value in batch.column(0):
                text = value.as_py()
                row += 1
                yield row, text or ""
    except UnicodeDecodeError:
        raise DataError(f"{file.path}:{row + 1}: column {file.field!r} holds bytes that are not UTF-8") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file.path}: damaged{_after('row', row)} ({str(error).splitlines()[0]})") from None


def _after(what: str, number: int) -> str:
    """Return words for the last line or row that could be read; none where there is none."""
    return f" after {what} {number}" if number else ""


def _webdataset(file: InputFile) -> Iterator[Document]:
    """Yield the member `.txt` of each sample of a tar, or the text field of its member `.json`."""
    try:
        from webdataset.tariterators import group_by_keys, tar_file_expander
    except ImportError:
        raise DependencyError(f"{file.path}: a tar needs webdataset; pip install 'megamem[webdataset]'") from None
    with file.open() as raw:
        consumed = 0
        for sample in _whole_samples(group_by_keys(tar_file_expander([{"url": file.path, "stream": raw}])), file):
            where = f"{file.path}:{sample['__key__']}"
            if "txt" in sample:
                text = _decoded(sample["txt"], f"{where}.txt")
            elif "json" in sample:
                text = _text_field(sample["json"], file.field, f"{where}.json")
            else:
                raise DataError(f"{where}: neither a .txt nor a .json in the sample")
            position = raw.tell()
            yield Document(f"{file.name}:{sample['__key__']}", text, position - consumed)
            consumed = position


def _whole_samples(samples: Iterator[dict[str, Any]], file: InputFile) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar. Raises DataError where it is damaged."""
    try:
        yield from samples
    except MegamemError as error:
        # the library adds the file to what an error says
        error.args = error.args[:1]
        raise
    except Exception as error:  # the library passes on what tarfile and its own checks raise
        raise DataError(
            f"{file.path}: damaged ({str(error.args[0] if error.args else error).splitlines()[0]})"
        ) from None


READERS: dict[str, Reader] = {
    ".txt": _text_file,
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".jsonl.zst": _json_lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".tar": _webdataset,
    "wiki.*.tokens": _wikitext,
    "wiki.*.raw": _wikitext,
}
"""The reader of each suffix, or of each pattern of names."""
