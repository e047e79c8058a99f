"""What the first stage keeps of a document's newest tokens, for side rows that are made of them."""

from __future__ import annotations

from megamem.memory.base import TensorSpec

RECENT_EMBEDDINGS = "embeddings"
"""Name of the tensor."""


def recent_specs(count: int) -> dict[str, TensorSpec]:
    """Declare what the newest `count` tokens were embedded as, the newest last and zeros where none have come yet.

    Every rank holds them whole.
    """
    return {RECENT_EMBEDDINGS: TensorSpec((count, "batch", "hidden"))}
