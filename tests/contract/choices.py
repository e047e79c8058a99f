"""Discrete choices of a run, recorded and made again in another run of the same code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Choices(TorchFunctionMode):
    """While it is entered, `topk` records which indices it takes or, given some, takes those, in order.

    indices: what was taken. agreements: for each replayed `topk`, the share of its own choice that the given one has.
    """

    def __init__(self, given: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.given = None if given is None else list(given)
        self.indices: list[Tensor] = []
        self.agreements: list[float] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        found = function(*arguments, **(keywords or {}))
        if function not in (torch.topk, Tensor.topk):
            return found
        if self.given is not None:
            taken, own = self.given.pop(0), found.indices
            assert taken.shape == own.shape, "another run of the same code chooses in the same places"
            self.agreements.append((own[..., :, None] == taken[..., None, :]).any(-1).double().mean().item())
            found = torch.return_types.topk((arguments[0].gather(-1, taken), taken))
        self.indices.append(found.indices)
        return found
