"""Shards written in parts: each of N processes takes a share of the input files, and one index covers all parts.

Part K of N is the folder `part-KKKK-of-NNNN` inside the shards' folder, itself a folder of token shards. Parts are
consecutive runs of the files, so that documents keep their order whatever N is. Merging copies no shard.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np

from megamem.errors import ConfigError, DataError
from megamem.files import sha256_file, write_json
from tokenization.shard_format import (
    DOCUMENT,
    DOCUMENTS_FILE,
    INDEX_FILE,
    FileRecord,
    ShardHeader,
    ShardIndex,
    difference,
)

T = TypeVar("T")
_NAME = re.compile(r"part-(\d{4,})-of-(\d{4,})")


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`, counted from 1."""

    number: int
    """Which part."""
    count: int
    """How many parts there are."""

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Read `K/N`. Raises ConfigError for anything else."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        part = cls(int(match[1]), int(match[2])) if match else None
        if part is None or not 1 <= part.number <= part.count:
            raise ConfigError(f"--part {text}: not K/N with K from 1 to N, such as 3/8")
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"part-{self.number:04d}-of-{self.count:04d}"

    def share(self, items: Sequence[T], sizes: Sequence[int]) -> Sequence[T]:
        """Return the consecutive items of this part, such that the parts' sums of `sizes` are about equal.

        Raises:
            ConfigError: there are fewer items than parts.
        """
        if len(items) < self.count:
            raise ConfigError(f"--part {self}: there are {len(items)} input files; use at most as many parts")
        before = np.array([0, *accumulate(sizes)])
        borders = [0]
        for k in range(1, self.count):
            nearest = int(np.abs(before - before[-1] * k / self.count).argmin())
            # every part has a file
            borders.append(min(max(nearest, borders[-1] + 1), len(items) - (self.count - k)))
        return items[slice(*[*borders, len(items)][self.number - 1 : self.number + 1])]


def merge_parts(folder: Path) -> ShardIndex:
    """Write the index over all parts in `folder` and return it; then the folder reads like any other of shards.

    Raises:
        DataError: a part is missing, unfinished, damaged, or of other inputs or another tokenizer than the first; or
            no part holds a document.
    """
    parts = _parts(folder)
    require_parts_only(folder)
    indexes = [_finished(folder, part) for part in parts]
    header = indexes[0].header
    for part, index in zip(parts, indexes, strict=True):
        _require_same(folder / part.folder, index.header, header, parts[0])
    if not any(index.documents for index in indexes):
        raise DataError(f"{folder}: empty corpus, no part holds a document")
    shards = [
        replace(record, file=f"{part.folder}/{record.file}")
        for part, index in zip(parts, indexes, strict=True)
        for record in index.shards
    ]
    for record in shards:
        path = folder / record.file
        if not path.is_file() or path.stat().st_size != record.size:
            raise DataError(f"{path}: missing or of another size than its index says")
    try:
        documents_file = _merge_tables(folder, parts, indexes)
        merged = ShardIndex(
            header=replace(header, part=None),
            shards=tuple(shards),
            documents_file=documents_file,
            documents=sum(index.documents for index in indexes),
            tokens=sum(index.tokens for index in indexes),
            text_bytes=sum(index.text_bytes for index in indexes),
            first_documents=(0, *accumulate(index.documents for index in indexes[:-1])),
        )
        write_json(folder / INDEX_FILE, merged.to_dict())
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error})") from None
    return merged


def require_parts_only(folder: Path) -> None:
    """Raise DataError if a folder for parts holds shards of its own, whose index a merge would replace."""
    if next(folder.glob("shard-*.tar"), None):
        raise DataError(f"{folder}: holds shards that are in no part; choose another folder for parts")


def _parts(folder: Path) -> list[Part]:
    """Return all parts in order. Raises DataError where one is missing, or parts of several divisions are there."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = {Part(int(match[1]), int(match[2])) for name in names if (match := _NAME.fullmatch(name))}
    counts = sorted({part.count for part in found})
    if not counts:
        raise DataError(f"{folder}: holds no part of token shards; `megamem shards write --part K/N` writes one")
    if len(counts) > 1:
        raise DataError(f"{folder}: holds parts of {' and of '.join(map(str, counts))}; remove those of one division")
    return [Part(number, counts[0]) for number in range(1, counts[0] + 1)]


def _finished(folder: Path, part: Part) -> ShardIndex:
    """Return the index of a part. Raises DataError naming a part that is missing or unfinished."""
    path = folder / part.folder / INDEX_FILE
    if not path.is_file():
        state = "not finished" if path.parent.exists() else "missing"
        raise DataError(f"{path.parent}: part {part} is {state}; run `megamem shards write` with --part {part}")
    index = ShardIndex.parse(path.read_bytes(), str(path))
    if index.header.part != str(part):
        raise DataError(f"{path.parent}: holds part {index.header.part}, not {part}")
    return index


def _require_same(folder: Path, header: ShardHeader, first: ShardHeader, first_part: Part) -> None:
    """Raise DataError unless a part's header is that of the first part but for the part itself."""
    for name, expected in vars(first).items():
        found = getattr(header, name)
        if name != "part" and found != expected:
            what, this, other = difference(name, found, expected)
            raise DataError(f"{folder}: written with {what} ({this}) than part {first_part} ({other})")


def _merge_tables(folder: Path, parts: Sequence[Part], indexes: Sequence[ShardIndex]) -> FileRecord:
    """Write one table of the documents of all parts, part by part, and return its record."""
    temporary = folder / f".{DOCUMENTS_FILE}.{os.getpid()}"
    table = np.lib.format.open_memmap(temporary, "w+", DOCUMENT, (sum(index.documents for index in indexes),))
    document = shard = 0
    for part, index in zip(parts, indexes, strict=True):
        path = folder / part.folder / index.documents_file.file
        if not path.is_file() or sha256_file(path) != index.documents_file.sha256:
            raise DataError(f"{path}: missing or damaged: its SHA-256 is not the one in {INDEX_FILE}")
        rows = table[document : document + index.documents]
        rows[:] = np.load(path, mmap_mode="r", allow_pickle=False)
        rows["shard"] += shard
        document, shard = document + index.documents, shard + len(index.shards)
    table.flush()
    del table
    record = FileRecord(DOCUMENTS_FILE, temporary.stat().st_size, sha256_file(temporary))
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(folder / DOCUMENTS_FILE)
    return record
