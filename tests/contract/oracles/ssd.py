"""SSD, one token and one head at a time: S = exp(-d exp(A)) S + d k v^T, and D v past the memory."""

from __future__ import annotations

import math

from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer


class Memory(recurrence.Matrix):
    def write(self, memory, t: int, h: int, key: Tensor, value: Tensor):
        S, _ = memory if isinstance(memory, tuple) else (memory, None)
        weights = self.weights
        token = weights["token_step.weight.weight"][h] @ self.hidden[t] + weights["token_step.start"][h]
        step = recurrence.softplus(float(token))
        fades = math.exp(-step * math.exp(float(weights["log_pace.value"][h])))
        return fades * S + step * key[:, None] * value[None, :], float(weights["skip.value"][h]) * value

    def read(self, memory, query: Tensor) -> Tensor:
        return super().read(memory[0], query) + memory[1]

    def state(self, memories, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return super().state([S for S, _ in memories], keys, values)


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    return recurrence.run(mixer, model, weights, hidden, Memory)
