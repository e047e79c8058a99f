"""The extension of griffe by which mkdocstrings reads docstrings (mkdocs.yml names it)."""

from __future__ import annotations

from typing import Any

import griffe

from docs.site.sections import with_sections


class Sections(griffe.Extension):
    """Brings docstrings into Google's style before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or field."""
        if obj.docstring is not None:
            obj.docstring.value = with_sections(obj.docstring.value)
