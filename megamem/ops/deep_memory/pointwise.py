"""The functions of a deep memory that are no matrix products: number by number, or row by row.

On a device each of their operations reads and writes all of its numbers; `training.compile` makes one kernel of each
function. Letters of shapes as in `group_forward.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamem.ops.deep_memory.error import (
    error_gradients,
    norm_gradients,
    output_error,
    standardized,
    standardized_gradients,
)


def gelu_slope(x: Tensor) -> Tensor:
    """Return the derivative of the (exact) GELU x P(x), P(x) + x p(x) with p the normal density, at x [..., width]."""
    slope: Tensor = torch.ops.aten.gelu_backward(torch.ones((), dtype=x.dtype, device=x.device).expand_as(x), x)
    return slope


def gelu_curve(x: Tensor) -> Tensor:
    """Return the second derivative of GELU, p(x) (2 - x^2), at x [..., width]."""
    square = x.square()
    density = (-0.5 * square).exp_()
    return density.mul_(square.sub_(2.0).mul_(-0.3989422804014327))  # 1 over sqrt(2 pi)


def faded(
    weights: Tensor, momentum: Tensor | None, lost: Tensor | None, carried: Tensor | None, momentum_kept: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return what an inner chunk leaves of W and S, W + c W + m S and e S; all [B, H, out, in].

    lost, carried, momentum_kept: c, m and e, [B, H, 1, 1]; None for what there is not.
    """
    kept = weights if lost is None else torch.addcmul(weights, lost, weights)
    if momentum is None or carried is None or momentum_kept is None:
        return kept, None
    return torch.addcmul(kept, carried, momentum), momentum_kept * momentum


def shared(out: Tensor, first: Tensor | None, by_momentum: Tensor | None, carried: Tensor | None) -> Tensor:
    """Return beta_t x_t W^T + m_t x_t S^T, given both products [B, H, N, Q, out]; beta and m: [B, H, N, Q, 1]."""
    kept = out if first is None else first * out
    return kept if by_momentum is None or carried is None else torch.addcmul(kept, carried, by_momentum)


class SharedGradients(NamedTuple):
    """Gradients of `shared`, as far as they go through x."""

    x: Tensor
    """[B, H, N, Q, in]"""
    first: Tensor | None
    """[B, H, N, Q, 1]"""
    carried: Tensor | None
    """[B, H, N, Q, 1]"""


def shared_gradients(
    x: Tensor, of_x: Tensor, first: Tensor | None, by_momentum: Tensor | None, carried: Tensor | None
) -> SharedGradients:
    """Return the gradients of `shared`.

    x: [B, H, N, Q, in]; of_x: the gradient of the result times W, and by_momentum: times S, both like x.
    """
    of_first = None if first is None else (x * of_x).sum(-1, keepdim=True)
    total = of_x if first is None else first * of_x
    if by_momentum is None or carried is None:
        return SharedGradients(total, of_first, None)
    of_carried = (x * by_momentum).sum(-1, keepdim=True)
    return SharedGradients(torch.addcmul(total, carried, by_momentum), of_first, of_carried)


def faded_gradients(
    of_weights: Tensor, of_momentum: Tensor | None, weights: Tensor, momentum: Tensor | None, lost: Tensor | None,
    carried: Tensor | None, momentum_kept: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of `faded`: of W and S [B, H, out, in], c, m and e [B, H, 1, 1].

    of_weights, of_momentum: those of its results, [B, H, out, in]; the rest as in `faded`.
    """
    total, of_lost = of_weights, None
    if lost is not None:
        of_lost = (of_weights * weights).sum((-2, -1), keepdim=True)
        total = torch.addcmul(of_weights, lost, of_weights)
    if momentum is None or of_momentum is None or carried is None or momentum_kept is None:
        return total, None, of_lost, None, None
    of_carried = (of_weights * momentum).sum((-2, -1), keepdim=True)
    of_kept = (of_momentum * momentum).sum((-2, -1), keepdim=True)
    return total, (carried * of_weights).addcmul_(momentum_kept, of_momentum), of_lost, of_carried, of_kept


class StepGradients(NamedTuple):
    """What `subtract_outer` hands on to the narrower factor of its outer products, and of the shares."""

    narrow: Tensor
    """The factor's, with what there was of it, [B, H, T, width]."""
    share: Tensor
    """[B, H, T, 1]"""
    shared: Tensor
    """The factor times its share, [B, H, T, width]."""


def step_gradients(of_narrow: Tensor, share: Tensor, narrow: Tensor, slope: Tensor) -> StepGradients:
    """Return the gradients of the factor and its share.

    Args:
        of_narrow: what there is of the factor's gradient already, [B, H, T, width].
        share: [B, H, T, 1].
        narrow: the factor, [B, H, T, width].
        slope: the product of the other factor and the gradient of the matrix, [B, H, T, width].
    """
    of_share = -(narrow * slope).sum(-1, keepdim=True)
    return StepGradients(torch.addcmul(of_narrow, share, slope, value=-1), of_share, share * narrow)


def hidden_gradients(of_change: Tensor, hidden: Tensor, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of W1^T r and z, given that of d = (W1^T r) s'(z), and s'(z); all [B, H, T, I].

    hidden, back: z and W1^T r.
    """
    slope = gelu_slope(hidden)
    return of_change * slope, gelu_curve(hidden).mul_(of_change).mul_(back), slope


def weighed(made: Tensor, share: Tensor, eps: float | None) -> Tensor:
    """Return what a kept network's last matrix makes, normalized, times the share of each row that reads it.

    Args:
        made: m [B, H, R, V].
        share: w [B, H, R, 1], in the dtype of the result.
        eps: the number added to the layer norm's variance; None: there is no norm.
    """
    exact = made.to(share.dtype)
    return share * (exact if eps is None else standardized(exact, eps))


def weighed_gradients(of_out: Tensor, made: Tensor, share: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of `weighed`: of m [B, H, R, V], in its dtype, and of the share [B, H, R, 1].

    of_out: that of the result, [B, H, R, V].
    """
    exact = made.to(share.dtype)
    if eps is None:
        return (share * of_out).to(made.dtype), (of_out * exact).sum(-1, keepdim=True)
    of_made, normed = standardized_gradients(share * of_out, exact, eps)
    return of_made.to(made.dtype), (of_out * normed).sum(-1, keepdim=True)


def kept_answer(made: Tensor, weight: Tensor | None, total: Tensor, query: Tensor | None) -> Tensor:
    """Return g m + w q: what kept networks answer, given the sum m of what each makes times its share.

    Args:
        made: m [B, H, G, T, D].
        weight: that of the norm, g [H, D]; None: there is no norm.
        total: the sum of the shares, w [B, H, G, T, 1].
        query: [B, H, G, T, D]; None: networks have no term x.
    """
    weighted = made if weight is None else made * weight[:, None, None]
    return weighted if query is None else torch.addcmul(weighted, total, query.to(made.dtype))


def changed(added: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return what has been added to a matrix whose values went from `first` to `last`; all [B, H, out, in]."""
    return added + (last - first)


def start_gradient(of_first: Tensor, of_last: Tensor) -> Tensor:
    """Return the gradient of the start [H, out, in], which `changed` subtracts again; both [B, H, out, in]."""
    return (of_first - of_last).sum(0)


def simplex(logs: Tensor, scale: float) -> Tensor:
    """Return c softmax(L) of logarithms L [..., out, in]; scale: c."""
    return scale * logs.softmax(-1)


def simplex_gradients(of_weights: Tensor, weights: Tensor, along: Tensor) -> Tensor:
    """Return the gradient of L [..., out, in], given that of W = c softmax(L).

    of_weights, weights: [..., out, in]; along: the sum of a row's weights times their gradients, over c [..., out, 1].
    """
    return weights * (of_weights - along)


def distribution(logs: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log W, W = c softmax(L) and W log W of logarithms L [..., out, in]; scale: c."""
    exact = logs.log_softmax(-1) + math.log(scale)
    weights = exact.exp()
    return exact, weights, weights * exact


def distribution_gradients(
    of_weights: Tensor, of_entropies: Tensor, exact: Tensor, weights: Tensor, of_exact: Tensor, of_next: Tensor,
    fade: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of L [..., out, in], of which log W times f is kept, and that of f [..., in].

    Args:
        of_weights, of_entropies, of_exact: gradients of W, W log W and log W, [..., out, in].
        exact, weights: log W and W, [..., out, in].
        of_next: that of what is kept, [..., out, in].
        fade: f [..., 1, in].
        scale: c.
    """
    total = torch.addcmul(of_exact, fade, of_next)
    total = total.addcmul_(weights, torch.addcmul(of_weights, 1 + exact, of_entropies))
    along = total.sum(-1, keepdim=True) / scale
    return torch.addcmul(total, weights, along, value=-1), (of_next * exact).sum(-2)


class Pointwise(NamedTuple):
    """The functions above and those of `error.py`, compiled or not."""

    gelu_slope: Callable[..., Any] = gelu_slope
    faded: Callable[..., Any] = faded
    shared: Callable[..., Any] = shared
    shared_gradients: Callable[..., Any] = shared_gradients
    faded_gradients: Callable[..., Any] = faded_gradients
    step_gradients: Callable[..., Any] = step_gradients
    hidden_gradients: Callable[..., Any] = hidden_gradients
    output_error: Callable[..., Any] = output_error
    error_gradients: Callable[..., Any] = error_gradients
    norm_gradients: Callable[..., Any] = norm_gradients
    weighed: Callable[..., Any] = weighed
    weighed_gradients: Callable[..., Any] = weighed_gradients
    kept_answer: Callable[..., Any] = kept_answer
    changed: Callable[..., Any] = changed
    start_gradient: Callable[..., Any] = start_gradient
    simplex: Callable[..., Any] = simplex
    simplex_gradients: Callable[..., Any] = simplex_gradients
    distribution: Callable[..., Any] = distribution
    distribution_gradients: Callable[..., Any] = distribution_gradients


PLAIN = Pointwise()
