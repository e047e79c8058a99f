"""The memory states of a run on streams, as fragments of global tensors: saved by one layout, read by any."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoints.fragments import Fragments, Piece
from megamem.memory.base import Growing, State, Stateful, States, StateSpec, TensorSpec
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine

PREFIX = "states/"
"""What the names of memory states begin with."""


def named_tensors(specs: StateSpec, state: State) -> Iterator[tuple[str, TensorSpec, Tensor]]:
    """Yield every tensor of a component's state with its name and declaration.

    Entries of lists are called by age, `past.0.keys` is of the newest: mixers read them from that end, and lanes of a
    batch may have different numbers of them.
    """
    for name, spec in specs.items():
        if isinstance(spec, TensorSpec):
            yield name, spec, state[name]
        else:
            for age, entry in enumerate(reversed(state[name])):
                for part, declared in spec.entry.items():
                    yield f"{name}.{age}.{part}", declared, entry[part]


@dataclass(frozen=True)
class Lanes:
    """The lanes whose memory this rank keeps from step to step: rows of the whole batch, layers of its stage."""

    stage: Stage
    """Layers of this rank."""
    topology: Topology
    """This rank among the others."""
    micro_batches: int
    """Micro-batches of a step on this rank."""
    rows: int
    """Rows of a micro-batch."""
    dtype: torch.dtype
    """Data type of activations."""

    @staticmethod
    def of(engine: TrainingEngine) -> Lanes:
        """Return the lanes of a run on this rank."""
        rows = engine.config.training.micro_batch_size
        return Lanes(engine.stage, engine.topology, engine.accumulation, rows, engine.dtype)

    def fragments(self, carried: Mapping[int, States]) -> dict[str, Fragments]:
        """Return all states as `states/COMPONENT/PART`, whose batch axis is the row of the whole batch.

        Growing lists of lanes may have different lengths: they are padded with zeros at their old end, and
        `NAME.entries` holds each row's own number. A collective of the data-parallel ranks where there are such lists.

        carried: states of all components by micro-batch.
        """
        pieces: dict[str, list[Piece]] = {}
        declared: dict[str, tuple[TensorSpec, Tensor]] = {}
        longest = self._longest_lists(carried)
        for micro_batch, states in carried.items():
            # first row of the micro-batch in the whole batch, as the feeder numbers them
            row = (micro_batch * self.topology.dp_size + self.topology.dp_rank) * self.rows
            for component, holder in self.stage.components.items():
                state = states[component]
                prefix = f"{PREFIX}{component}/"
                for name, spec in holder.specs.items():
                    if isinstance(spec, Growing):
                        counts = torch.full((self.rows,), len(state[name]))
                        pieces.setdefault(f"{prefix}{name}.entries", []).append(Piece((row,), counts))
                        declared[f"{prefix}{name}.entries"] = TensorSpec(("batch",), "int64"), counts
                        missing = longest[component, name] - len(state[name])
                        state = {**state, name: [*self._empty_entries(holder, spec, missing), *state[name]]}
                for part, spec, tensor in named_tensors(holder.specs, state):
                    if not tensor.numel():
                        continue
                    batch = spec.axis("batch")
                    assert batch is not None, f"{part}: a state of lanes needs a batch axis"
                    corner = [0] * tensor.ndim
                    corner[batch] = row
                    if (axis := spec.shard_axis) is not None:
                        corner[axis] = tensor.shape[axis] * self.topology.tp_rank
                    pieces.setdefault(prefix + part, []).append(Piece(tuple(corner), tensor))
                    declared[prefix + part] = spec, tensor
        return {
            name: Fragments(
                self._whole_shape(*declared[name]),
                found,
                writes=declared[name][0].shard is not None or self.topology.tp_rank == 0,
            )
            for name, found in pieces.items()
        }

    def empty(self, names: set[str]) -> dict[int, States]:
        """Make states with room for what a checkpoint holds; none if it holds none.

        names: names of the checkpoint's tensors, which tell how many entries growing lists have at most. After the
        load, `drop_padding` takes out what was only padded.
        """
        if not any(name.startswith(PREFIX) for name in names):
            return {}
        carried = {}
        for micro_batch in range(self.micro_batches):
            states = self.stage.initial_states(self.rows, self.topology.device, self.dtype)
            for component, holder in self.stage.components.items():
                state = states[component]
                for name, spec in holder.specs.items():
                    if isinstance(spec, Growing):
                        ages = re.compile(rf"{PREFIX}{re.escape(component)}/{re.escape(name)}\.(\d+)\.")
                        count = len({found[1] for entry in names if (found := ages.match(entry))})
                        state[name] = self._empty_entries(holder, spec, count)
            carried[micro_batch] = states
        return carried

    def drop_padding(self, carried: Mapping[int, States], loaded: Mapping[str, Fragments]) -> None:
        """Cut growing lists down to the entries their rows had when they were saved.

        Args:
            carried: states that were loaded, by micro-batch.
            loaded: the fragments of these states.
        """
        for index, states in enumerate(carried.values()):
            for component, holder in self.stage.components.items():
                state = states[component]
                for name, spec in holder.specs.items():
                    if isinstance(spec, Growing):
                        counts = loaded[f"{PREFIX}{component}/{name}.entries"].pieces[index].tensor
                        state[name] = state[name][len(state[name]) - int(counts.max()) :]

    def _longest_lists(self, carried: Mapping[int, States]) -> dict[tuple[str, str], int]:
        """Return the most entries of any lane on any data-parallel rank, by component and name of the growing list."""
        lists = [
            (component, name)
            for component, holder in self.stage.components.items()
            for name, spec in holder.specs.items()
            if isinstance(spec, Growing)
        ]
        if not lists or not carried:
            return {}
        counts = [max(len(states[component][name]) for states in carried.values()) for component, name in lists]
        agreed = torch.tensor(counts, device=self.topology.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.topology.dp_group)
        return dict(zip(lists, agreed.tolist(), strict=True))

    def _whole_shape(self, spec: TensorSpec, tensor: Tensor) -> list[int]:
        """Return the shape of a global tensor. tensor: [..., rows, ...] a state's tensor on this rank, by `spec`."""
        shape = list(tensor.shape)
        batch = spec.axis("batch")
        assert batch is not None
        shape[batch] = self.micro_batches * self.topology.dp_size * self.rows
        if (axis := spec.shard_axis) is not None:
            shape[axis] *= self.topology.tp_size
        return shape

    def _empty_entries(self, holder: Stateful, spec: Growing, count: int) -> list[dict[str, Tensor]]:
        """Return `count` entries of zeros for a growing list."""
        device = self.topology.device
        return [
            {part: holder.zeros(declared, self.rows, device, self.dtype) for part, declared in spec.entry.items()}
            for _ in range(count)
        ]
