"""Maximal update parametrization as a configuration: what a narrower base model looks like."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import PositiveInt, ValidationError

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

    def base_sizes(
        self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, ffn_size: int | None
    ) -> dict[str, int | None]:
        """Return the sizes of the base model of a model with these, by field.

        Raises: ValueError naming the field if one of them is no whole number.
        """

        def narrowed(name: str, size: int) -> int:
            """Return a size as much smaller as the base model is narrower."""
            return share(name, size * self.base_width, hidden_size)

        base_heads = self.base_heads or narrowed("heads", heads)
        return {
            "hidden_size": self.base_width,
            "heads": base_heads,
            "kv_heads": self.base_kv_heads or share("kv_heads", kv_heads * base_heads, heads),
            "head_dim": share("head_dim", narrowed("heads * head_dim", heads * head_dim), base_heads),
            "ffn_size": self.base_ffn_size or (ffn_size and narrowed("ffn_size", ffn_size)),
        }


def share(name: str, amount: int, parts: int) -> int:
    """Return amount / parts. Raises ValueError naming the size if that is no whole number."""
    if amount % parts:
        raise ValueError(f"{name} would be {amount / parts:g}; give another base_width, base_heads or base_kv_heads")
    return amount // parts


def check_base(mup: MupConfig, build: Callable[[], object]) -> None:
    """Raise ValueError where the base model is none. build: parses it, which raises ValueError if it is not valid."""
    try:
        build()
    except ValueError as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        message = reason.removeprefix("Value error, ")
        raise ValueError(f"mup: base_width {mup.base_width} gives no base model: {message}") from None
