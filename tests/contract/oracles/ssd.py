"""SSD, one token and one head at a time: S = exp(-d exp(A)) S + d k v^T, and D v past the memory."""

from __future__ import annotations

import math

from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer


class Memory(recurrence.Matrix):
    """Matrix memories that fade at the rate of each token."""

    def write(self, S: Tensor, t: int, h: int, key: Tensor, value: Tensor) -> Tensor:
        """See `recurrence.Matrix.write`."""
        weights = self.weights
        token = weights["token_step.weight.weight"][h] @ self.hidden[t] + weights["token_step.start"][h]
        step = recurrence.softplus(float(token))
        fades = math.exp(-step * math.exp(float(weights["log_pace.value"][h])))
        return fades * S + step * key[:, None] * value[None, :]

    def beside(self, value: Tensor, h: int) -> Tensor:
        """See `recurrence.Matrix.beside`: D v."""
        return float(self.weights["skip.value"][h]) * value


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    return recurrence.run(mixer, model, weights, hidden, Memory)
