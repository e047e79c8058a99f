"""DeltaNet, one token and one head at a time: S = a (S - b k (k^T S)) + b k v^T."""

from __future__ import annotations

import math

from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer


class Memory(recurrence.Matrix):
    """Matrix memories written by the delta rule."""

    def prepare(self, vector: Tensor, t: int) -> Tensor:
        """See `recurrence.Matrix.prepare`."""
        return recurrence.unit(vector)

    def write(self, S: Tensor, t: int, h: int, key: Tensor, value: Tensor) -> Tensor:
        """See `recurrence.Matrix.write`."""
        weights, token = self.weights, self.hidden[t]
        rate = recurrence.sigmoid(float(weights["rate.weight.weight"][h] @ token + weights["rate.start"][h]))
        fades = 1.0
        if self.mixer.decay:
            pace = math.exp(float(weights["decay.log_pace"][h]))
            projected = weights["decay.token.weight.weight"][h] @ token + weights["decay.token.start"][h]
            fades = math.exp(-pace * recurrence.softplus(float(projected)))
        known = self.read(S, key)
        return fades * (S - rate * key[:, None] * known[None, :]) + rate * key[:, None] * value[None, :]


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    return recurrence.run(mixer, model, weights, hidden, Memory)
