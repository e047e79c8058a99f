"""Runs one stage's part of a schedule: forwards, backwards, and the gradients that memory carries back in time.

Each unit is a piece of autograd graph of its own. A chunk reads its memory from detached aliases of what the chunk
before it wrote; its backward leaves gradients on the aliases, and these are where the backward of the chunk before
begins, together with the gradient of its hidden output (from the next stage) or of its loss. Across a window's border
no gradient flows. The sum over units is exactly the gradient of one autograd graph over each window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megamem.data.batch import Batch
from megamem.memory.base import Chunk, Losses, State, detach, map_state
from megamem.pipeline.channels import Borders
from megamem.pipeline.schedule import Action, Order
from megamem.pipeline.simulate import Event

Watch = Callable[[str], None]


class StageModule(Protocol):
    """What the executor asks of the layers it runs; `megamem.model.stage.Stage` is one."""

    first: bool
    last: bool

    def __call__(self, x: Tensor, states: Sequence[State], chunk: Chunk) -> tuple[Tensor, list[State], Losses]:
        """Hidden (or tokens), states and place to hidden, new states and auxiliary losses."""

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """On the last stage: nats of each token."""

    def check_states(self, states: Sequence[State], rows: int) -> None:
        """Raise if a state is not as its layer declared it."""


@dataclass
class Unit:
    """What is kept of a chunk between its forward and its backward."""

    entered: Tensor
    """Input of the stage: the hidden chunk whose gradient goes down, or tokens."""
    output: Tensor | None
    """Hidden chunk that went up; None on the last stage."""
    losses: list[Tensor]
    """Scalars whose gradient is 1."""
    links: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(a state tensor that this chunk wrote, its alias that the next chunk reads)."""


class StageExecutor:
    """One stage of one pipeline. `run` carries out an order over a step's micro-batches."""

    def __init__(self, stage: StageModule, index: int, chunk_size: int, bptt_chunks: int) -> None:
        """index: of the stage in its pipeline, for the record of events."""
        self.stage, self.index = stage, index
        self.chunk_size, self.bptt_chunks = chunk_size, bptt_chunks
        self.peak_units = 0
        """Most units held at once in the last run."""
        self.events: list[Event] | None = None
        """If a list, every action is recorded there with its start and end (seconds of the host's clock)."""
        self._checked = False

    def run(
        self,
        order: Order,
        batches: Sequence[Batch],
        states: Callable[[int], list[State]],
        scale: Tensor,
        borders: Borders,
        watch: Watch = lambda action: None,
        before_backward: Callable[[], None] = lambda: None,
        keep_states: bool = True,
    ) -> tuple[Tensor, dict[int, list[State]]]:
        """Carry out `order`, accumulating gradients in the parameters' `.grad`.

        Args:
            batches: micro-batches by index, the same on all stages of a pipeline.
            states: of this stage's layers before a micro-batch; asked for when it begins.
            scale: factor of the summed losses (scalar).
            borders: channels, whose shapes are those of the order's forwards.
            watch: told before each action and each wait what this rank is at.
            before_backward: called before each backward.
            keep_states: whether anyone reads on; if not, a sequence's states are dropped where it ends.
        Returns: summed cross-entropy in nats (float64; 0 but on the last stage), the kept states at the end.
        """
        self._batches, self._scale, self._borders, self._watch = batches, scale, borders, watch
        self._begin, self._keep = states, keep_states
        self._states: dict[int, list[State]] = {}
        self._units: dict[tuple[int, int], Unit] = {}
        self._aliases: dict[int, dict[int, Tensor]] = {}
        self._nats = torch.zeros((), dtype=torch.float64, device=scale.device)
        self.peak_units = 0
        for action in order:
            watch(str(action))
            if action.kind == "forward":
                entered = self._enter(action)
                with self._recorded(action):
                    hidden = self._forward(action, entered)
                if self._borders.up is not None:
                    self._borders.up.put(hidden)
                self.peak_units = max(self.peak_units, len(self._units))
            else:
                gradient = self._gradient_from_above(action)
                before_backward()
                with self._recorded(action):
                    entered = self._backward(action, gradient)
                if self._borders.down is not None:
                    assert entered.grad is not None
                    self._borders.down.put(entered.grad)
        watch("waiting for the last sends to leave")
        borders.flush()
        self._checked = True
        return self._nats, self._states

    def _tokens(self, action: Action) -> slice:
        return slice(action.chunk * self.chunk_size, (action.chunk + 1) * self.chunk_size)

    def _enter(self, action: Action) -> Tensor:
        if self.stage.first:
            return self._batches[action.sequence].tokens[self._tokens(action)]
        assert self._borders.below is not None
        self._watch(f"{action}: waiting for the hidden chunk of the stage below")
        return self._borders.below.take().requires_grad_()

    def _gradient_from_above(self, action: Action) -> Tensor | None:
        if self.stage.last:
            return None
        assert self._borders.above is not None
        self._watch(f"{action}: waiting for the gradient of the stage above")
        return self._borders.above.take()

    def _forward(self, action: Action, entered: Tensor) -> Tensor:
        """Run a chunk and keep what its backward needs; returns the hidden chunk."""
        batch, tokens = self._batches[action.sequence], self._tokens(action)
        chunk = Chunk(tuple(batch.starts[action.chunk].tolist()))
        if action.chunk == 0:
            self._states[action.sequence] = [detach(state) for state in self._begin(action.sequence)]
        hidden, states, auxiliary = self.stage(entered, self._states[action.sequence], chunk)
        if not self._checked:
            self.stage.check_states(states, chunk.rows)
        # a mean over this chunk's tokens and rows, weighted as many predicted tokens
        tokens_here = batch.tokens[tokens].numel()
        losses = [value * (tokens_here * self._scale) for value in auxiliary.values() if value.requires_grad]
        if self.stage.last:
            nats = self.stage.token_losses(hidden, batch.labels[tokens]).sum()
            losses.append(nats * self._scale)
            self._nats += nats.detach()
        unit = Unit(entered, None if self.stage.last else hidden, losses)
        if (action.chunk + 1) % self.bptt_chunks:
            self._states[action.sequence] = self._alias(states, unit, self._aliases.setdefault(action.sequence, {}))
        else:
            self._states[action.sequence] = [detach(state) for state in states]
            self._aliases.pop(action.sequence, None)
            if not self._keep and action.chunk == len(batch.starts) - 1:
                del self._states[action.sequence]
        self._units[action.sequence, action.chunk] = unit
        return hidden

    @staticmethod
    def _alias(states: list[State], unit: Unit, known: dict[int, Tensor]) -> list[State]:
        """The states as the next chunk reads them. What a chunk passes through by reference keeps its alias."""

        def alias(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or known.get(id(tensor)) is tensor:
                return tensor
            read = tensor.detach().requires_grad_()
            known[id(read)] = read
            unit.links.append((tensor, read))
            return read

        return [map_state(alias, state) for state in states]

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor:
        """Run a chunk's backward; returns the input, whose gradient goes down."""
        unit = self._units.pop((action.sequence, action.chunk))
        roots: list[Tensor] = list(unit.losses)
        gradients: list[Tensor | None] = [None] * len(roots)
        if unit.output is not None:
            roots.append(unit.output)
            gradients.append(gradient)
        for written, read in unit.links:
            if read.grad is not None:
                roots.append(written)
                gradients.append(read.grad)
        torch.autograd.backward(roots, gradients)
        return unit.entered

    @contextmanager
    def _recorded(self, action: Action) -> Iterator[None]:
        """Note when the work inside began and ended, if `events` is a list."""
        begun = self._now()
        yield
        if self.events is not None:
            self.events.append(Event(self.index, action, begun, self._now()))

    def _now(self) -> float:
        if self.events is None:
            return 0.0
        if self._scale.is_cuda:
            torch.cuda.synchronize(self._scale.device)
        return time.time()
