"""The forms of deep memories in which Triton's kernels are compared with torch: each option with others and without."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Form(NamedTuple):
    """What a memory is."""

    loss: Literal["l2", "dot"]
    residual: bool
    norm: bool
    decay: bool
    momentum: bool

    @property
    def name(self) -> str:
        """The loss and what there is besides."""
        return " ".join((self.loss, *(name for name in self._fields[1:] if getattr(self, name))))


FORMS = (
    Form("l2", True, True, True, True),  # Titans
    Form("dot", True, True, False, False),  # DLA
    Form("dot", False, False, True, False),
    Form("l2", True, False, False, False),
    Form("l2", False, True, False, True),
    Form("dot", True, False, True, True),
)
