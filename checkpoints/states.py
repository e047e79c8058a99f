"""Memory states as named whole tensors, whatever the layout: how they are saved, and how a rank gets its part back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.distributed import ProcessGroup

from megamem.memory.base import Growing, State, StateSpec, TensorSpec
from megamem.parallel.gather import gather_shards


def named_tensors(specs: StateSpec, state: State) -> Iterator[tuple[str, TensorSpec, Tensor]]:
    """Every tensor of a layer's state with its name and declaration.

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


def whole_state(specs: StateSpec, state: State, group: ProcessGroup) -> dict[str, Tensor]:
    """A layer's state by name, gathered over the tensor-parallel ranks of `group`. A collective of all of them."""
    return {name: gather_shards(tensor, spec.shard_axis, group) for name, spec, tensor in named_tensors(specs, state)}


def local_state(specs: StateSpec, whole: Mapping[str, Tensor], tp_size: int = 1, tp_rank: int = 0) -> State:
    """One rank's state from whole tensors by name, for any tensor-parallel size. Raises KeyError if one is missing."""

    def part(name: str, spec: TensorSpec) -> Tensor:
        axis = spec.shard_axis
        tensor = whole[name]
        return (tensor if axis is None else tensor.chunk(tp_size, axis)[tp_rank]).contiguous()

    state: State = {}
    for name, spec in specs.items():
        if isinstance(spec, Growing):
            count = len({key.split(".")[1] for key in whole if key.startswith(f"{name}.")})
            state[name] = [
                {key: part(f"{name}.{age}.{key}", declared) for key, declared in spec.entry.items()}
                for age in reversed(range(count))
            ]
        else:
            state[name] = part(name, spec)
    return state
