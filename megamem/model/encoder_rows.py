"""What goes up a pipeline beside the tokens that a decoder will read: a chunk as far as it is encoded, or its memories.

Letters of shapes: T tokens of this rank, N tokens of a chunk, R rows beside the tokens, B batch rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.parallel.linears import Linears, token_share


def finished_chunk(embedded: Tensor, open_before: Tensor, size: int | None, linears: Linears) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens of a chunk that a call ends, and what stays open.

    Args:
        embedded: this rank's tokens of the call [T, B, width].
        open_before: tokens of the chunk before the call, all of them [tokens, B, width].
        size: N where the call ends the chunk; None where it does not.
        linears: how tokens are split over ranks.
    Returns: [N or this rank's share of it, B, width], without tokens where the chunk goes on; the tokens of the open
        chunk, all of them.
    """
    # a call that is the whole chunk needs no other rank's tokens
    alone = size == embedded.shape[0] * token_share(linears)[1]
    whole = embedded if alone else torch.cat((open_before, linears.join_tokens(embedded)))
    if size is None:
        return embedded[:0], whole
    nothing = whole.new_zeros(0, *whole.shape[1:])
    if alone:
        return embedded, nothing
    # left padding may begin inside a chunk: nobody reads what becomes of it
    return linears.split_tokens(F.pad(whole, (0, 0, 0, 0, size - whole.shape[0], 0))), nothing


def joined(beside: Tensor, hidden: Tensor) -> Tensor:
    """Return rows [R, B, width] and tokens [T, B, hidden_size] in one tensor [R + T, B, the greater width].

    The narrower ones are filled up with zeros.
    """
    width = max(beside.shape[-1], hidden.shape[-1])
    return torch.cat([F.pad(part, (0, width - part.shape[-1])) for part in (beside, hidden)])


def apart(x: Tensor, tokens: int, width: int, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Undo `joined`: rows [R, B, width] and tokens [T, B, hidden_size] of x [R + T, B, the greater width]."""
    beside, hidden = x.split((x.shape[0] - tokens, tokens))
    return beside[..., :width], hidden[..., :hidden_size]
