"""Links of the repository's pages as they are on the site."""

from __future__ import annotations

import posixpath
import re

from docs.site.reference import REFERENCE

ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
}
"""Where files at the root of the repository stand on the site."""
SOURCES = {uri: path for path, uri in ROOT_PAGES.items()}
MODULES = {module: uri for uri, page in REFERENCE.items() for module in page.modules}
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+)")
CODE_OF_MODULE = re.compile(r"(?<!\[)`((?:megamem|tokenization|checkpoints|launchers)/[\w/]+)\.py`(?!\])")


def site_links(text: str, uri: str) -> str:
    """Return a page with its links as the site needs them; the name of a module's file leads to its reference.

    uri: where the page stands on the site.
    """
    folder = posixpath.dirname(uri) or "."

    def lead(match: re.Match[str]) -> str:
        return match[1] + _target(match[2], uri, folder)

    def refer(match: re.Match[str]) -> str:
        module = match[1].replace("/", ".")
        there = MODULES.get(module)
        return match[0] if there is None else f"[{match[0]}]({posixpath.relpath(there, folder)}#{module})"

    parts = FENCED.split(text)  # every other one is a block of code, which stays as it is
    return "".join(
        part if index % 2 else CODE_OF_MODULE.sub(refer, LINK.sub(lead, part)) for index, part in enumerate(parts)
    )


def _target(target: str, uri: str, folder: str) -> str:
    """Return where a link of the page at `uri` leads; mkdocs warns of what is not on the site."""
    if re.match(r"\w+:", target):
        return target
    source = SOURCES.get(uri, f"docs/{uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return posixpath.relpath(ROOT_PAGES.get(path, path.removeprefix("docs/")), folder)
