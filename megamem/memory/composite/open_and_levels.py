"""What both ways of reading log-linear attention share: a recurrent memory, its levels and the gates between them."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State
from megamem.memory.composite.levels import LevelGates
from megamem.memory.composite.log_linear_settings import LogLinearSettings
from megamem.memory.recurrent.base import Inputs, RecurrentMixer
from megamem.memory.shared.blocks import BlockSlice, block_slices
from megamem.parallel.linears import Linears


class OpenAndLevels(Mixer):
    """A recurrent memory of the open segment, and levels of those before it."""

    reads_borders = True

    def __init__(
        self, config: LogLinearSettings, model: ModelConfig, linears: Linears, layer: int, step: int
    ) -> None:  # fmt: skip
        """Build it; `step`: tokens that are read at once, at positions of which this is a divisor."""
        memory = config.recurrent.build(model, linears, layer)
        assert isinstance(memory, RecurrentMixer)
        super().__init__(config.state_specs(model), memory.sizes, linears.tp_size)
        self.linears = linears
        self.memory = memory
        self.levels = config.placed
        self.names = list(config.recurrent.snapshot_shapes(model))
        self.step = step
        self.level_gates = LevelGates(model, linears, config.levels + 1)

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x = self.linears.enter(hidden)
        inputs, after = self.memory.inputs(x, state, chunk)
        gates = self.level_gates(x, state[self.names[0]].dtype).unflatten(1, (-1, self.memory.groups))
        reads, done = [], 0
        while done < inputs.tokens:
            here = chunk.after(done)
            state = self.reset_inside(state, done, here.starts, inputs.key)
            left = here.document_splits(inputs.tokens - done)[0].stop
            whole = self.whole_steps(here, left)
            tokens = whole * self.step if whole else block_slices(here, left, self.step)[0].tokens
            part = slice(done, done + tokens)
            asked = inputs.part(part), gates[..., part, :], state
            if whole:
                read, state = self.read_steps(*asked, here.starts)
            else:
                read, state = self.read(*asked, BlockSlice(0, tokens, here.starts, self.step))
            reads.append(read)
            done = part.stop
        read = torch.cat(reads, dim=-2) if len(reads) > 1 else reads[0]
        return self.memory.finish(read, x, inputs), {**state, **after}, {}

    def whole_steps(self, chunk: Chunk, tokens: int) -> int:
        """Return how many whole steps of the next tokens `read_steps` takes at once; 0 if it does not."""
        return 0

    def read_steps(
        self, inputs: Inputs, gates: Tensor, state: State, starts: tuple[int, ...]
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Write and read tokens that make up several whole steps of each row, among which no document begins.

        inputs, state: as in `read`; gates: [B, H, G, T, 1 + levels]; starts: position of each row's first token.
        Returns: what the tokens read, [B, H, G, T, V]; the new state.
        """
        raise NotImplementedError(f"{type(self).__name__} reads step by step")

    @abstractmethod
    def read(self, inputs: Inputs, gates: Tensor, state: State, block_slice: BlockSlice) -> tuple[Tensor, State]:
        """Write and read tokens of a call, among which no document begins and which lie within one step of each row.

        Args:
            inputs: of the tokens.
            gates: [B, H, G, T, 1 + levels], that of the open segment first.
            state: before the tokens.
            block_slice: where they lie in their documents.
        Returns: what they read, [B, H, G, T, V]; the new state.
        """
