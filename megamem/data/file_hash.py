"""The hash of a large file of tokens, computed once and kept, so that a fingerprint can cover it."""

import contextlib
import hashlib
from pathlib import Path

from megamem.data.cache import locked
from megamem.errors import DataError
from megamem.files import read_json, sha256_file, write_json


def kept_hash(file: Path, folder: Path) -> str:
    """Return the SHA-256 of `file`; one process of a host reads it, and again only when it has changed.

    A change is seen by size and times; that of the inode cannot be set back.

    folder: keeps hashes; where it cannot be written the file is read each time.
    """
    state = file.stat()
    seen = str(file.absolute()), state.st_size, state.st_mtime_ns, state.st_ctime_ns
    key = hashlib.sha256(repr(seen).encode()).hexdigest()[:24]
    kept = folder / f"{key}.hash.json"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / f"{key}.lock"))
        with contextlib.suppress(DataError, KeyError):
            return str(read_json(kept)["sha256"])
        found = sha256_file(file)
        with contextlib.suppress(OSError):
            write_json(kept, {"file": str(file.absolute()), "sha256": found})
        return found
