"""The forward pass of a group of Memora's inner chunks: writing one after the other, reading all at once.

The equations are those of `simplex.py` and `simplex_group.py`.
Letters of shapes: B batch rows, H key/value heads, N inner chunks, T tokens of each, Q queries of each (T times those
that share a head), D width of a head, I inner width of the network.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.ops.deep_memory.network import Weights
from megamem.ops.deep_memory.products import product_into, subtract_product
from megamem.ops.deep_memory.simplex import SimplexNetwork, row_sum


class Tokens(NamedTuple):
    """Tokens of a group of inner chunks, [B, H, N, T, D] each."""

    key: Tensor
    value: Tensor
    rate: Tensor
    log_decay: Tensor | None
    """None: there are no decays; so with the following."""
    fade: Tensor | None
    """f, the product of an inner chunk's decays, [B, H, N, D]."""
    after: Tensor | None
    """a, that of the decays after each token."""
    weight: Tensor | None
    """That of the norm, [H, D]."""


class Written(NamedTuple):
    """What writing the inner chunks of a group has made."""

    up: list[Tensor]
    """log W of each inner chunk [B, H, I, D]; where there are no decays, L."""
    down: list[Tensor]
    """The last matrix's L, [B, H, D, I]."""
    first: list[Tensor]
    """W [B, H, I, D]"""
    last: list[Tensor]
    """V [B, H, D, I]"""
    entropies: list[Tensor]
    """E [B, H, I, D]; empty without decays, as the next two."""
    shift: list[Tensor]
    """s [B, H, T, I]"""
    along: list[Tensor]
    """u [B, H, T, I]"""
    hidden: Tensor
    """z [B, H, N, T, I]"""
    active: Tensor
    """h [B, H, N, T, I]"""
    back: Tensor
    """r V [B, H, N, T, I]"""
    change: Tensor
    """d [B, H, N, T, I]"""
    answered: Tensor
    """What the last matrix makes of the keys, [B, H, N, T, D]."""
    wrong: Tensor
    """r [B, H, N, T, D]"""
    steps: Steps


class Steps(NamedTuple):
    """What tokens contribute, without the weights: [B, H, N, T, D] each."""

    share: Tensor
    """a b, or b without decays."""
    key: Tensor
    """a b k"""
    rated: Tensor | None
    """b k / c; None without decays, as the next one."""
    lost: Tensor | None
    """(decay - 1) / c"""


def _steps(tokens: Tokens, scale: float) -> Steps:
    """Return what tokens contribute; scale: c of the first matrix."""
    if tokens.log_decay is None or tokens.after is None:
        return Steps(tokens.rate, tokens.rate * tokens.key, None, None)
    share, rated = tokens.after * tokens.rate, tokens.rate * tokens.key
    return Steps(share, tokens.after * rated, rated / scale, tokens.log_decay.expm1() / scale)


def write(network: SimplexNetwork, tokens: Tokens, logs: Weights) -> tuple[Written, Weights]:
    """Write inner chunks one after the other.

    logs: L as the first one starts, [B, H, I, D] and [B, H, D, I].
    Returns: what each has made; L after the last one.
    """
    key, pointwise, scales = tokens.key, network.pointwise, [row_sum(x, network.scale) for x in logs]
    steps = _steps(tokens, scales[0])
    hidden, active, back, change = (key.new_empty(*key.shape[:-1], logs[0].shape[-2]) for _ in range(4))
    answered, wrong = torch.empty_like(key), torch.empty_like(key)
    made = Written([], [], [], [], [], [], [], hidden, active, back, change, answered, wrong, steps)
    up, down = logs
    for n in range(key.shape[2]):
        if steps.lost is None:
            exact, first = up, pointwise.simplex(up, scales[0])
        else:
            exact, first, entropies = pointwise.distribution(up, scales[0])
            made.entropies.append(entropies)
        last = pointwise.simplex(down, scales[1])
        for series, x in ((made.up, exact), (made.down, down), (made.first, first), (made.last, last)):
            series.append(x)
        product_into(hidden[:, :, n], key[:, :, n], first.mT)
        torch.ops.aten.gelu.out(hidden[:, :, n], out=active[:, :, n])
        product_into(answered[:, :, n], active[:, :, n], last.mT)
        wrong[:, :, n] = pointwise.output_error(
            answered[:, :, n], key[:, :, n], tokens.value[:, :, n], "l2", network.residual, network.norm
        )
        product_into(back[:, :, n], wrong[:, :, n], last)
        torch.mul(back[:, :, n], pointwise.gelu_slope(hidden[:, :, n]), out=change[:, :, n])
        up, down = _after(tokens, made, n)
    return made, (up, down)


def _after(tokens: Tokens, made: Written, n: int) -> Weights:
    """Return L after inner chunk n, [B, H, I, D] and [B, H, D, I], and keep what shifts its first matrix's rows."""
    steps, change = made.steps, made.change[:, :, n]
    wrong = steps.share[:, :, n] * made.wrong[:, :, n]
    if tokens.fade is None or tokens.after is None or steps.rated is None or steps.lost is None:
        up, down = torch.empty_like(made.up[n]), torch.empty_like(made.down[n])
        subtract_product(made.up[n], change.mT, steps.key[:, :, n], out=up)
        subtract_product(made.down[n], wrong.mT, made.active[:, :, n], out=down)
        return up, down
    along, shift = torch.empty_like(change), torch.empty_like(change)
    product_into(along, steps.rated[:, :, n], made.first[n].mT)
    product_into(shift, steps.lost[:, :, n], made.entropies[n].mT)
    shift.addcmul_(change, along, value=-1)
    made.along.append(along)
    made.shift.append(shift)
    up = tokens.fade[:, :, n, None, :] * made.up[n]
    subtract_product(up, change.mT, steps.key[:, :, n], out=up)
    subtract_product(up, shift.mT, tokens.after[:, :, n], out=up)
    down = tokens.fade[:, :, n, :, None] * made.down[n]
    subtract_product(down, wrong.mT, made.active[:, :, n], out=down)
    return up, down


class Answers(NamedTuple):
    """What queries are answered, and what is made on the way."""

    answered: Tensor
    """What the last matrix makes, before the norm, [B, H, N, Q, D]."""
    by_weights: Tensor
    """The part of it that the weights after the first token make."""
    up: Tensor
    """log W as inner chunks start, or L, [B, H, N, I, D]."""
    down: Tensor
    """[B, H, N, D, I]"""
    first: Tensor
    """W after the first token, [B, H, N, I, D]."""
    last: Tensor
    """V after the first token, [B, H, N, D, I]."""
    hidden: Tensor
    """[B, H, N, Q, I]"""
    active: Tensor
    """[B, H, N, Q, I]"""
    scores: Tensor
    """Products of queries and the first matrix's inputs, [B, H, N, Q, T]."""
    across: Tensor
    """Products of `active` and the last matrix's inputs, [B, H, N, Q, T]."""
    later_key: Tensor
    """Rates times keys of the tokens after the first, [B, H, N, T, D]."""
    later_wrong: Tensor
    """Rates times r of the tokens after the first, [B, H, N, T, D]."""


def read(network: SimplexNetwork, query: Tensor, tokens: Tokens, written: Written) -> Answers:
    """Return what queries [B, H, N, Q, D] of all inner chunks are answered."""
    pointwise = network.pointwise
    up, down = (torch.stack(x, 2) if len(x) > 1 else x[0][:, :, None] for x in (written.up, written.down))
    fade = first_decay(tokens)
    key_step, wrong_step = (tokens.rate[..., :1, :] * x[..., :1, :] for x in (tokens.key, written.wrong))
    own_change, own_active = written.change[..., :1, :], written.active[..., :1, :]
    # W and V after the first token, exact
    moved = _minus_outer(up if fade is None else fade[..., None, :] * up, own_change, key_step)
    first = pointwise.simplex(moved, row_sum(up, network.scale))
    moved = _minus_outer(down if fade is None else fade[..., :, None] * down, wrong_step, own_active)
    last = pointwise.simplex(moved, row_sum(down, network.scale))
    later = tokens.rate.clone()
    later[..., 0, :] = 0.0
    later_key, later_wrong = later * tokens.key, later * written.wrong
    scores = causal(query @ later_key.mT)
    hidden = query @ first.mT
    subtract_product(hidden, scores, written.change, out=hidden)
    active = F.gelu(hidden)
    across = causal(active @ written.active.mT)
    by_weights = active @ last.mT
    answered = by_weights - across @ later_wrong
    return Answers(
        answered, by_weights, up, down, first, last, hidden, active, scores, across, later_key, later_wrong
    )  # fmt: skip


def first_decay(tokens: Tokens) -> Tensor | None:
    """Return the decays of each inner chunk's first token, [B, H, N, D]."""
    return None if tokens.log_decay is None else tokens.log_decay[..., 0, :].exp()


def _minus_outer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return x - a^T b; x: [..., out, in]; a: [..., 1, out]; b: [..., 1, in]."""
    return torch.addcmul(x, a.mT, b, value=-1)


def causal(scores: Tensor) -> Tensor:
    """Let no query see later tokens, in place: scores [B, H, N, Q, T], of all heads beside each other."""
    scores.unflatten(-2, (-1, scores.shape[-1])).tril_()
    return scores
