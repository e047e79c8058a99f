"""AdamW whose update the ranks skip together when anything is not finite, without the host waiting; its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamem.config.optimizer import OptimizerConfig
from megamem.parallel.linears import info


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    new_parameters: Collection[str] = (),
    least: int = 0,
) -> list[dict[str, Any]]:
    """AdamW groups by each parameter's declaration, with and without decay, and by whether it is new.

    `lr_scale` of a group is its learning rate over the run's. A rate that follows the width leaves its product with the
    weight decay as it is, as that of a new parameter does not.

    least: groups are cut in two until there are so many. DeepSpeed reduces over all stages group by group, so they need
        as many each.
    """
    scale = 1.0 if config.new_parameters_lr is None else config.new_parameters_lr / config.lr
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        declared = info(parameter)
        decay = config.weight_decay / declared.lr_scale if declared.decay else 0.0
        rate = declared.lr_scale * (scale if name in new_parameters else 1.0)
        groups.setdefault((decay, rate), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0], reverse=True)  # with decay first
    made: list[dict[str, Any]] = [
        {"params": p, "weight_decay": decay, "lr_scale": rate} for (decay, rate), p in ordered
    ]
    while len(made) < least:
        largest = max(range(len(made)), key=lambda i: len(made[i]["params"]))
        params = made[largest]["params"]
        middle = len(params) // 2
        made[largest : largest + 1] = [{**made[largest], "params": p} for p in (params[:middle], params[middle:])]
    return made


class AgreeingAdamW(torch.optim.AdamW):
    """Fused AdamW that looks at the gradients it is given (DeepSpeed's FP32 partitions) before it uses them.

    The ranks agree by one all-reduce of two scalars; the fused kernel then skips the update on the device, step count
    included, through its `found_inf` argument (what torch's GradScaler uses). The host learns of it when it logs.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self.own_bad: Tensor | None = None
        """0/1 scalar set by the caller before a step: this rank has seen something that is not finite."""
        self.bad: Tensor | None = None
        """0/1 scalar after a step: some rank had a non-finite loss or gradient, nobody updated."""
        self.find_spike: Callable[[], Tensor] | None = None
        """Set by the caller: returns a 0/1 scalar, whether this step is a spike. Asked once a step, when the gradient
        norm is known, where `spike` was set to None before."""
        self.spike: Tensor | None = None
        """0/1 scalar after a step: some rank found it a spike, nobody updated."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update, or agree not to. DeepSpeed calls it with the gradients in place."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        device = grads[0].device if grads else self.param_groups[0]["params"][0].device
        bad = torch.zeros((), device=device) if self.own_bad is None else self.own_bad.to(device)
        if grads:
            norms = torch.stack([norm.float() for norm in torch._foreach_norm(grads)])
            bad = torch.maximum(bad, 1 - norms.isfinite().all().float())
        if self.spike is None:
            self.spike = torch.zeros_like(bad) if self.find_spike is None else self.find_spike()
        flags = torch.stack([bad, self.spike])
        if dist.is_initialized():
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        bad, self.spike = flags.unbind()
        self.bad = bad if self.bad is None else torch.maximum(self.bad, bad)
        self.found_inf, self.grad_scale = flags.max(), None
        super().step()


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0) of `steps`.

    A linear warm-up, then a cosine down to lr * min_lr_ratio; or the peak, until the last steps go down to it.
    """
    warmup = config.warmup(steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    else:
        share = _decayed(config, step, steps)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def _decayed(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return how much is left of the way from the peak to the last rate, from 1 to 0, at a step after the warm-up."""
    decay = config.decay(steps)
    if (first := steps - decay) > step:
        return 1.0
    progress = min((step + 1 - first) / decay, 1.0)
    return 1 - (math.sqrt(progress) if config.decay_shape == "1-sqrt" else progress)
