"""Log-linear attention over matrix memories whose levels fade, in products of many segments' tokens at once.

Guo et al., "Log-Linear Attention", 2025, section 3: all levels and the open memory obey the same linear recurrence, so
what a token reads of another's value is the recurrence's own coefficient times the gate of the level that the other is
in by then. With A, Q', K' and P as in `ops/linear_recurrence/unrolled.py`, S^(m) the open memory and the levels before
the tokens, and l(t, s) the place in which token t finds a source s, a token or such a memory:

    y_t = sum_{i <= t} g_t^(l(t, i)) A[t, i] v_i + sum_m g_t^(l(t, m)) S^(m)T q'_t
    S^(l) = P sum_{m in l} S^(m) + sum_{i in l} k'_i v_i^T         behind the tokens

Letters of shapes as in `log_linear.py`, and S sources, which are the open memory, the levels and the tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.memory.base import State, to_device
from megamem.memory.composite.levels import Levels, Places, sources
from megamem.memory.composite.log_linear_settings import LogLinearSettings
from megamem.memory.composite.open_and_levels import OpenAndLevels
from megamem.memory.recurrent.base import Inputs
from megamem.memory.recurrent.matrix import MatrixConfig, MatrixMixer
from megamem.memory.shared.blocks import BlockSlice
from megamem.ops.deep_memory.kept import shared_product
from megamem.ops.linear_recurrence.unrolled import passed
from megamem.parallel.linears import Linears


class FadedMatrices(OpenAndLevels):
    """A matrix memory of the open segment, and levels that fade as it does."""

    def __init__(self, config: LogLinearSettings, model: ModelConfig, linears: Linears, layer: int) -> None:
        assert isinstance(config.recurrent, MatrixConfig)
        super().__init__(config, model, linears, layer, step=config.recurrent.inner_chunk)
        self.segment = config.segment

    def read(self, inputs: Inputs, gates: Tensor, state: State, block_slice: BlockSlice) -> tuple[Tensor, State]:
        """See `OpenAndLevels.read`."""
        assert isinstance(self.memory, MatrixMixer)
        where = (self.levels, self.segment, block_slice.starts, inputs.tokens)
        held, _, after = sources(*where)
        memories = 1 + self.levels.count
        # how much each source counts to each token, [B, H, G, T, S]
        places = _places_read(*where, gates.device)[:, None, None].expand(*gates.shape[:4], -1)
        shares = gates.gather(-1, places)
        unrolled, value = self.memory.unrolled(inputs), self.memory.written(inputs).to(gates.dtype)
        read = (shares[..., memories:] * unrolled.of_values) @ value[:, :, None]
        left: dict[int, Tensor] = {}
        if held:
            before = torch.stack([self._before(state, place) for place in held], dim=2)
            of_held = torch.stack([shares[..., place] for place in held], dim=-1)
            read = read + shared_product(unrolled.of_state, before, of_held)
            fading = unrolled.transition
            before = passed(None if fading is None else fading[:, :, None], before)
            left = dict(zip(held, before.unbind(2), strict=True))
        memory, *merged = [self._place(place, left, unrolled.writes, value, after) for place in range(memories)]
        return read, {**state, "memory": memory, "level_memory": torch.stack(merged, dim=2)}

    def _before(self, state: State, place: int) -> Tensor:
        """Return what a place holds before the tokens: the open memory, or level `place` - 1, [B, H, D, V]."""
        memory: Tensor = state["level_memory"][:, :, place - 1] if place else state["memory"]
        return memory

    def _place(self, place: int, left: dict[int, Tensor], writes: Tensor, value: Tensor, after: Places) -> Tensor:
        """Return what a place holds behind the tokens, [B, H, D, V].

        Args:
            place: 0 for the open memory, 1 + l for level l.
            left: what is left of the open memory and the levels that held something before, by place, [B, H, D, V].
            writes, value: the key and the value that each token leaves, [B, H, T, D] and [B, H, T, V].
            after: `Sources.after`.
        """
        here = value.new_zeros(*value.shape[:2], writes.shape[-1], value.shape[-1])
        for source, memory in left.items():
            rows = after[:, source] == place
            if rows.all():
                here = here + memory
            elif rows.any():
                here = here + memory * to_device(rows, memory.device, memory.dtype)[:, None, None, None]
        tokens = after[:, 1 + self.levels.count :] == place
        if tokens.all():
            return here + writes.mT @ value
        if tokens.any():
            here = here + (writes * to_device(tokens, writes.device, writes.dtype)[:, None, :, None]).mT @ value
        return here


@lru_cache(maxsize=64)
def _places_read(
    levels: Levels, segment: int, starts: tuple[int, ...], tokens: int, device: torch.device
) -> Tensor:  # fmt: skip
    """Return `Sources.read` on a device, int64 [B, T, S]; cached, as all layers ask for the same."""
    with torch.inference_mode(False):
        return to_device(sources(levels, segment, starts, tokens).read, device)
