"""Memory states of streams, saved by ranks of one layout and read by those of another, rows and lists in their places.

`tests/contract/test_reshard.py` does this with real processes and one micro-batch; here several of them on several
ranks are played one after the other, with lists of different lengths.
"""

from types import SimpleNamespace

import pytest
import torch

from checkpoints import states as module
from checkpoints.fragments import region
from checkpoints.states import PREFIX, Lanes, named_tensors
from megamem.memory.base import Growing, Stateful, TensorSpec

ROWS, HEADS, WIDTH = 12, 4, 3
SPECS = {
    "sums": TensorSpec(("batch", "heads", WIDTH), "float32", shard="heads"),
    "whole": TensorSpec((2, "batch"), "float32"),
    "open": TensorSpec(("open", "batch", "heads"), "float32", shard="heads", kind="open"),
    "past": Growing(
        {"keys": TensorSpec(("batch", "heads"), "float32", shard="heads"), "seen": TensorSpec(("batch",), "int64")}
    ),
}


class Component(Stateful):
    def __init__(self, tp_size):
        self.specs, self.tp_size = SPECS, tp_size
        self.sizes = {"heads": HEADS, "open": 0}


class Ranks:
    """All ranks of a layout: (micro-batches, data-parallel, tensor-parallel)."""

    def __init__(self, micro_batches, dp, tp):
        self.micro_batches, self.dp, self.tp = micro_batches, dp, tp
        self.rows = ROWS // (micro_batches * dp)
        self.all = [self.lanes(dp_rank, tp_rank) for dp_rank in range(dp) for tp_rank in range(tp)]

    def lanes(self, dp_rank, tp_rank):
        topology = SimpleNamespace(
            dp_size=self.dp,
            dp_rank=dp_rank,
            tp_size=self.tp,
            tp_rank=tp_rank,
            dp_group=None,
            device=torch.device("cpu"),
        )
        component = Component(self.tp)
        stage = SimpleNamespace(
            components={"layers.0": component},
            initial_states=lambda rows, device, dtype: {"layers.0": component.initial_state(rows, device, dtype)},
        )
        return Lanes(stage, topology, self.micro_batches, self.rows, torch.float32)

    def of(self, lanes, micro_batch):
        """Rows of the whole batch, and heads, of a micro-batch on a rank."""
        first = (micro_batch * self.dp + lanes.topology.dp_rank) * self.rows
        heads = HEADS // self.tp
        return slice(first, first + self.rows), slice(
            lanes.topology.tp_rank * heads, (lanes.topology.tp_rank + 1) * heads
        )


def lengths(row):
    """Entries that a row has: the first half of the batch has read on for longer."""
    return 3 if row < ROWS // 2 else 1


def value(name, row, head=0, place=0, age=0):
    """A number for each place of the global states, so that each is known wherever it lands."""
    return 10_000 * (1 + ["sums", "whole", "keys", "seen"].index(name)) + 1000 * age + 50 * row + 10 * head + place


def carried(ranks, lanes):
    """States of a rank as training leaves them; all rows of a micro-batch have as many entries."""
    found = {}
    for micro_batch in range(ranks.micro_batches):
        chosen = ranks.of(lanes, micro_batch)
        rows, heads = range(ROWS)[chosen[0]], range(HEADS)[chosen[1]]
        (entries,) = {lengths(row) for row in rows}
        found[micro_batch] = {
            "layers.0": {
                "sums": torch.tensor(
                    [[[float(value("sums", r, h, p)) for p in range(WIDTH)] for h in heads] for r in rows]
                ),
                "whole": torch.tensor([[float(value("whole", r, place=p)) for r in rows] for p in range(2)]),
                "open": torch.zeros(0, len(rows), len(heads)),
                "past": [
                    {
                        "keys": torch.tensor([[float(value("keys", r, h, age=age)) for h in heads] for r in rows]),
                        "seen": torch.tensor([value("seen", r, age=age) for r in rows]),
                    }
                    for age in reversed(range(entries))
                ],
            }
        }
    return found


@pytest.fixture
def agreed(monkeypatch):
    """Data-parallel ranks agree on the longest list; played by one process, the answer is known."""
    monkeypatch.setattr(module.dist, "all_reduce", lambda tensor, *args, **kwargs: tensor.fill_(3))


def saved(ranks):
    """Global tensors put together from what all ranks write; every element exactly once."""
    whole, written = {}, {}
    for lanes in ranks.all:
        for name, fragments in lanes.fragments(carried(ranks, lanes)).items():
            if not fragments.writes:
                continue
            for piece in fragments.pieces:
                target = whole.setdefault(name, torch.zeros(fragments.shape, dtype=piece.tensor.dtype))
                count = written.setdefault(name, torch.zeros(fragments.shape, dtype=torch.int64))
                where = region(piece.offsets, piece.tensor.shape)
                target[where] = piece.tensor
                count[where] += 1
    assert all(bool((count == 1).all()) for count in written.values())
    return whole


LAYOUTS = [(1, 2, 1), (2, 1, 1), (2, 3, 2), (6, 1, 4), (4, 1, 2), (2, 2, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_global_tensors_are_the_same_from_every_layout(agreed, layout):
    whole = saved(Ranks(*layout))
    assert set(whole) == {
        PREFIX + "layers.0/" + name
        for name in (
            "sums",
            "whole",
            "past.entries",
            *(f"past.{age}.{part}" for age in range(3) for part in ("keys", "seen")),
        )
    }, "nothing of what is open at a border of chunks"
    part = {name.removeprefix(PREFIX + "layers.0/"): tensor for name, tensor in whole.items()}
    assert part["sums"].shape == (ROWS, HEADS, WIDTH)
    assert part["sums"][7, 2, 1] == value("sums", 7, 2, 1)
    assert part["whole"][1].tolist() == [value("whole", row, place=1) for row in range(ROWS)]
    assert part["past.entries"].tolist() == [3] * 6 + [1] * 6
    for age in range(3):
        expected = [value("seen", row, age=age) if age < lengths(row) else 0 for row in range(ROWS)]
        assert part[f"past.{age}.seen"].tolist() == expected, "counted from the newest, padded at the old end"


@pytest.mark.parametrize("source", [(2, 1, 1), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("target", [*LAYOUTS, (1, 1, 1), (3, 1, 1), (12, 1, 1), (1, 3, 4)], ids=str)
def test_every_layout_reads_what_another_saved(agreed, source, target):
    whole, ranks = saved(Ranks(*source)), Ranks(*target)
    for lanes in ranks.all:
        empty = lanes.empty(set(whole))
        fragments = lanes.fragments(empty)
        for name, found in fragments.items():
            assert tuple(found.shape) == tuple(whole[name].shape)
            for piece in found.pieces:
                piece.tensor.copy_(whole[name][region(piece.offsets, piece.tensor.shape)])
        lanes.drop_padding(empty, fragments)
        for micro_batch, state in empty.items():
            rows, heads = ranks.of(lanes, micro_batch)
            mine = state["layers.0"]
            entries = max(lengths(row) for row in range(ROWS)[rows])
            assert len(mine["past"]) == entries, "no more than the row with most entries has"
            for name, spec, tensor in named_tensors(SPECS, mine):
                if name == "open":
                    assert tensor.numel() == 0
                    continue
                index = [slice(None)] * tensor.ndim
                index[spec.axis("batch")] = rows
                if spec.shard_axis is not None:
                    index[spec.shard_axis] = heads
                assert torch.equal(tensor, whole[f"{PREFIX}layers.0/{name}"][tuple(index)]), name


def test_a_checkpoint_without_states_gives_none(agreed):
    lanes = Ranks(2, 1, 1).all[0]
    assert lanes.empty({"master/embedding.weight", "rng/cpu/pp0.dp0.tp0"}) == {}
    assert lanes.fragments({}) == {}
