"""Runs one stage's part of a schedule: forwards, backwards, and the gradients that memory carries back in time.

Each unit is a part of the autograd graph of its own. A chunk reads its memory from detached aliases of what the chunk
before it wrote; its backward leaves gradients on the aliases, and these are where the backward of the chunk before
begins, together with the gradient of its hidden output (from the next stage) or of its loss. Across a window's border
no gradient flows. The sum over units is exactly the gradient of one autograd graph over each window.

A memory that spans the model is written by the last stage and read by the first: its tensors travel from one to the
other after each unit, and the gradients on them travel back before the unit's backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megamem.memory.base import States, detach, map_state, state_tensors
from megamem.model.objective import Objective
from megamem.model.stage import Stage
from megamem.pipeline.channels import Borders, Shape
from megamem.pipeline.schedule import Action
from megamem.pipeline.simulate import Event
from megamem.pipeline.train_chunk import MicroBatch, loss_names, train_chunk

Watch = Callable[[str], None]


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
    memories_in: list[Tensor] = field(default_factory=list)
    """What the last stage made of the chunk before, on the first stage, if gradients on it go back."""
    memories_out: list[Tensor] = field(default_factory=list)
    """What went to the first stage, on the last stage, if gradients on it come back."""


class StageExecutor:
    """One stage of one pipeline. `run` carries out an order over a step's micro-batches."""

    def __init__(self, stage: Stage, objective: Objective, index: int, chunk_size: int, bptt_chunks: int) -> None:
        """Run `stage`, number `index` in its pipeline, in windows of `bptt_chunks` chunks."""
        self.stage, self.objective, self.index = stage, objective, index
        self.chunk_size, self.bptt_chunks = chunk_size, bptt_chunks
        self.peak_units = 0
        """Most units held at once in the last run."""
        self.events: list[Event] | None = None
        """If a list, every action is recorded there with its start and end (seconds of the host's clock)."""
        self.observe_states: Callable[[States], None] | None = None
        """See `TrainingEngine.observe_states`."""
        self._names = loss_names(stage, objective)
        self._checked = False

    def memory_shapes(self, rows: int, dtype: torch.dtype) -> list[Shape]:
        """Shapes of the tensors that leave the last stage and enter the first one after each unit; none in one process.

        Raises: ValueError for memories of other dtypes than the activations `dtype`, which channels do not carry.
        """
        if self.stage.first and self.stage.last:
            return []
        memories = [m.initial_state(rows, torch.device("cpu"), dtype) for m in self.stage.model_memories.values()]
        if any(tensor.dtype != dtype for tensor in state_tensors(memories)):
            raise ValueError("memories that span the model must have the activations' dtype to travel between stages")
        return [tuple(tensor.shape) for tensor in state_tensors(memories)]

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        states: Callable[[int], States],
        scale: Tensor,
        borders: Borders,
        watch: Watch = lambda action: None,
        before_backward: Callable[[], None] = lambda: None,
        keep_states: bool = True,
    ) -> tuple[Tensor, dict[int, States]]:
        """Carry out the order of `borders`, accumulating gradients in the parameters' `.grad`.

        Args:
            micro_batches: by index, the same on all stages of a pipeline.
            states: of this stage's components before a micro-batch; asked for when it begins.
            scale: factor of the summed losses (scalar).
            borders: channels, opened for this stage's program.
            watch: told before each action and each wait what this rank is at.
            before_backward: called before each backward.
            keep_states: whether anyone reads on; if not, a micro-batch's states are dropped where it ends.
        Returns: `loss_names`, [names] summed over tokens in float64 (this stage's parts of them); the kept states at
            the end.
        """
        self._micro_batches, self._scale, self._borders, self._watch = micro_batches, scale, borders, watch
        self._begin, self._keep = states, keep_states
        self._states: dict[int, States] = {}
        self._units: dict[tuple[int, int], Unit] = {}
        self._aliases: dict[int, dict[int, Tensor]] = {}
        self._sums = torch.zeros(len(self._names), dtype=torch.float64, device=scale.device)
        # in which order the last stage sends memories, and what was taken before its use
        self._memories_to_come = iter(
            [action for action in borders.order if action.kind == "forward" and self._sent(action)]
        )
        self._memories: dict[tuple[int, int], list[Tensor]] = {}
        self.peak_units = 0
        for action in borders.order:
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
            borders.advance()
        self._take_last_memories()
        watch("waiting for the last sends to leave")
        borders.flush()
        self._checked = True
        return self._sums, self._states

    def _tokens(self, action: Action) -> slice:
        return slice(action.chunk * self.chunk_size, (action.chunk + 1) * self.chunk_size)

    def _enter(self, action: Action) -> Tensor:
        """Return the input: ids [tokens, batch], or the hidden chunk [tokens, batch, hidden] of the stage below."""
        if self.stage.first:
            return self._micro_batches[action.micro_batch].batch.tokens[self._tokens(action)]
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
        """Run a chunk and keep what its backward needs; entered and returned: [tokens, batch, hidden] (or ids)."""
        micro_batch, tokens = action.micro_batch, self._tokens(action)
        batch, places, reading, factor = self._micro_batches[micro_batch]
        objective = self.objective.readings[reading].objective
        if action.chunk == 0:
            self._states[micro_batch] = detach(self._begin(micro_batch))
        unit = Unit(entered, None, [])
        if self._borders.memory_in is not None and action.chunk > 0:
            self._receive_memories(action, unit)
        result = train_chunk(
            self.stage, objective, entered, batch.labels[tokens], self._states[micro_batch], places[action.chunk],
            check=not self._checked,
        )  # fmt: skip
        scale = (factor * self._scale).to(self._scale.dtype)
        # a mean over this chunk's tokens and rows, weighted as many predicted tokens
        weight = batch.tokens[tokens].numel() * scale
        unit.losses = [value * weight for value in result.auxiliary.values() if value.requires_grad]
        for name, value in result.auxiliary.items():
            self._sums[self._names.index(name)] += factor * value.detach() * batch.tokens[tokens].numel()
        for name, value in result.losses.items():
            unit.losses.append(value * scale)
            self._sums[self._names.index(name)] += factor * value.detach()
        if not self.stage.last:
            unit.output = result.hidden
        states = result.states
        if self._borders.memory_out is not None:
            states = self._send_memories(action, unit, states)
        last = micro_batch == len(self._micro_batches) - 1 and self._is_last_chunk(action)
        if last and self.observe_states is not None:
            self.observe_states(detach(states))
        if self._same_window(action):
            self._states[micro_batch] = self._alias(states, unit, self._aliases.setdefault(micro_batch, {}))
        else:
            self._states[micro_batch] = detach(states)
            self._aliases.pop(micro_batch, None)
            if not self._keep and self._is_last_chunk(action):
                del self._states[micro_batch]
        self._units[micro_batch, action.chunk] = unit
        return result.hidden

    def _same_window(self, action: Action) -> bool:
        """Whether the next chunk's gradients reach this one."""
        return (action.chunk + 1) % self.bptt_chunks != 0

    def _is_last_chunk(self, action: Action) -> bool:
        return action.chunk == len(self._micro_batches[action.micro_batch].places) - 1

    def _sent(self, action: Action) -> bool:
        """Whether the last stage sends what it made of this unit's memories: somebody reads on."""
        return self._keep or not self._is_last_chunk(action)

    def _send_memories(self, action: Action, unit: Unit, states: States) -> States:
        """Send the memories among `states` from the last stage to the first; return the other states."""
        memories = list(state_tensors([states[name] for name in self.stage.model_memories]))
        if self._sent(action):
            assert self._borders.memory_out is not None
            for tensor in memories:
                self._borders.memory_out.put(tensor)
        if self._same_window(action):
            unit.memories_out = memories
        return {name: state for name, state in states.items() if name not in self.stage.model_memories}

    def _receive_memories(self, action: Action, unit: Unit) -> None:
        """Put what the last stage made of the chunk before among the micro-batch's states on the first stage."""
        self._watch(f"{action}: waiting for the memory of the last stage")
        memories = self._memories_of(action.micro_batch, action.chunk - 1)
        if action.chunk % self.bptt_chunks:
            unit.memories_in = [tensor.requires_grad_() for tensor in memories]
        self._put_memories(action.micro_batch, memories)

    def _put_memories(self, micro_batch: int, memories: list[Tensor]) -> None:
        """Replace the tensors [...] of the memories in a micro-batch's states, in their order."""
        names, left = list(self.stage.model_memories), iter(memories)
        new = {name: map_state(lambda _: next(left), self._states[micro_batch][name]) for name in names}
        self._states[micro_batch] = {**self._states[micro_batch], **new}

    def _memories_of(self, micro_batch: int, chunk: int) -> list[Tensor]:
        """Return the memories after a unit, received in the order in which the last stage sends them."""
        assert self._borders.memory_in is not None
        count = len(list(state_tensors([self._states[micro_batch][name] for name in self.stage.model_memories])))
        while (micro_batch, chunk) not in self._memories:
            unit = next(self._memories_to_come)
            self._memories[unit.micro_batch, unit.chunk] = [self._borders.memory_in.take() for _ in range(count)]
        return self._memories.pop((micro_batch, chunk))

    def _take_last_memories(self) -> None:
        """Receive the memories at the ends of micro-batches on the first stage, if anybody reads on."""
        if self._borders.memory_in is None or not self._keep:
            return
        for action in self._borders.order:
            if action.kind == "forward" and self._is_last_chunk(action):
                self._watch(f"{action}: waiting for the memory of the last stage")
                self._put_memories(action.micro_batch, self._memories_of(action.micro_batch, action.chunk))

    @staticmethod
    def _alias(states: States, unit: Unit, known: dict[int, Tensor]) -> States:
        """Return the states as the next chunk reads them: every tensor [...] a new leaf of the graph.

        What a chunk passes through by reference keeps its alias, which is `known`.
        """

        def alias(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or known.get(id(tensor)) is tensor:
                return tensor
            read = tensor.detach().requires_grad_()
            known[id(read)] = read
            unit.links.append((tensor, read))
            return read

        return {name: map_state(alias, state) for name, state in states.items()}

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor:
        """Run a chunk's backward from `gradient` [tokens, batch, hidden]; the input, whose gradient goes down."""
        unit = self._units.pop((action.micro_batch, action.chunk))
        roots: list[Tensor] = list(unit.losses)
        gradients: list[Tensor | None] = [None] * len(roots)
        if unit.output is not None:
            roots.append(unit.output)
            gradients.append(gradient)
        for written, read in unit.links:
            if read.grad is not None:
                roots.append(written)
                gradients.append(read.grad)
        for tensor in unit.memories_out:
            assert self._borders.memory_gradient_in is not None
            self._watch(f"{action}: waiting for the memory's gradient from the first stage")
            received = self._borders.memory_gradient_in.take()
            if tensor.requires_grad:
                roots.append(tensor)
                gradients.append(received)
        torch.autograd.backward(roots, gradients)
        for tensor in unit.memories_in:
            assert self._borders.memory_gradient_out is not None
            # nobody read it where documents begin in all rows
            self._borders.memory_gradient_out.put(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
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
            # not for the whole device: it may be receiving what the stage below has yet to compute
            torch.cuda.current_stream(self._scale.device).synchronize()
        return time.time()
