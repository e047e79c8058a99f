"""The one loop that reads text without training: evaluation, generation, lm-eval's tasks and exports go through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megamem.memory.base import Chunk, States, StateSpec, map_state, select_state_rows, state_tensors, to_device
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology
from megamem.pipeline.channels import Borders, Shape
from megamem.pipeline.program import reading_programs
from megamem.pipeline.schedule import Action

TOKENS_AHEAD = 16_384
"""Tokens of whole chunks for which `Stage.prepare` computes ahead at once, at most: a bound of its activations."""


@dataclass
class RowGroup:
    """Rows of a batch that are read together, and their states."""

    rows: list[int]
    states: States


class ChunkReader:
    """Reads documents on, call after call, on one process or on all ranks of a model.

    A collective object: all tensor-parallel ranks and stages make the same calls; chunks go up the stages. Rows whose
    chunks begin at different places are read in groups where the architecture asks for it (`Stage.one_grid`).
    """

    def __init__(self, stage: Stage, topology: Topology | None = None) -> None:
        """Read through a whole model, or this rank's stage of one, on the device and in the dtype of its parameters."""
        weight = next(stage.parameters())
        self.stage, self.topology, self.device, self.dtype = stage, topology, weight.device, weight.dtype
        self.chunk_size = stage.config.chunk_size
        self.forgets_long_term = False
        """Whether every call begins without what is declared as a long-term memory (`TensorSpec.long_term`)."""
        self.most_rows = 0
        """Rows of the rank that reads most of them, where ranks read different numbers; see `chunks_ahead`."""
        self._after_call: Callable[[], object] | None = None

    def chunks_ahead(self, rows: int) -> int:
        """Return of how many whole chunks of so many rows `prepare` takes the tokens at once; 1 in a pipeline.

        It is the same on all ranks, which make the same calls: each may gather parameters from all of them (ZeRO 3).
        """
        whole_model = self.stage.first and self.stage.last
        return max(TOKENS_AHEAD // (max(rows, self.most_rows) * self.chunk_size), 1) if whole_model else 1

    def prepare(self, tokens: Tensor, places: Sequence[Chunk]) -> Sequence[Chunk]:
        """Compute ahead what whole chunks that are read next do not need each other for; see `Stage.prepare`.

        tokens: ids [chunks * chunk_size, batch] int64 of `chunks_ahead` chunks at most, on any device.
        """
        return self.stage.prepare(to_device(tokens, self.device), places) if len(places) > 1 else places

    @contextmanager
    def forgetting_long_term(self, forgets: bool = True) -> Iterator[None]:
        """Read without long-term memories, or with them, inside a `with` statement; see `forgets_long_term`."""
        before, self.forgets_long_term = self.forgets_long_term, forgets
        try:
            yield
        finally:
            self.forgets_long_term = before

    @contextmanager
    def telling(self, after_call: Callable[[], object] | None) -> Iterator[None]:
        """Call a function after each call of the model inside a `with` statement: a long text takes many."""
        before, self._after_call = self._after_call, after_call
        try:
            yield
        finally:
            self._after_call = before

    def begin(self, chunk: Chunk) -> list[RowGroup]:
        """Return the states of documents that have not begun, in rows that stand where `chunk` says."""
        return self._fresh_groups(range(chunk.rows), chunk)

    def _fresh_groups(self, rows: Iterable[int], chunk: Chunk) -> list[RowGroup]:
        """Return groups of rows that stand at one place of their chunks, with fresh states."""
        places: dict[int, list[int]] = {}
        for row in rows:
            places.setdefault(self.stage.grid_place(chunk.starts[row]), []).append(row)
        return [RowGroup(own, self.stage.initial_states(len(own), self.device, self.dtype)) for own in places.values()]

    def _regroup(self, chunk: Chunk, groups: list[RowGroup]) -> None:
        """Move rows whose next document begins amid the others' chunks to groups of their own."""
        moved: list[int] = []
        for group in groups:
            starts = [chunk.starts[row] for row in group.rows]
            place = self.stage.grid_place(next((start for start in starts if start > 0), starts[0]))
            moved += [row for row in group.rows if self.stage.grid_place(chunk.starts[row]) != place]
        if not moved:
            return
        if any(chunk.starts[row] > 0 for row in moved):
            raise ValueError(f"rows {moved} stand at other places of their chunks than they were left at")
        staying = {row for group in groups for row in group.rows} - set(moved)
        kept = [
            RowGroup(rows, self._states_of(group, rows))
            for group in groups
            if (rows := [row for row in group.rows if row in staying])
        ]
        groups[:] = [*kept, *self._fresh_groups(moved, chunk)]

    def _states_of(self, group: RowGroup, rows: list[int]) -> States:
        """Return the states of some of a group's rows."""
        index = torch.tensor([group.rows.index(row) for row in rows])
        return {
            name: select_state_rows(specs, group.states[name], index) for name, specs in self.stage.state_specs.items()
        }

    def read(
        self, tokens: Tensor, chunk: Chunk, groups: list[RowGroup], keep: int | None = None,
        borders: Borders | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Read tokens on from where the rows stand; the groups' states move on.

        Args:
            tokens: ids [tokens, batch] int64, any number of them, on any device.
            chunk: where they lie in their documents, one of those that `prepare` returned if it was called.
            groups: all rows' states, as `begin` made them or the last call left them.
            keep: of how many last tokens the hidden states are wanted; of all if not given.
            borders: channels that were opened for many calls of a chunk each; this call's own if not given.
        Returns: hidden [kept, batch, hidden_size] after the final norm on the last stage, None on the others.
        """
        keep = tokens.shape[0] if keep is None else keep
        if self.stage.one_grid:
            self._regroup(chunk, groups)
        found = [self._read_group(tokens, chunk, group, keep, borders) for group in groups]
        if len(groups) == 1 or not self.stage.last:
            return found[0]
        order = torch.tensor([row for group in groups for row in group.rows]).argsort()
        return torch.cat([part for part in found if part is not None], dim=1)[:, order.to(self.device)]

    def _read_group(
        self, tokens: Tensor, chunk: Chunk, group: RowGroup, keep: int, borders: Borders | None
    ) -> Tensor | None:
        """Read the columns of tokens [tokens, batch] that are the group's rows, in calls of at most a chunk."""
        prepared = chunk.prepared
        if len(group.rows) < tokens.shape[1]:
            tokens = tokens[:, group.rows]
            prepared = None if prepared is None else prepared[:, group.rows]
        here = Chunk(tuple(chunk.starts[row] for row in group.rows), prepared=prepared)
        calls = list(self._calls(tokens.shape[0], here))
        own = borders or self._open([(stop - start, here.after(start)) for start, stop in calls])
        outputs: list[Tensor] = []
        for part, place in self._prepared(tokens, here, calls):
            hidden = self._call(part, place, group, own)
            outputs.append(hidden)
            while len(outputs) > 1 and sum(map(len, outputs[1:])) >= keep:
                del outputs[0]
        if own is not None and borders is None:
            own.flush()
        if not self.stage.last:
            return None
        whole = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return whole[max(whole.shape[0] - keep, 0) :]

    def _prepared(
        self, tokens: Tensor, chunk: Chunk, calls: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[Tensor, Chunk]]:
        """Yield tokens [tokens of the call, batch] and place of each of `calls`, whole chunks prepared side by side.

        tokens: ids [tokens, batch] of all of them; chunk: where these lie.
        """
        for whole, run in groupby(calls, lambda call: call[1] - call[0] == self.chunk_size):
            left = list(run)
            ahead = self.chunks_ahead(chunk.rows) if whole else 1
            while left:
                now, left = left[:ahead], left[ahead:]
                places: Sequence[Chunk] = [chunk.after(start) if start else chunk for start, _ in now]
                places = self.prepare(tokens[now[0][0] : now[-1][1]], places)
                yield from ((tokens[slice(*call)], place) for call, place in zip(now, places, strict=True))

    def _calls(self, tokens: int, chunk: Chunk) -> Iterator[tuple[int, int]]:
        """First and last token of each call: a chunk long, or where rows share a grid up to its next border."""
        start, place = 0, chunk.starts[0] % self.chunk_size if self.stage.one_grid else 0
        while start < tokens:
            stop = min(start + self.chunk_size - place, tokens)
            yield start, stop
            start, place = stop, 0

    def _call(self, tokens: Tensor, chunk: Chunk, group: RowGroup, borders: Borders | None) -> Tensor:
        """Run this stage on ids [tokens, batch]; its hidden [tokens, batch, hidden]."""
        entered = borders.below.take() if borders and borders.below else to_device(tokens, self.device)
        if self.forgets_long_term:
            own = self.stage.components
            group.states = {name: own[name].without_long_term(state) for name, state in group.states.items()}
        # through module hooks: with ZeRO 3 they gather what the stage itself owns
        hidden, states, _ = self.stage(entered, group.states, chunk)
        if borders and borders.up:
            borders.up.put(hidden)
        memories = self.stage.model_memories
        changed = self.stage.memories_change(chunk.starts[0], tokens.shape[0])
        if borders and borders.memory_out and changed:
            for tensor in state_tensors([states[name] for name in memories]):
                borders.memory_out.put(tensor)
            states = {name: state for name, state in states.items() if name not in memories}
        if borders:
            borders.advance()
        if borders and borders.memory_in and changed:
            inbox = borders.memory_in
            new = {name: map_state(lambda _: inbox.take(), group.states[name]) for name in memories}
            states = {**states, **new}
        group.states = states
        if self._after_call is not None:
            self._after_call()
        return hidden

    def open(self, calls: int, rows: int) -> Borders | None:
        """Channels for so many calls of whole chunks.

        None without a pipeline, and where rows at different chunks cannot be read in one call: how many rows go to the
        next stage is known call by call then.
        """
        if self.stage.grid_place(self.chunk_size) != self.stage.grid_place(0):
            return None
        return self._open([(self.chunk_size, Chunk((0,) * rows))] * calls)

    def _open(self, calls: Sequence[tuple[int, Chunk]]) -> Borders | None:
        if self.topology is None or self.topology.pp_size == 1:
            return None
        shapes = [self.stage.border_shape(tokens, chunk.rows, chunk.starts[0]) for tokens, chunk in calls]
        above = [self.stage.shape_above(tokens, chunk.rows, chunk.starts[0]) for tokens, chunk in calls]
        memories: list[Shape] = []
        for memory in self.stage.model_memories.values():
            initial = memory.initial_state(calls[0][1].rows, torch.device("cpu"), self.dtype)
            memories += [tuple(tensor.shape) for tensor in state_tensors(initial)]

        def leaves(action: Action) -> bool:
            tokens, chunk = calls[action.chunk]
            return self.stage.memories_change(chunk.starts[0], tokens)

        found = reading_programs(self.topology.pp_size, len(calls), leaves if memories else None)
        return Borders(self.topology, found[self.topology.pp_rank], shapes, above, self.dtype, memories)


def select_rows(specs: Mapping[str, StateSpec], groups: Sequence[RowGroup], index: Sequence[int]) -> list[RowGroup]:
    """Return the groups after row i has become what row index[i] was; rows may be left out or repeated.

    specs: the declared states by component (`Stage.state_specs`).
    """
    new = []
    for group in groups:
        rows = [row for row, source in enumerate(index) if source in group.rows]
        if rows:
            sources = torch.tensor([group.rows.index(index[row]) for row in rows])
            states = {name: select_state_rows(spec, group.states[name], sources) for name, spec in specs.items()}
            new.append(RowGroup(rows, states))
    return new
