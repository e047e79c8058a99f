"""Spikes: steps whose loss or gradient norm lies far above those of the steps before. Their update is skipped.

The rule of OLMo 2 (OLMo et al. 2024): mean and standard deviation over the last steps, skipped ones included. So a loss
that rises for good, as after a change of the data, soon is the mean: with k deviations, after at most about one step in
1 + k^2 of the window.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SpikeGuard:
    """The last steps' losses and gradient norms on the device; the host does not wait for what is found in them."""

    def __init__(self, deviations: float, window: int, device: torch.device) -> None:
        """Begin without any steps.

        Args:
            deviations: standard deviations above the mean from which on a step is a spike.
            window: steps that mean and deviation are taken over; half of them must be there.
            device: where the figures are.
        """
        self.deviations, self.window = deviations, window
        self.history = torch.full((window, 2), torch.nan, dtype=torch.float64, device=device)
        """Loss and gradient norm of the last steps, the newest last; NaN where there was no step or nothing finite."""

    def clear(self) -> None:
        """Forget all steps."""
        self.history = torch.full_like(self.history, torch.nan)

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1.0 if a step is a spike, else 0.0 (FP32 scalar on the device), and remember the step.

        loss, grad_norm: float64 scalars of the whole batch, the same on all ranks. Those that are not finite are no
            spike, and are not remembered.
        """
        latest = torch.stack([loss, grad_norm])
        known = self.history.isfinite()
        count = known.sum(0)
        mean = torch.where(known, self.history, 0.0).sum(0) / count.clamp(min=1)
        squares = torch.where(known, (self.history - mean).square(), 0.0).sum(0)
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        far = (latest - mean > self.deviations * deviation) & (count >= self.window // 2)
        finite = latest.isfinite()
        self.history = torch.cat([self.history[1:], torch.where(finite, latest, torch.nan)[None]])
        return (far.any() & finite.all()).float()
