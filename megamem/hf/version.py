"""Whether the installed transformers is one this package is written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megamem.errors import DependencyError

OLDEST, TOO_NEW = (5, 10), (6, 0)
"""Releases from 5.10 on keep caches behind the interface `MegamemCache` implements; the next major one is unknown."""


def check_transformers() -> None:
    """Raise DependencyError if transformers is missing or outside of the supported range."""
    wanted = f"transformers>={'.'.join(map(str, OLDEST))},<{TOO_NEW[0]}"
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise DependencyError(f"transformers is not installed; pip install 'megamem[hf]' (it wants {wanted})") from None
    release = tuple(int(part) for part in found.split(".")[:2])
    if not OLDEST <= release < TOO_NEW:
        raise DependencyError(f"transformers {found} is not supported; install {wanted}")
