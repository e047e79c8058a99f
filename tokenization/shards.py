"""The writing of token shards: in several processes, restartable, the same bytes however often it was interrupted.

Documents are read once, in order, and grouped into shards by their text size alone, so that neither the number
of processes nor an interruption changes a shard. A shard is written to a temporary name, then renamed, then its
record is written; a shard without a record does not exist. `index.json` comes last.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from io import BytesIO
from multiprocessing.process import BaseProcess
from pathlib import Path
from tarfile import TarFile, TarInfo
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from megamem.errors import DataError
from megamem.files import read_json, require_space, sha256_file, write_bytes, write_json
from tokenization.parts import Part, require_parts_only
from tokenization.readers import Document, InputFile, expansion
from tokenization.shard_folder import RECORDS, WRITING_FILE, alone, note_inputs, open_folder
from tokenization.shard_format import (
    DOCUMENT,
    DOCUMENTS_FILE,
    INDEX_FILE,
    TAR_BLOCK,
    FileRecord,
    ShardHeader,
    ShardIndex,
    key_of,
    token_dtype,
)
from tokenization.sources import documents, input_files
from tokenization.tokenizer import Tokenizer

TableEntries = list[list[int]]
"""Entries of the document table: the fields of `DOCUMENT` for each document."""
FinishedShard = tuple[FileRecord, npt.NDArray[np.void]]
"""A shard's file and its part of the document table, in the table's own type: a list takes ten times the memory."""
T = TypeVar("T")


@dataclass(frozen=True)
class ShardPlan:
    """The documents of one shard and its place."""

    number: int
    """Number of the shard within the folder."""
    first_document: int
    """Number of its first document within the folder."""
    documents: tuple[Document, ...]
    """Its documents, in order."""

    @property
    def file(self) -> str:
        """Name of the shard's tar."""
        return f"shard-{self.number:06d}.tar"

    @property
    def content(self) -> str:
        """SHA-256 over the names and texts, and the first document's number."""
        digest = hashlib.sha256(str(self.first_document).encode())
        for document in self.documents:
            digest.update(json.dumps([document.name, document.text]).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: its file, what it was made of, and its entries of the document table."""

    tar: FileRecord
    """The shard's file."""
    content: str
    """SHA-256 over names and texts of its documents."""
    entries: TableEntries
    """Its documents in the document table."""


def write_shards(
    inputs: Sequence[str | Path],
    tokenizer_folder: Path,
    folder: Path,
    *,
    workers: int = 1,
    shard_text_bytes: int | None = None,
    part: Part | None = None,
    field: str = "text",
    on_progress: Callable[[int], None] = lambda source_bytes: None,
) -> ShardIndex:
    """Tokenize every document of `inputs` into `folder`, each ended by eos, and return the index.

    A killed call is continued by the same call; finished shards are verified and kept. A finished folder is left
    as it is, once its texts are known to be those of the inputs.

    Args:
        inputs: files, folders and patterns of text, local or URLs.
        tokenizer_folder: the tokenizer.
        folder: where the shards go; those of a part into a folder inside.
        workers: processes that tokenize.
        shard_text_bytes: bytes of text that close a shard; 1/64 of the inputs, between 1 and 32 MiB, if not given.
        part: takes this share of the input files only; all if not given.
        field: the field or column that holds the text.
        on_progress: called with the bytes of the input files as they are done.

    Raises:
        ConfigError: more parts than input files.
        DataError: an empty corpus (a part may be empty), inputs that cannot be read or whose documents would have the
            same names, a folder of other shards or texts or that another process is writing, or too little disk space.
    """
    all_files = input_files(inputs, field)
    _require_own_names(all_files)
    files: Sequence[InputFile] = all_files
    if part:
        require_parts_only(folder)
        folder, files = folder / part.folder, files_of(part, files)
    tokenizer = Tokenizer.load(tokenizer_folder)
    shard_text_bytes = shard_text_bytes or min(max(_text_bytes(all_files) // 64, 1 << 20), 1 << 25)
    header = ShardHeader(
        dtype=token_dtype(tokenizer.vocab_size),
        tokenizer_sha256=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        inputs_sha256=_inputs_digest(all_files),
        shard_text_bytes=shard_text_bytes,
        part=str(part) if part else None,
    )
    with alone(folder):
        if finished := open_folder(folder, header, files, on_progress):
            return finished
        require_space(folder, _space_needed(files, folder, header))
        try:
            write_json(folder / WRITING_FILE, asdict(header))
            finished_shards = _write_all(files, tokenizer_folder, folder, workers, shard_text_bytes, on_progress)
            # the files of a part may have no text; merging looks at all parts together
            if not finished_shards and part is None:
                names = sorted({file.name for file in files})
                raise DataError(f"{', '.join(names[:3])}: empty corpus, no text found")
            return _finish(folder, header, finished_shards, files)
        except OSError as error:
            raise DataError(f"{folder}: cannot be written ({error.strerror or error})") from None
        except BrokenProcessPool:
            raise DataError(
                f"{folder}: a worker process died, perhaps for lack of memory; "
                f"run the same command again to continue, with fewer workers"
            ) from None


def files_of(part: Part, files: Sequence[InputFile]) -> Sequence[InputFile]:
    """Return the files of a part; the parts hold about equally much text. Raises ConfigError for too few files."""
    return part.share(files, [_text_bytes([file]) for file in files])


def _write_all(
    files: Sequence[InputFile],
    tokenizer_folder: Path,
    folder: Path,
    workers: int,
    shard_text_bytes: int,
    on_progress: Callable[[int], None],
) -> list[FinishedShard]:
    """Write all shards and return them in order; at most two plans per worker are in memory."""
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    finished: list[FinishedShard] = []
    waiting: deque[tuple[ShardPlan, Future[ShardRecord]]] = deque()

    def collect() -> None:
        plan, future = waiting.popleft()
        record = future.result()
        finished.append((record.tar, np.array([tuple(row) for row in record.entries], dtype=DOCUMENT)))
        on_progress(sum(document.source_bytes for document in plan.documents))

    with _executor(workers, tokenizer_folder) as executor:
        for plan in _plans(files, shard_text_bytes):
            waiting.append((plan, executor.submit(_shard, plan, folder)))
            while len(waiting) > 2 * workers:
                collect()
        while waiting:
            collect()
    return finished


def _plans(files: Sequence[InputFile], shard_text_bytes: int) -> Iterator[ShardPlan]:
    """Group documents into shards of at least `shard_text_bytes`, the last one excepted."""
    first, size, group = 0, 0, list[Document]()
    numbers = itertools.count()
    for document in documents(files):
        group.append(document)
        size += len(document.text.encode())
        if size >= shard_text_bytes:
            yield ShardPlan(next(numbers), first, tuple(group))
            first, size, group = first + len(group), 0, []
    if group:
        yield ShardPlan(next(numbers), first, tuple(group))


class _InProcess(Executor):
    """Runs functions at once, in this process."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call `fn` and return its result as a future that is done."""
        future: Future[T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _executor(workers: int, tokenizer_folder: Path) -> Executor:
    """Start the worker processes; one worker is this process itself."""
    if workers == 1:
        _load_tokenizer(tokenizer_folder)
        return _InProcess()
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(tokenizer_folder,))


_tokenizers: dict[str, Tokenizer] = {}
"""The tokenizer of this process, under the key `current`."""


def _load_tokenizer(folder: Path) -> None:
    """Load the tokenizer of this process."""
    _tokenizers["current"] = Tokenizer.load(folder)


def _start_worker(tokenizer_folder: Path) -> None:
    """Leave interrupts to the parent, end with it even when it is killed, and use one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _load_tokenizer(tokenizer_folder)


def _end_with(parent: BaseProcess) -> None:
    """Wait for the end of the parent process, and end this one."""
    parent.join()
    os._exit(1)


def _shard(plan: ShardPlan, folder: Path) -> ShardRecord:
    """Write a shard and its record, or verify the one an earlier run left."""
    record_file = folder / RECORDS / f"{plan.file}.json"
    content = plan.content
    if record_file.exists() and (kept := _kept(folder, read_json(record_file), content)):
        return kept
    temporary = folder / f".{plan.file}.{os.getpid()}"
    with temporary.open("wb") as file:
        entries = _write_tar(file, plan)
        file.flush()
        os.fsync(file.fileno())
    tar = FileRecord(plan.file, temporary.stat().st_size, sha256_file(temporary))
    temporary.replace(folder / plan.file)
    record = ShardRecord(tar, content, entries)
    write_json(record_file, asdict(record))
    return record


def _kept(folder: Path, value: Mapping[str, Any], content: str) -> ShardRecord | None:
    """Return the record of a finished shard whose bytes and texts are still the same; None otherwise."""
    record = ShardRecord(FileRecord(**value["tar"]), value["content"], value["entries"])
    path = folder / record.tar.file
    same = record.content == content and path.is_file() and sha256_file(path) == record.tar.sha256
    return record if same else None


def _write_tar(file: BinaryIO, plan: ShardPlan) -> TableEntries:
    """Tokenize the documents into an uncompressed tar; return their entries of the document table."""
    tokenizer = _tokenizers["current"]
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    entries: TableEntries = []
    with TarFile(fileobj=file, mode="w") as tar:
        for number, document in enumerate(plan.documents, start=plan.first_document):
            text = document.text.encode()
            # of a text of 100 million characters, tokens of eight bytes each would not fit everywhere
            parts = [part.astype(dtype) for part in tokenizer.encode_parts(document.text)]
            tokens = np.concatenate([*parts, np.array([tokenizer.eos_id], dtype)], dtype=dtype)
            entries.append([plan.number, tar.offset + TAR_BLOCK, len(tokens), len(text)])
            meta = {
                "name": document.name,
                "text_bytes": len(text),
                "tokens": len(tokens),
                "text_sha256": hashlib.sha256(text).hexdigest(),
            }
            _add(tar, f"{key_of(number)}.tokens", tokens.tobytes())
            _add(tar, f"{key_of(number)}.json", json.dumps(meta, ensure_ascii=False).encode())
    return entries


def _add(tar: TarFile, name: str, data: bytes) -> None:
    """Add a member to a tar."""
    # no owner, time 0: equal texts give equal bytes
    member = TarInfo(name)
    member.size = len(data)
    tar.addfile(member, BytesIO(data))


def _finish(
    folder: Path, header: ShardHeader, finished: Sequence[FinishedShard], files: Sequence[InputFile]
) -> ShardIndex:
    """Write the document table and the index; then the folder is complete."""
    table = np.concatenate([np.empty(0, DOCUMENT), *(documents for _, documents in finished)])
    data = BytesIO()
    np.save(data, table, allow_pickle=False)
    write_bytes(folder / DOCUMENTS_FILE, data.getvalue())
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    index = ShardIndex(
        header=header,
        shards=tuple(record for record, _ in finished),
        documents_file=FileRecord(DOCUMENTS_FILE, len(data.getvalue()), digest),
        documents=len(table),
        tokens=int(table["tokens"].sum()),
        text_bytes=int(table["text_bytes"].sum()),
    )
    note_inputs(folder, files)
    write_json(folder / INDEX_FILE, index.to_dict())
    shutil.rmtree(folder / RECORDS)
    (folder / WRITING_FILE).unlink()
    return index


def _require_own_names(files: Sequence[InputFile]) -> None:
    """Raise DataError where documents of two files would have one name: evaluations tell documents apart by it."""
    known: dict[str, str] = {}
    for file in files:
        if file.name in known:
            raise DataError(
                f"{known[file.name]} and {file.path}: both would be called {file.name}; give a folder above both, or "
                "each file once"
            )
        known[file.name] = file.path


def _inputs_digest(files: Sequence[InputFile]) -> str:
    """Return a SHA-256 over names and sizes of the input files, and the field where it is not `text`."""
    listing = [[file.name, file.size] if file.field == "text" else [file.name, file.size, file.field] for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def _text_bytes(files: Sequence[InputFile]) -> int:
    """Return roughly the bytes of text in `files`."""
    return sum(file.size * expansion(file.name) for file in files)


def _space_needed(files: Sequence[InputFile], folder: Path, header: ShardHeader) -> int:
    """Return the bytes still to write if every token stands for two bytes of text."""
    written = sum(path.stat().st_size for path in folder.glob("shard-*.tar"))
    return max(_text_bytes(files) * np.dtype(header.dtype).itemsize // 2 - written, 0)
