"""Log-linear attention: memories of segments that double in length, merged as a binary counter carries (Fenwick tree).

Guo et al., "Log-Linear Attention", 2025, and its form over deep memories in the comparison of "Memory Caching: RNNs
with Growing Memory" (Behrouz et al.). After n segments, level l holds the memory of 2^l of them if bit l of n is set;
the open segment is read besides:

    y_t = g_t M_t(q_t) + sum_l g_t^(l) M^(l)(q_t),   g_t^(l) = softplus(c_l w_l . x_t), per head

A segment that ends is merged with the levels it carries into: after segment n + 1 the levels below the lowest zero bit
of n are emptied, and all they held lies in that level. What two segments have written adds up,

    change(both) = change(later) + kept(later) change(earlier),   kept = product of the decays of the later one's tokens

which is exactly what reading both in one go gives a linear memory; for a deep one the gradients of each were taken at
its own weights. Segments of one token over linear attention are the published mechanism.

Letters of shapes: B batch rows, H local key/value heads, G query heads that share one of them, T tokens, D head_dim, V
width of a head's values.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from megamem.config.cost import Flops, product
from megamem.config.model import MIXERS, AnyMixer, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec, TensorSpec, to_device
from megamem.memory.recurrent.base import Inputs, RecurrentConfig, RecurrentMixer, SegmentedConfig
from megamem.memory.shared.blocks import BlockSlice, block_slices
from megamem.parallel.linears import Linears, constant, declare, normal


@MIXERS.register
class LogLinearConfig(SegmentedConfig):
    """Log-linear attention: a recurrent memory's segments, merged into ever longer ones, each level with a gate."""

    kind: Literal["log_linear"] = "log_linear"
    """`log_linear`"""
    unfit: ClassVar[str] = "cannot be merged"
    memory: AnyMixer
    """The recurrent memory: linear_attention, dla or titans, with its own fields."""
    segment: PositiveInt = 64
    """Tokens of the shortest segments. Divides model.chunk_size."""
    levels: PositiveInt = 8
    """Lengths of merged segments: 1, 2, 4 ... times `segment`; the last level takes in all that is older."""

    @classmethod
    def fits(cls, memory: type[MixerConfig]) -> bool:
        """See `SegmentedConfig.fits`."""
        return issubclass(memory, RecurrentConfig) and memory.mergeable

    def merged(self, model: ModelConfig) -> list[str]:
        """Name the state tensors of the memory that segments leave behind: what is written, momentum left out."""
        return list(self.recurrent.snapshot_shapes(model))

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the open memory and the levels, each with the sum of the logarithms of the decays of its tokens."""
        own = self.recurrent.state_specs(model)
        specs: dict[str, TensorSpec] = {}
        for name in self.merged(model):
            spec = own[name]
            assert isinstance(spec, TensorSpec)
            shape = (*spec.shape[:2], self.levels, *spec.shape[2:])
            specs[f"level_{name}"] = TensorSpec(shape, spec.dtype, spec.shard)
        return {
            **own,
            **specs,
            "log_kept": TensorSpec(("batch", "kv_heads"), "float32", shard="kv_heads"),
            "level_log_kept": TensorSpec(("batch", "kv_heads", self.levels), "float32", shard="kv_heads"),
        }

    def occupied(self, segments: int) -> list[int]:
        """Return the levels that hold something after so many segments: its set bits, higher ones as the last level."""
        last = self.levels - 1
        return [n for n in range(self.levels) if (segments >> n) & 1 or (n == last and segments >> n)]

    def projection_parameters(self, model: ModelConfig) -> int:
        """Count those of the memory, and of the gates."""
        gates = model.hidden_size * model.heads * (self.levels + 1)
        return self.recurrent.projection_parameters(model) + gates

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count those of the memory, and the factors of the gates."""
        return self.recurrent.extra_parameters(model) + model.heads * (self.levels + 1)

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`; `memory_levels` counts what merged segments answer."""
        parts = self.recurrent.memory_flops(model, sequence_length, causal, min(self.segment, sequence_length))
        segments = -(-sequence_length // self.segment)
        read = sum(len(self.occupied(n)) for n in range(segments)) / segments
        sizes = sum(rows * columns for rows, columns in self.recurrent.snapshot_shapes(model).values())
        return {**parts, "memory_levels": product(2 * model.heads * sizes * read)}

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> LogLinear:
        """See `MixerConfig.build`."""
        return LogLinear(self, model, linears, layer)


class LevelGates(nn.Module):
    """The gates softplus(c_l w_l . x) of each token, head and level, that of the open segment first."""

    def __init__(self, model: ModelConfig, linears: Linears, count: int) -> None:
        super().__init__()
        self.weight = linears.column(model.hidden_size, model.heads * count, normal(model.init_std))
        local = model.heads // linears.tp_size
        self.factor = declare(nn.Parameter(torch.empty(local, count)), constant(1.0), shard_axis=0)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Map x [T, B, hidden_size] to gates [B, local heads, T, 1 + levels] in `dtype`."""
        projected = self.weight(x).to(dtype).unflatten(-1, self.factor.shape)
        return F.softplus(self.factor.to(dtype) * projected).permute(1, 2, 0, 3)


class LogLinear(Mixer):
    """A recurrent memory of the open segment, and merged ones of those before it."""

    reads_borders = True

    def __init__(self, config: LogLinearConfig, model: ModelConfig, linears: Linears, layer: int) -> None:
        memory = config.recurrent.build(model, linears, layer)
        assert isinstance(memory, RecurrentMixer)
        super().__init__(config.state_specs(model), memory.sizes, linears.tp_size)
        self.config = config
        self.linears = linears
        self.memory = memory
        self.names = config.merged(model)
        self.level_gates = LevelGates(model, linears, config.levels + 1)

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x = self.linears.enter(hidden)
        inputs, after = self.memory.inputs(x, state, chunk)
        gates = self.level_gates(x, state["log_kept"].dtype).unflatten(1, (-1, self.memory.groups))
        reads = []
        for block_slice in block_slices(chunk, inputs.tokens, self.config.segment):
            state = self.reset_inside(state, block_slice.begin, block_slice.starts, inputs.key)
            part = slice(block_slice.begin, block_slice.end)
            here = inputs.part(part)
            read, memory = self.memory.recur(here, state, Chunk(block_slice.starts))
            own = gates[..., part, :1] * read
            read = own + self._levels(here, gates[..., part, 1:], state, block_slice)
            state = {**state, **memory}
            if "log_decay" in here.gates:
                state["log_kept"] = state["log_kept"] + here.gates["log_decay"].sum(2)
            if any(block_slice.closing):
                state = self._close(state, block_slice)
            reads.append(read)
        read = torch.cat(reads, dim=-2) if len(reads) > 1 else reads[0]
        return self.memory.finish(read, x, inputs), {**state, **after}, {}

    def _finished(self, block_slice: BlockSlice) -> list[int]:
        """Return the number of segments before the open one, for each row."""
        return [max(start, 0) // self.config.segment for start in block_slice.starts]

    def _levels(self, inputs: Inputs, gates: Tensor, state: State, block_slice: BlockSlice) -> Tensor:
        """Return the sum of what the levels answer times their gates, [B, H, G, T, V].

        inputs: of the tokens that ask; gates: [B, H, G, T, levels].
        """
        holding = [self.config.occupied(count) for count in self._finished(block_slice)]
        answers = gates.new_zeros(())
        for level in sorted({level for row in holding for level in row}):
            share = gates[..., level, None]
            # rows whose level is empty read nothing of it
            if not all(level in row for row in holding):
                share = share * to_device([level in row for row in holding], share.device, share.dtype).view(
                    -1, *[1] * (share.ndim - 1)
                )
            held = {name: state[f"level_{name}"][:, :, level] for name in self.names}
            kept = self.memory.snapshot(held, inputs.parameters)
            answers = answers + self.memory.answer(inputs, [matrix[:, :, None] for matrix in kept], share)
        return answers

    def _close(self, state: State, block_slice: BlockSlice) -> State:
        """Merge the memory of rows whose segment ends into their levels, and begin their next segment.

        The ended segment moves up level by level, as a carry does: at each level below its target it takes in what that
        level holds and leaves it empty; at its target, which is empty unless it is the last, it stays.
        """
        counts = self._finished(block_slice)
        last = self.config.levels - 1
        # target: the lowest zero bit of the row's count of segments; -1 for rows whose segment goes on
        target = [min((~count & (count + 1)).bit_length() - 1, last) for count in counts]
        target = [level if closing else -1 for level, closing in zip(target, block_slice.closing, strict=True)]
        device = state["log_kept"].device
        carried = {name: state[name][:, :, None] for name in self.names} | {"log_kept": state["log_kept"][:, :, None]}
        new: dict[str, list[Tensor]] = {name: [] for name in carried}
        for level in range(last + 1):
            held = {name: state[f"level_{name}"][:, :, level : level + 1] for name in carried}
            here, below = [t == level for t in target], [t > level for t in target]
            # a segment that passes this level takes it in, and so does one that stays at the last level
            merging = [b or (h and level == last) for h, b in zip(here, below, strict=True)]
            if any(merging):
                carried = _select(merging, self._merged(held, carried), carried, device)
            left = _select(below, {name: torch.zeros_like(x) for name, x in held.items()}, held, device)
            for name, tensor in _select(here, carried, left, device).items():
                new[name].append(tensor)
        closing = list(block_slice.closing)
        fresh = {name: torch.zeros_like(state[name]) for name in ("log_kept", *self.memory.renewed())}
        return {
            **state,
            **{f"level_{name}": torch.cat(parts, dim=2) for name, parts in new.items()},
            **_select(closing, fresh, {name: state[name] for name in fresh}, device),
        }

    def _merged(self, earlier: State, later: State) -> State:
        """Return what two segments have written, one after the other, and the decays of both."""
        kept = later["log_kept"].exp()
        changes = {
            name: later[name] + kept.view(*kept.shape, *[1] * (later[name].ndim - kept.ndim)) * earlier[name]
            for name in self.names
        }
        return {**changes, "log_kept": earlier["log_kept"] + later["log_kept"]}


def _select(rows: list[bool], yes: State, no: State, device: torch.device) -> State:
    """Return a state that is `yes` in the rows that are true, and `no` in the others."""
    if all(rows):
        return yes
    if not any(rows):
        return no
    mask = to_device(rows, device, torch.bool)
    return {name: torch.where(mask.view(-1, *[1] * (x.ndim - 1)), x, no[name]) for name, x in yes.items()}
