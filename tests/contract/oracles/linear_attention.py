"""Linear attention, one token and one head at a time: S += f(k) v^T."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer


class Memory(recurrence.Matrix):
    """Matrix memories that are sums of outer products."""

    def prepare(self, vector: Tensor, t: int) -> Tensor:
        """See `recurrence.Matrix.prepare`."""
        if self.mixer.features == "identity":
            return vector
        return torch.tensor([x + 1 if x > 0 else math.exp(x) for x in vector.tolist()], dtype=torch.float64)


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    return recurrence.run(mixer, model, weights, hidden, Memory)
