"""Linear attention, one token and one head at a time: S += f(k) v^T; its normalizer z += f(k) as S's last column."""

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

    def begin(self, h: int) -> Tensor:
        """See `recurrence.Matrix.begin`."""
        S = super().begin(h)
        return torch.cat((S, torch.zeros(len(S), 1, dtype=torch.float64)), dim=1) if self.mixer.normalizer else S

    def write(self, S: Tensor, t: int, h: int, key: Tensor, value: Tensor) -> Tensor:
        """See `recurrence.Matrix.write`."""
        if not self.mixer.normalizer:
            return super().write(S, t, h, key, value)
        return torch.cat((super().write(S[:, :-1], t, h, key, value), S[:, -1:] + key[:, None]), dim=1)

    def read(self, S: Tensor, query: Tensor) -> Tensor:
        """See `recurrence.Matrix.read`."""
        if not self.mixer.normalizer:
            return super().read(S, query)
        return super().read(S[:, :-1], query) / sum(x * z for x, z in zip(query.tolist(), S[:, -1], strict=True))


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    return recurrence.run(mixer, model, weights, hidden, Memory)
