"""Log-linear attention: memories of segments that double in length, merged as a counter carries.

Guo et al., "Log-Linear Attention", 2025, and its form over deep memories in the comparison of "Memory Caching: RNNs
with Growing Memory" (Behrouz et al.). `levels.py` says which segments each level holds; the open one is read besides:

    y_t = g_t M_t(q_t) + sum_l g_t^(l) M^(l)(q_t),   g_t^(l) = softplus(c_l w_l . x_t), per head

A segment that ends is merged with the levels it carries into. What two have written adds up, less what the later one's
tokens have left of the earlier one, their transition P (decays, or the delta rule's matrix):

    change(both) = change(later) + P(later) change(earlier),   P(both) = P(later) P(earlier)

which is exactly what reading both in one go gives a linear memory; for a deep one the gradients of each were taken at
its own weights. Levels go on as they were (`closed: kept`), or fade with each token (`faded`):

    change(level) <- P(token) change(level),   of a deep memory towards the weights that documents start from

Segments of one token, faded, over SSD or Gated DeltaNet are the paper's models. Levels of matrices that fade are read
in products of many segments (`log_linear_products.py`); here segments are read one after the other.

Letters of shapes: B batch rows, H local key/value heads, G query heads that share one of them, T tokens, D head_dim, V
width of a head's values, R rows of a transition.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.config.model import MIXERS, ModelConfig
from megamem.memory.base import Chunk, Mixer, State, to_device
from megamem.memory.composite.levels import select_rows
from megamem.memory.composite.log_linear_products import FadedMatrices
from megamem.memory.composite.log_linear_settings import LogLinearSettings
from megamem.memory.composite.open_and_levels import OpenAndLevels
from megamem.memory.recurrent.base import Inputs
from megamem.memory.shared.blocks import BlockSlice
from megamem.ops.linear_recurrence.unrolled import passed
from megamem.parallel.linears import Linears


@MIXERS.register
class LogLinearConfig(LogLinearSettings):
    """Log-linear attention: a recurrent memory's segments, merged into ever longer ones, each level with a gate."""

    kind: Literal["log_linear"] = "log_linear"
    """`log_linear`"""

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> Mixer:
        """See `MixerConfig.build`."""
        return (FadedMatrices if self.fades() else MergedSegments)(self, model, linears, layer)


class HeldMemory(NamedTuple):
    """What a level holds while some segments are open, one after the other."""

    memory: State
    """What its segments have added to the start of documents, and their transition, [B, H, ...]."""
    level: int
    begin: int
    """The first of the segments that read it."""
    end: int
    """The first one after it that does not."""


class MergedSegments(OpenAndLevels):
    """A recurrent memory of the open segment, and merged ones of those before it, read segment by segment."""

    def __init__(self, config: LogLinearSettings, model: ModelConfig, linears: Linears, layer: int) -> None:
        super().__init__(config, model, linears, layer, step=config.segment)
        self.segment = config.segment
        self.fading = config.closed == "faded"

    def read(self, inputs: Inputs, gates: Tensor, state: State, block_slice: BlockSlice) -> tuple[Tensor, State]:
        """See `OpenAndLevels.read`; the tokens lie within one segment of each row."""
        read, memory = self.memory.recur(inputs, state, Chunk(block_slice.starts))
        read = gates[..., :1] * read + self._answers(inputs, gates[..., 1:], state, block_slice)
        state = {**state, **memory}
        transition = self.memory.transition(inputs)
        if transition is not None and self.fading:
            fading = transition[:, :, None]
            state |= {name: passed(fading, state[name]) for name in (f"level_{name}" for name in self.names)}
        elif transition is not None:
            state["transition"] = transition + passed(transition, state["transition"])
        if any(block_slice.closing):
            state = self._close(state, block_slice)
        return read, state

    def whole_steps(self, chunk: Chunk, tokens: int) -> int:
        """See `OpenAndLevels.whole_steps`: segments, where all rows begin the same one and levels stay as they are."""
        count, starts = tokens // self.segment, set(chunk.starts)
        if count < 2 or len(starts) > 1 or min(starts) < 0 or min(starts) % self.segment:
            return 0
        return 0 if self.fading or self.levels.admissibility == "strong" else count

    def read_steps(
        self, inputs: Inputs, gates: Tensor, state: State, starts: tuple[int, ...]
    ) -> tuple[Tensor, State]:  # fmt: skip
        """See `OpenAndLevels.read_steps`: segments are written at the same time, then all that is merged is read."""
        rows, size, count = len(starts), self.segment, inputs.tokens // self.segment
        segments = inputs.side_by_side(count)
        fresh = self.memory.initial_state(rows * count, inputs.key.device, inputs.key.dtype)
        own, after = self.memory.recur(
            segments, fresh, Chunk(tuple(s + size * i for s in starts for i in range(count)))
        )
        own = own.unflatten(0, (rows, count)).movedim(1, 3).flatten(3, 4)
        written = {name: after[name] for name in self.names}
        if "transition" in state:
            transition = self.memory.transition(segments)
            assert transition is not None
            written["transition"] = transition.expand(rows * count, *transition.shape[1:])
        ended = [
            dict(zip(written, each, strict=True))
            for each in zip(*(x.unflatten(0, (rows, count)).unbind(1) for x in written.values()), strict=True)
        ]
        held, levels = self._held_in_turn(ended, state, starts[0] // size)
        read = gates[..., :1] * own
        if held:
            kept = zip(*(self.memory.snapshot(each.memory, inputs.parameters) for each in held), strict=True)
            spans = [(size * each.begin, size * each.end) for each in held]
            shares = [
                F.pad(gates[..., begin:end, 1 + each.level], (begin, inputs.tokens - end))
                for each, (begin, end) in zip(held, spans, strict=True)
            ]
            matrices = [torch.stack(x, dim=2) for x in kept]
            read = read + self.memory.answer(inputs, matrices, torch.stack(shares, dim=-1), spans)
        empty = {name: torch.zeros_like(state[name]) for name in dict.fromkeys((*written, *self.memory.renewed()))}
        for name in written:
            parts = [levels[n][name] if n in levels else empty[name] for n in range(self.levels.count)]
            empty[f"level_{name}"] = torch.stack(parts, dim=2)
        return read, {**state, **empty}

    def _held_in_turn(
        self, ended: list[State], state: State, before: int
    ) -> tuple[list[HeldMemory], dict[int, State]]:  # fmt: skip
        """Merge segments that have ended into the levels, one after the other.

        ended: what each has written, and its transition, [B, H, ...]; before: the segments that ended before them.
        Returns: what levels hold while these segments are open; what they hold after them.
        """
        levels = {
            level: HeldMemory({name: state[f"level_{name}"][:, :, level] for name in ended[0]}, level, 0, len(ended))
            for level in self.levels.holding(before)
        }
        held = []
        for i, carried in enumerate(ended):
            target = self.levels.target(before + i)
            for level in range(target + 1):
                if level in levels:
                    joins = levels.pop(level)
                    held.append(joins._replace(end=i + 1))
                    carried = self._merged(joins.memory, carried)
            levels[target] = HeldMemory(carried, target, i + 1, len(ended))
        # what the last segment ends in is read by those after it
        held += [each for each in levels.values() if each.begin < len(ended)]
        return held, {level: each.memory for level, each in levels.items()}

    def _finished(self, block_slice: BlockSlice) -> list[int]:
        """Return the number of segments before the open one, for each row."""
        return [max(start, 0) // self.segment for start in block_slice.starts]

    def _answers(self, inputs: Inputs, gates: Tensor, state: State, block_slice: BlockSlice) -> Tensor:
        """Return the sum of what the levels answer times their gates, [B, H, G, T, V].

        inputs: of the tokens that ask; gates: [B, H, G, T, levels].
        """
        holding = [self.levels.holding(count) for count in self._finished(block_slice)]
        answers = gates.new_zeros(())
        for level in sorted({level for row in holding for level in row}):
            share = gates[..., level, None]
            # rows whose level is empty read nothing of it
            if not all(level in row for row in holding):
                share = share * to_device([level in row for row in holding], share.device, share.dtype).view(
                    -1, *[1] * (share.ndim - 1)
                )
            held = {name: state[f"level_{name}"][:, :, level] for name in self.names}
            answers = answers + self._answer(inputs, held, share)
        return answers

    def _answer(self, inputs: Inputs, held: State, share: Tensor) -> Tensor:
        """Return what one level answers, times its share.

        held: what it has added to the start of documents, [B, H, ...]; share: [B, H, G, T, 1].
        """
        kept = self.memory.snapshot(held, inputs.parameters)
        log_decay = inputs.gates.get("log_decay")
        if not self.fading or log_decay is None:
            return self.memory.answer(inputs, [matrix[:, :, None] for matrix in kept], share)
        # what is left of the level at each token, the rest being a fresh memory
        left = log_decay.cumsum(2).exp()
        fresh = self.memory.snapshot({name: torch.zeros_like(x) for name, x in held.items()}, inputs.parameters)
        both = [torch.stack(pair, dim=2) for pair in zip(fresh, kept, strict=True)]
        return share * self.memory.mixed(inputs, both, torch.stack((1 - left, left), dim=-1)[:, :, None])

    def _close(self, state: State, block_slice: BlockSlice) -> State:
        """Merge the memory of rows whose segment ends into their levels, and begin their next segment.

        The ended segment moves up level by level. With weak admissibility it takes in what each level below its target
        holds and leaves it empty, as a carry does; with strong admissibility it stays in each level's place and what
        the level held moves on. Its target, which takes it in, is empty with weak admissibility unless it is the last.
        """
        strong, last = self.levels.admissibility == "strong", self.levels.last
        # target: -1 for rows whose segment goes on
        target = [
            self.levels.target(count) if closing else -1
            for count, closing in zip(self._finished(block_slice), block_slice.closing, strict=True)
        ]
        names = [*self.names, *(["transition"] if "transition" in state else [])]
        device = state[names[0]].device
        carried = {name: state[name][:, :, None] for name in names}
        new: dict[str, list[Tensor]] = {name: [] for name in carried}
        for level in range(last + 1):
            held = {name: state[f"level_{name}"][:, :, level : level + 1] for name in carried}
            here, below = [t == level for t in target], [t > level for t in target]
            if strong:
                stays, leaves = carried, held
                merging = here
            else:
                stays, leaves = {name: torch.zeros_like(x) for name, x in held.items()}, carried
                merging = [b or (h and level == last) for h, b in zip(here, below, strict=True)]
            both = select_rows(merging, self._merged(held, carried), carried, device) if any(merging) else carried
            left = select_rows(below, stays, held, device)
            for name, tensor in select_rows(here, both, left, device).items():
                new[name].append(tensor)
            carried = leaves if strong else both
        closing = list(block_slice.closing)
        fresh = {name: torch.zeros_like(state[name]) for name in dict.fromkeys((*names, *self.memory.renewed()))}
        return {
            **state,
            **{f"level_{name}": torch.cat(parts, dim=2) for name, parts in new.items()},
            **select_rows(closing, fresh, {name: state[name] for name in fresh}, device),
        }

    def _merged(self, earlier: State, later: State) -> State:
        """Return what two segments have written, one after the other, and the transition of both."""
        transition = later.get("transition")
        return {name: x + passed(transition, earlier[name]) for name, x in later.items()}
