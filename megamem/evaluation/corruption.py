"""What a model knows without its local context: keys and values of a share of each block's tokens become noise.

Source: "Elastic Memory", section 3.6 and Table 7. The paper does not describe its noise: here it is normal, with the
mean and standard deviation that the keys (or values) of that head and row have over the block, so that it looks like
keys and values and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from megamem.config.evaluation import CorruptionConfig
from megamem.errors import ConfigError
from megamem.evaluation.probe import memory_layers
from megamem.memory.shared.block_attention import AttentionProjections
from megamem.model.stage import Stage

SEED = 20_250_625
Pair = tuple[Tensor, Tensor]


@contextmanager
def corrupted(stage: Stage, config: CorruptionConfig) -> Iterator[None]:
    """Within it, `stage` computes with a corrupted local context. The same seed each time.

    Tokens are drawn per row and call, alike in all heads and in keys and values. Raises: ConfigError where no layer has
    a local context that can be corrupted alone.
    """
    model = stage.config
    if config.share and stage.model_memories:
        raise ConfigError(
            f"evaluation.corruption: the memory of {model.architecture.kind} stands among the tokens that its layers "
            "attend to, and would become noise with them; only memories of layers can be told from the local context"
        )
    chosen = range(model.layers) if config.layers == "all" else memory_layers(model)
    if config.share and not chosen:
        raise ConfigError("evaluation.corruption.layers memory: no layer of the model has a memory; use all")
    with ExitStack() as stack:
        for name, mixer in stage.layer_components.items() if config.share else ():
            layer = int(name.removeprefix("layers."))
            if layer not in chosen:
                continue
            if not isinstance(mixer, AttentionProjections):
                kind = model.mixer_at(layer).kind
                raise ConfigError(
                    f"evaluation.corruption: {kind} (model layer {layer}) has no keys and values of a local context "
                    "that could be corrupted"
                )
            if config.remembered and not mixer.remembers_keys:
                raise ConfigError(
                    f"evaluation.corruption.remembered true: {model.mixer_at(layer).kind} (model layer {layer}) writes "
                    "its memory from hidden vectors, not from keys and values; use false"
                )
            stack.enter_context(_installed(mixer, _Noise(config.share, layer, mixer), config.remembered))
        yield


@contextmanager
def _installed(
    mixer: AttentionProjections, noise: Callable[[Tensor, Tensor], Pair], remembered: bool
) -> Iterator[None]:
    """Put `noise`, which maps keys and values [tokens, batch, local heads, head_dim], into a mixer for a while."""
    name = "project" if remembered else "local"
    clean = mixer.project

    def project(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = clean(hidden)
        return query, *noise(key, value)

    setattr(mixer, name, project if remembered else noise)
    try:
        yield
    finally:
        delattr(mixer, name)


class _Noise:
    """Replaces the keys and values of a share of the tokens of [tokens, batch, local heads, width]."""

    def __init__(self, share: float, layer: int, mixer: AttentionProjections) -> None:
        self.share, self.mixer = share, mixer
        self.generator = torch.Generator().manual_seed(SEED + layer)

    def __call__(self, keys: Tensor, values: Tensor) -> Pair:
        """Replace chosen tokens of keys and values [tokens, batch, local heads, head_dim]."""
        tokens, rows = keys.shape[:2]
        order = torch.rand(tokens, rows, generator=self.generator).argsort(0).argsort(0)
        chosen = (order < round(self.share * tokens)).to(keys.device)[..., None, None]
        return torch.where(chosen, self._like(keys), keys), torch.where(chosen, self._like(values), values)

    def _like(self, x: Tensor) -> Tensor:
        """Draw noise with the mean and deviation of x [tokens, batch, local heads, head_dim], by row and head."""
        linears = self.mixer.linears
        # drawn for the heads of all ranks, so that a layout changes nothing
        heads = x.shape[2] * linears.tp_size
        drawn = torch.randn(*x.shape[:2], heads, x.shape[3], generator=self.generator)
        own = drawn[:, :, linears.tp_rank * x.shape[2] : (linears.tp_rank + 1) * x.shape[2]].to(x.device, torch.float32)
        over = x.float()
        mean, std = over.mean((0, 3), keepdim=True), over.std((0, 3), keepdim=True)
        return (mean + std * own).to(x.dtype)
