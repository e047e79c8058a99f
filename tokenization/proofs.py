"""The corpus of formal proofs: the chapters of Metamath's `set.mm`, from the Debian or Ubuntu package archive.

Theorems cite others by label, often from millions of tokens before: text that rewards a memory. CC0. Nothing of the
package is installed; only the database is read out of it.
"""

from __future__ import annotations

import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from megamem.errors import DataError
from megamem.files import sha256_file

PACKAGE, VERSION = "metamath-databases", "0.0.0~20210101.git55fe226-2"
MEMBER = "./usr/share/metamath/databases/set.mm"
SHA256 = "4d93307bc81337a621031739acfffb4159175f94fb90e727f4a231401091e45b"
LICENCE = "CC0"
EXPECTED_BYTES = 140_000_000
"""Bytes of package, database and extracted text, rounded up."""
HELD_OUT_EVERY = 10
"""One chapter in so many is held out."""
_CHAPTER = re.compile(r"^#\*#\*[#*]+\n\s*(.+)\n#\*#\*", re.MULTILINE)


def download(folder: Path) -> Path:
    """Download `set.mm` into `folder` and check it. Raises DataError without apt or that version of the package."""
    try:
        result = subprocess.run(
            ["apt-get", "download", f"{PACKAGE}={VERSION}"], cwd=folder, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise DataError("corpus proofs is a Debian package and needs apt-get; take books or speeches") from None
    found = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if result.returncode != 0 or not found:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise DataError(f"apt-get download {PACKAGE}={VERSION} failed: {reason}")
    database = folder / "set.mm"
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(found[0])], stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.name == MEMBER and (content := archive.extractfile(member)):
                database.write_bytes(content.read())
    if not database.is_file() or (digest := sha256_file(database)) != SHA256:
        raise DataError(f"{found[0].name}: {MEMBER} is {'missing' if not database.is_file() else digest}, not {SHA256}")
    return database


def documents(database: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each chapter in order; the name tells number and title."""
    text = database.read_text(encoding="utf-8")
    chapters = list(_CHAPTER.finditer(text))
    ends = [*(chapter.start() for chapter in chapters[1:]), len(text)]
    for number, (chapter, end) in enumerate(zip(chapters, ends, strict=True)):
        title = re.sub(r"[^a-z0-9]+", "-", chapter[1].strip().lower()).strip("-")[:60]
        yield f"proofs-{number:03d}-{title}", text[chapter.start() : end].rstrip() + "\n"


def split_of(name: str) -> str:
    """Return the split of a chapter: every tenth is held out, and the largest one is the test of long context."""
    number = int(name.split("-")[1])
    if "mathbox-for-norm-megill" in name:
        return "test"
    return "validation" if number % HELD_OUT_EVERY == 4 else "train"
