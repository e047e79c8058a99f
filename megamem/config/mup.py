"""Maximal update parametrization as a configuration: what a narrower base model looks like."""

from __future__ import annotations

from pydantic import PositiveInt

from megamem.config.base import ConfigModel


class MupConfig(ConfigModel):
    """Maximal update parametrization (Tensor Programs V, Yang et al. 2022): what a narrower base model looks like.

    At the base model's shape nothing differs from the standard parametrization.
    """

    base_width: PositiveInt
    """hidden_size of the base model, for which optimizer.lr and init_std are meant."""
    base_heads: PositiveInt | None = None
    """Heads of the base model; if not given, as many fewer as it is narrower, so that head_dim does not grow."""
    base_kv_heads: PositiveInt | None = None
    """Key/value heads of the base model; if not given, so that as many query heads share one."""
    base_ffn_size: PositiveInt | None = None
    """Inner width of the base model's MLP; if not given, as much less as it is narrower, or by the rule of ffn_size."""


def share(name: str, amount: int, parts: int) -> int:
    """Return amount / parts. Raises ValueError naming the size if that is no whole number."""
    if amount % parts:
        raise ValueError(f"{name} would be {amount / parts:g}; give another base_width, base_heads or base_kv_heads")
    return amount // parts
