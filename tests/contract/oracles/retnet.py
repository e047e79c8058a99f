"""RetNet, one token and one head at a time: S = (1 - 2^(-5-h)) S + k v^T, queries and keys rotated by position."""

from __future__ import annotations

from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer, rotary


class Memory(recurrence.Matrix):
    """Matrix memories that fade at the rate of their head."""

    def prepare(self, vector: Tensor, t: int) -> Tensor:
        """See `recurrence.Matrix.prepare`."""
        return rotary(vector, t, self.model.rope_theta)

    def write(self, S: Tensor, t: int, h: int, key: Tensor, value: Tensor) -> Tensor:
        """See `recurrence.Matrix.write`."""
        return (1 - 2.0 ** (-5 - h)) * S + key[:, None] * value[None, :]


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    return recurrence.run(mixer, model, weights, hidden, Memory)
