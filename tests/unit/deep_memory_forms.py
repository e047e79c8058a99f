"""The forms of deep memories in which Triton's kernels are compared with torch: each option with others and without.

`make test` runs the first of each list, `MEGAMEM_CASES=all` all of them: the interpreter takes seconds for each.
"""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
_ALL = os.environ.get("MEGAMEM_CASES") == "all"


def _chosen(count: int, *forms: T) -> tuple[T, ...]:
    """Return all forms, or the first `count` of them."""
    return forms if _ALL else forms[:count]


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


class KeptForm(NamedTuple):
    """How kept networks are read."""

    name: str
    selected: bool = False
    """Whether a query reads two of them."""
    eps: float | None = 1e-3
    spans: tuple[tuple[int, int], ...] = ()
    products: str = "float64"
    exact: str = "float64"
    """The dtype of shares, matrices and sums."""


FORMS = _chosen(
    3,
    Form("l2", True, True, True, True),  # Titans
    Form("dot", True, True, False, False),  # DLA
    Form("dot", False, False, True, False),
    Form("l2", True, False, False, False),
    Form("l2", False, True, False, True),
    Form("dot", True, False, True, True),
)


class MemoraForm(NamedTuple):
    """What a network of distributions is."""

    name: str
    decay: bool = True
    norm: bool = True
    residual: bool = True
    scale: float | None = None


MEMORA_FORMS = _chosen(
    2,
    MemoraForm("memora"),
    MemoraForm("memora, rows of another sum", scale=2.0, residual=False),
    MemoraForm("memora, decays alone", norm=False, residual=False),
    MemoraForm("memora, norm alone", decay=False, residual=False),
    MemoraForm("memora, neither", decay=False, norm=False),
)
KEPT_FORMS = _chosen(
    4,
    # of one nobody reads
    KeptForm("kept, in turn", spans=((0, 21), (5, 21), (9, 9), (3, 17))),
    KeptForm("selected", selected=True),
    # the interpreter does not multiply BF16 numbers
    KeptForm("kept, in half precision", products="float16", exact="float32"),
    KeptForm("selected, in half precision", selected=True, products="float16", exact="float32"),
    KeptForm("kept"),
    KeptForm("kept, no norm", eps=None),
    KeptForm("selected, no norm", selected=True, eps=None),
)
_CACHING = {"kind": "memory_caching", "memory": {"kind": "dla", "inner_chunk": 4, "expansion": 2}, "segment": 8}
LAYERS: dict[str, dict[str, Any]] = {
    "a layer of titans": {"kind": "titans", "inner_chunk": 4, "expansion": 2},
    "a layer of memora": {"kind": "memora", "inner_chunk": 4, "expansion": 2},
    "a layer of gated caching": {**_CACHING, "combine": "grm"},
    "a layer of selected caching": {**_CACHING, "combine": "ssc", "top_k": 2},
}
"""Whole layers, of which the kernels compute what they have a part in."""
