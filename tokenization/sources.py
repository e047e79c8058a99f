"""The documents of inputs: files, folders and patterns such as `*.parquet`, local or behind a URL that fsspec knows."""

import json
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import fsspec

from megamem.errors import DataError, MegamemError
from megamem.patience import RETRY_S, is_missing, patiently, reason
from tokenization.readers import READERS, Document, InputFile, reader_of

STAMPS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "updated", "mtime")
"""Names under which stores say what changes with a file's content."""


def input_files(inputs: Sequence[str | Path], field: str = "text") -> list[InputFile]:
    """Return the readable files of files, folders (searched recursively) and patterns, sorted by name in each input.

    Args:
        inputs: paths or URLs; `*`, `**` and `[...]` make a pattern.
        field: the field or column that holds the text.

    Raises:
        DataError: an input does not exist, cannot be listed, or holds no readable file.
    """
    files: list[InputFile] = []
    for given in map(str, inputs):
        found = _remote_files(given) if "://" in given else _local_files(given)
        parent = _parent(given)
        readable = [
            InputFile(path, _absolute(path).removeprefix(parent).lstrip("/"), size, field, stamp)
            for path, (size, stamp) in found.items()
            if reader_of(path)
        ]
        if not readable:
            raise DataError(f"{given}: no readable file (known: {', '.join(READERS)})")
        files += sorted(readable, key=lambda file: file.name.split("/"))
    return files


def documents(files: Sequence[InputFile]) -> Iterator[Document]:
    """Yield the non-empty documents of `files` in order. Raises DataError naming a file (and line) it cannot read."""
    for file in files:
        reader = reader_of(file.path)
        assert reader is not None, file.path
        try:
            for document in reader(file):
                if document.text:
                    _require_writable(document.name)
                    yield document
        except MegamemError:
            raise
        except Exception as error:  # file systems raise errors of their own libraries
            raise DataError(f"{file.path}: cannot be read ({reason(error)})") from None


def _require_writable(name: str) -> None:
    """Raise DataError for the name of a document that the index of shards cannot hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{name!a}: a name that is not UTF-8; rename the file") from None


def _local_files(given: str) -> dict[str, tuple[int, str]]:
    """Return the local files that an input stands for, by path, with their bytes and stamps."""
    root = Path(given)
    if not root.exists():
        found = [Path(path) for path in glob(given, recursive=True)]
        if not found:
            raise DataError(f"{given}: no such file or folder")
    else:
        found = list(root.rglob("*")) if root.is_dir() else [root]
    states = {str(path): path.stat() for path in found if path.is_file()}
    # the time of the last change of an inode cannot be set, and copies and moves have one of their own
    return {path: (state.st_size, f"{state.st_mtime_ns} {state.st_ctime_ns}") for path, state in states.items()}


def _remote_files(given: str) -> dict[str, tuple[int, str]]:
    """Return the files behind an input's URL, by URL, with their bytes and stamps."""

    def listed() -> dict[str, tuple[int, str]]:
        # a listing that is remembered would hide what other processes write
        store, path = fsspec.core.url_to_fs(given, use_listings_cache=False)
        if _fixed(given) != given:
            found = store.glob(path, detail=True)
        elif reader_of(given):
            found = {path: store.info(path)}
        else:
            found = store.find(path, detail=True)
        facts = {name: fact for name, fact in found.items() if fact["type"] == "file"}
        if not facts and (_fixed(given) != given or not reader_of(given)):
            # a search passes over folders that cannot be listed; asked for by itself, the folder says why
            store.ls(store._strip_protocol(_fixed(given)))
        return {store.unstrip_protocol(name): (_size(store, name, fact), _stamp(fact)) for name, fact in facts.items()}

    try:
        files = patiently(given, listed, RETRY_S)
    except MegamemError:
        raise
    except Exception as error:  # file systems raise errors of their own libraries
        if not is_missing(error):
            raise DataError(f"{given}: cannot be listed ({reason(error)})") from None
        files = {}
    if not files:
        raise DataError(f"{given}: no such file or folder")
    return files


def _size(store: Any, name: str, fact: dict[str, Any]) -> int:  # fsspec ships no types
    """Return the bytes of a remote file. Raises ValueError where the store does not say."""
    size = fact["size"] if fact["size"] is not None else store.size(name)
    if size is None:
        raise ValueError(f"the store does not say how large {name} is")
    return int(size)


def _stamp(fact: dict[str, Any]) -> str:
    """Return what a store says of a file's content: its entity tag or version, or else times; empty if nothing."""
    said = {name: str(fact[name]) for name in STAMPS if fact.get(name)}
    return json.dumps(said) if said else ""


def _fixed(given: str) -> str:
    """Return what of an input comes before the first part that is a pattern; all of it if none is."""
    parts = given.split("/")
    first = next((i for i, part in enumerate(parts) if "*" in part or "[" in part), len(parts))
    return "/".join(parts[:first])


def _absolute(path: str) -> str:
    """Return the whole path of a file; a URL is whole."""
    return path if "://" in path else str(Path(path).absolute())


def _parent(given: str) -> str:
    """Return the folder above an input, which the names of its documents leave out, as the paths of its files begin."""
    if "://" not in given:
        root = given if Path(given).exists() else _fixed(given)
        return str(Path(root).absolute().parent)
    store, path = fsspec.core.url_to_fs(_fixed(given))
    return str(store.unstrip_protocol(path)).rstrip("/").rpartition("/")[0]
