"""HiPPO-LegS under approximate discretizations, for study: the matrices of a block by stepping through its tokens.

Forward, backward and bilinear rules freeze A/t and B/t of c' = -(A/t) c + (B/t) f over a step, at its start t; a step
that starts at t = 0 stores its token as a constant. They cost a triangular solve per token where zero-order hold
(`hippo.py`) has closed forms, and are less accurate. Source: "Towards Compressive and Scalable Recurrent Memory"
(Elastic Memory), appendix E.2 and table 12.

Letters of shapes: N order, M columns of the state. In each rule rate is A/t [N, N], state is c [N, M] and drive is
(B/t) f [N, M].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megamem.ops.tables import kept_table

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rate, state, drive) -> the state after a token."""


def legs(order: int) -> tuple[Tensor, Tensor]:
    """Return A [N, N] and B [N, 1] of HiPPO-LegS, float64."""
    B = (2 * torch.arange(order, dtype=torch.float64, device="cpu") + 1).sqrt()[:, None]
    return (B * B.T).tril(-1) + torch.diag(torch.arange(1, order + 1, dtype=torch.float64, device="cpu")), B


def forward(rate: Tensor, state: Tensor, drive: Tensor) -> Tensor:
    """Return the explicit Euler step c' = c - (A/t) c + (B/t) f [N, M]; unstable where N exceeds the tokens seen."""
    return state - rate @ state + drive


def backward(rate: Tensor, state: Tensor, drive: Tensor) -> Tensor:
    """Return the implicit Euler step c' [N, M] with (I + A/t) c' = c + (B/t) f."""
    identity = torch.eye(len(rate), dtype=rate.dtype, device="cpu")
    return torch.linalg.solve_triangular(identity + rate, state + drive, upper=False)


def bilinear(rate: Tensor, state: Tensor, drive: Tensor) -> Tensor:
    """Return the step of Tustin's rule [N, M]: half a step explicit, half implicit."""
    return backward(rate / 2, forward(rate / 2, state, drive), torch.zeros_like(drive))


RULES: dict[str, Rule] = {"forward": forward, "backward": backward, "bilinear": bilinear}


@kept_table(1)
def stepped(rule: str, order: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return P [N, N] and K [N, stop - start], float64, of a rule's recurrence over times start .. stop - 1."""
    A, B = legs(order)
    # columns: what each unit of the old state, then each token so far, has become
    columns = torch.eye(order, dtype=torch.float64, device="cpu")
    token = torch.zeros(order, 1, dtype=torch.float64, device="cpu")
    for t in range(start, stop):
        if t == 0:
            columns = torch.cat((torch.zeros_like(columns), token), dim=1)
            columns[0, -1] = 1.0
        else:
            drive = torch.zeros(order, columns.shape[1] + 1, dtype=torch.float64, device="cpu")
            drive[:, -1:] = B / t
            columns = RULES[rule](A / t, torch.cat((columns, token), dim=1), drive)
    return columns[:, :order].contiguous(), columns[:, order:].contiguous()
