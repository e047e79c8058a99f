"""How the laws run a mixer: alone or inside a small model, over rows that hold several documents, in any calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from megamem.memory.base import Chunk, Growing, Losses, Mixer, State, Stateful, States, StateSpec, TensorSpec
from megamem.model.stage import Stage, add_losses, build_stage
from megamem.parallel.linears import Linears, PlainLinears, initialize_parameters
from megamem.pipeline.reader import ChunkReader, RowGroup
from tests.contract.case import CHUNK, Case
from tests.contract.paths import along_path

CPU = torch.device("cpu")
SUBJECTS = ["mixer", "stage"]


class Alone(nn.Module):
    """A bare mixer behind the interface of a `Stage` of one layer: pieces and resets as the stage does them."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        self.mixer = mixer

    one_grid = False

    @property
    def components(self) -> dict[str, Stateful]:
        """See `Stage.components`."""
        return {"layers.0": self.mixer}

    def initial_states(self, rows: int, device: torch.device, dtype: torch.dtype) -> States:
        """See `Stage.initial_states`."""
        return {"layers.0": self.mixer.initial_state(rows, device, dtype)}

    def forward(self, x: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """See `Stage.read_chunk`; x: hidden [tokens, batch, hidden_size]."""
        state = states["layers.0"]
        outputs, losses = [], {}
        for part in chunk.padding_splits(x.shape[0]):
            here = chunk.part(part.start, part.stop)
            state = self.mixer.reset(state, here, x.device, x.dtype)
            output, state, extra = self.mixer(x[part], state, here)
            outputs.append(output)
            share = output.shape[0] / x.shape[0]
            losses = add_losses(losses, {name: loss * share for name, loss in extra.items()})
        return torch.cat(outputs), {"layers.0": state}, losses


Subject = Alone | Stage


def make(
    case: Case, subject: str, dtype: torch.dtype = torch.float64, linears: Linears | None = None, **sizes: Any
) -> Subject:
    """The case's mixer alone, or a model of three layers: the mixer between two plain ones, or the architecture.

    Weights are fixed by a seed.
    """
    linears = linears or PlainLinears()
    made: Subject
    if subject == "mixer":
        model = case.model(**sizes)
        made = Alone(model.mixer_at(0).build(model, linears, 0))
    else:
        made = build_stage(case.model(layers=3, at=1, **sizes), linears)
    initialize_parameters(made, 1, linears.tp_size, linears.tp_rank)
    return along_path(made.to(dtype))


def inputs(subject: Subject, tokens: int, rows: int, seed: int = 0) -> Tensor:
    """Random input: ids [tokens, rows] for a whole model, float64 hidden [tokens, rows, width] for a mixer."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(subject, Stage):
        return torch.randint(subject.config.vocab_size, (tokens, rows), generator=generator)
    width = subject.mixer.sizes["hidden"]
    return torch.randn(tokens, rows, width, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class Lanes:
    """Where documents begin in each row; tokens before a row's first document are left padding."""

    begins: tuple[tuple[int, ...], ...]

    def chunk(self, at: int) -> Chunk:
        """Place of a call that starts at token `at`."""
        return Chunk(tuple(at - max((b for b in row if b <= at), default=row[0]) for row in self.begins))

    def place(self, call: slice) -> Chunk:
        """Place of a call inside which documents may begin."""
        inside = (tuple(begin - call.start for begin in row if call.start < begin < call.stop) for row in self.begins)
        return Chunk(self.chunk(call.start).starts, borders=tuple(inside))

    def calls(self, tokens: int, cuts: Iterable[int], inside: bool = False) -> list[slice]:
        """Calls that end at `cuts`, and unless documents may begin `inside` calls, where a row's next one begins."""
        later = {begin for row in self.begins for begin in row[1:] if begin < tokens and not inside}
        edges = sorted({0, tokens, *later, *(cut for cut in cuts if 0 < cut < tokens)})
        return [slice(a, b) for a, b in pairwise(edges)]

    def documents(self, tokens: int) -> Iterator[tuple[int, slice, bool]]:
        """Every (row, tokens, whether it is the row's last)."""
        for row, begins in enumerate(self.begins):
            for begin, end in pairwise((*begins, tokens)):
                yield row, slice(begin, end), end == tokens

    def real(self, tokens: int) -> Tensor:
        """Which tokens belong to a document: [tokens, rows] bool."""
        return torch.tensor([[at >= row[0] for row in self.begins] for at in range(tokens)])

    @property
    def aligned(self) -> bool:
        """Whether all rows share one grid of chunks."""
        return all(begin % CHUNK == 0 for row in self.begins for begin in row)


def one_grid(rows: int) -> Lanes:
    """Every row one document from the first token on."""
    return Lanes(((0,),) * rows)


BORDERS = Lanes(((0,), (0, 2 * CHUNK), (0, CHUNK, 3 * CHUNK)))
"""Documents that start at chunk borders, at other places in each row: what the feeder makes."""
ANYWHERE = Lanes(((0, 3, 4, 19), (0,), (0, CHUNK, 2 * CHUNK + 5), (0, 2 * CHUNK + 5, 4 * CHUNK)))
"""Documents that start at any token, one of them a single token long, two of them at once."""
PADDED = Lanes(((0,), (3,), (CHUNK + 5,), (2, CHUNK + 4)))
"""Left-padded rows, each on its own grid; the last one also starts a second document amid the others' chunks."""
LAYOUTS = {"one_grid": one_grid(2), "borders": BORDERS, "padded": PADDED}


def every(step: int, tokens: int) -> range:
    """Cuts for calls of `step` tokens."""
    return range(step, tokens, step)


def run(
    subject: Subject, x: Tensor, lanes: Lanes, cuts: Iterable[int], states: States | None = None, inside: bool = False
) -> tuple[Tensor, States, Losses]:
    """All tokens of x in the calls that `cuts` make: outputs [tokens, rows, width], final states, losses.

    Losses are summed over tokens and rows.

    With `inside` documents begin inside calls, which otherwise end there too. An architecture whose rows share a grid
    reads them in groups where they do not: then it has one set of states for each group, and none is returned.
    """
    if states is None:
        dtype = next(subject.parameters()).dtype
        states = subject.initial_states(x.shape[1], CPU, dtype)
    outputs, losses = [], {}
    if subject.one_grid and not inside:
        assert isinstance(subject, Stage)
        return _run_in_groups(subject, x, lanes, cuts, states)
    for call in lanes.calls(x.shape[0], cuts, inside):
        place = lanes.place(call) if inside else lanes.chunk(call.start)
        output, states, extra = subject(x[call], states, place)
        outputs.append(output)
        # each is a mean over the call's tokens and rows
        counted = (call.stop - call.start) * x.shape[1]
        losses = add_losses(losses, {name: loss * counted for name, loss in extra.items()})
    return torch.cat(outputs), states, losses


def _run_in_groups(
    subject: Stage, x: Tensor, lanes: Lanes, cuts: Iterable[int], states: States
) -> tuple[Tensor, States, Losses]:
    """`run` through the reader that every evaluation and generation uses."""
    reader = ChunkReader(subject)
    groups = [RowGroup(list(range(x.shape[1])), states)]
    outputs = [reader.read(x[call], lanes.chunk(call.start), groups) for call in lanes.calls(x.shape[0], cuts)]
    assert all(output is not None for output in outputs)
    return torch.cat(outputs), groups[0].states if len(groups) == 1 else {}, {}


def has_memory(component: Stateful) -> bool:
    """Whether a mixer, or a memory of the whole model, declares anything that passes from chunk to chunk."""
    specs = component.specs.values()
    return any(isinstance(spec, Growing) or (spec.kind == "memory" and 0 not in spec.shape) for spec in specs)


def row_of(specs: StateSpec, state: State, row: int) -> State:
    """The state of one batch row, its batch axis kept with size 1."""

    def pick(spec: Any, value: Any) -> Any:
        if isinstance(spec, Growing):
            return [{name: pick(spec.entry[name], entry[name]) for name in spec.entry} for entry in value]
        axis = spec.axis("batch")
        return value if axis is None else value.narrow(axis, row, 1)

    return {name: pick(spec, state[name]) for name, spec in specs.items()}


def state_error(specs: StateSpec, batched: State, alone: State, same_grid: bool = True) -> float:
    """Largest difference between one row of a batch's state and the state of a run on that row alone.

    The batch may keep more columns of `open` tensors and more list entries, for its other rows: the newest ones are
    compared. `same_grid`: whether the batch's chunks begin where those of the run alone do; if not, growing lists are
    cut elsewhere, and they and the `open` tensors beside them are not compared (later outputs show their content).
    """
    skip_lists = not same_grid and any(isinstance(spec, Growing) for spec in specs.values())
    worst = 0.0
    for name, spec in specs.items():
        if isinstance(spec, Growing):
            if not skip_lists:
                ours, theirs = batched[name], alone[name]
                assert len(ours) >= len(theirs), f"{name}: {len(ours)} entries, a run alone keeps {len(theirs)}"
                for a, b in zip(ours[len(ours) - len(theirs) :], theirs, strict=True):
                    worst = max(worst, state_error(spec.entry, a, b))
        elif not (skip_lists and spec.kind == "open"):
            worst = max(worst, _tensor_error(name, spec, batched[name], alone[name]))
    return worst


def _tensor_error(name: str, spec: TensorSpec, batched: Tensor, alone: Tensor) -> float:
    if (axis := spec.axis("open")) is not None:
        extra = batched.shape[axis] - alone.shape[axis]
        assert extra >= 0, f"{name}: {tuple(batched.shape)} lacks columns of {tuple(alone.shape)}"
        batched = batched.narrow(axis, extra, alone.shape[axis])
    assert batched.shape == alone.shape, f"{name}: {tuple(batched.shape)} != {tuple(alone.shape)}"
    return largest(batched - alone)


def largest(x: Tensor) -> float:
    """Largest magnitude, 0 for an empty tensor."""
    return x.abs().max().item() if x.numel() else 0.0


WORST: dict[str, tuple[float, float]] = {}
"""Per law, the largest error measured in this session and its tolerance; printed after the tests."""


def within(law: str, error: float, tolerance: float) -> None:
    """Assert error <= tolerance (false for NaN) and keep the worst error for the report."""
    worst, allowed = WORST.get(law, (0.0, tolerance))
    WORST[law] = (max(worst, error), max(allowed, tolerance))
    assert error <= tolerance, f"{law}: error {error:.3g} > {tolerance:.3g}"
