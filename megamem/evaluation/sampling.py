"""How the next token of a continuation is chosen.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Only so many of the likeliest tokens; all if not given."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability (Holtzman et al. 2020)."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the value that makes no sense."""
        if self.temperature < 0:
            raise ValueError(f"temperature {self.temperature} is negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} leaves no token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not in (0, 1]")

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Next token of each row [B] from logits [B, V], float32 on the CPU."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.double() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.softmax(-1).sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # the first token that reaches it is kept
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
