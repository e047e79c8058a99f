"""Pieces of global tensors: flat runs as rectangles, and what is saved from any split is read into any other."""

import itertools
from math import prod

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from checkpoints.fragments import Fragments, LoadPlanner, Piece, SavePlanner, rectangles
from checkpoints.location import ObjectPath
from checkpoints.storage import SafeReader, SafeWriter, read_index
from checkpoints.target import target

SHAPES = [(7,), (3, 5), (4, 1), (1, 6), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_cover_a_flat_run_in_order(shape):
    """Every run of every shape: the rectangles' elements, one after the other, are the run's."""
    numbers = torch.arange(prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(prod(shape) + 1), 2):
        found = rectangles(shape, start, stop)
        cut = [numbers[tuple(slice(a, a + n) for a, n in zip(o, s, strict=True))].flatten() for o, s in found]
        assert torch.cat([*cut, torch.empty(0, dtype=torch.int64)]).tolist() == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1, "no more pieces than needed"


def test_a_matrix_s_run_is_two_rows_and_a_block():
    assert rectangles((5, 4), 2, 17) == [((0, 2), (1, 2)), ((1, 0), (3, 4)), ((4, 0), (1, 1))]
    assert rectangles((5, 4), 4, 12) == [((1, 0), (2, 4))]


def split(value, tp, dp, axis):
    """What ZeRO 1 under tensor parallelism gives the ranks: (start, flat run, rank) of each."""
    shards = [value] * tp if axis is None else value.chunk(tp, axis)
    for tp_rank, shard in enumerate(shards):
        flat = shard.contiguous().flatten()
        edges = torch.linspace(0, flat.numel(), dp + 1).long().tolist()
        for start, stop in itertools.pairwise(edges):
            run = flat[start:stop].clone()
            yield run, Fragments.of_flat(run, start, shard.shape, axis, tp, tp_rank)


@pytest.fixture(params=["disk", "store"])
def parent(request, tmp_path):
    """A folder, and an object store in memory."""
    return tmp_path if request.param == "disk" else ObjectPath(f"memory://{tmp_path.name}")


def save(folder, fragments):
    """As several ranks would write it, here by one."""
    into = target(folder)
    into.prepare()
    pieces = [piece for part in fragments if part.writes for piece in part.pieces]
    state = {"value": Fragments(fragments[0].shape, pieces)}
    state_dict_saver.save(state, storage_writer=SafeWriter(into, 0), planner=SavePlanner(), no_dist=True)
    into.complete(into.written())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("shape", [(8, 12), (12, 4), (4, 4, 3)], ids=str)
def test_any_split_is_read_into_any_other(parent, shape, axis):
    value = torch.randn(shape)
    for index, (tp, dp) in enumerate(itertools.product((1, 2, 4), (1, 3))):
        folder = parent / str(index)
        save(folder, [part for _, part in split(value, tp, dp, axis)])
        for target_tp, target_dp in itertools.product((1, 2, 4), (1, 2, 5)):
            for run, part in split(torch.zeros(shape), target_tp, target_dp, axis):
                assert part.shape == value.shape
                run.fill_(torch.nan)  # what is not read shows
                state_dict_loader.load(
                    {"value": part}, storage_reader=SafeReader(folder), planner=LoadPlanner(), no_dist=True
                )
                for piece in part.pieces:
                    where = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.tensor.shape, strict=True))
                    assert torch.equal(piece.tensor, value[where])
                assert not run.isnan().any(), "pieces are views of the rank's own memory"


def test_replicas_are_written_once():
    value = torch.randn(4, 4)
    assert [part.writes for _, part in split(value, 4, 1, None)] == [True, False, False, False]
    assert all(part.writes for _, part in split(value, 4, 1, 0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8, torch.int64], ids=str)
def test_every_dtype_comes_back(parent, dtype):
    value = torch.arange(6).to(dtype)
    save(parent / "c", [Fragments(value.shape, [Piece((0,), value)])])
    found = torch.zeros(6, dtype=dtype)
    state_dict_loader.load(
        {"value": Fragments(found.shape, [Piece((0,), found)])},
        storage_reader=SafeReader(parent / "c"), planner=LoadPlanner(), no_dist=True,
    )  # fmt: skip
    assert torch.equal(found, value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_on_disk_is_a_pickle(tmp_path):
    """Safetensors and JSON only: reading cannot run code."""
    save(tmp_path / "c", [Fragments((3,), [Piece((0,), torch.ones(3))])])
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert names == {"rank-00000.safetensors", "index.json", "manifest.json", "COMPLETE"}
    assert read_index(tmp_path / "c")["value"]["shape"] == [3]


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("victim", ["rank-00000.safetensors", "index.json"])
def test_a_malicious_file_is_refused_and_not_run(tmp_path, victim):
    import pickle

    folder, target = tmp_path / "c", tmp_path / "touched"
    save(folder, [Fragments((3,), [Piece((0,), torch.ones(3))])])
    (folder / victim).write_bytes(pickle.dumps(Bomb(target)))
    found = torch.zeros(3)
    with pytest.raises(CheckpointException) as caught:
        state_dict_loader.load(
            {"value": Fragments((3,), [Piece((0,), found)])},
            storage_reader=SafeReader(folder), planner=LoadPlanner(), no_dist=True,
        )  # fmt: skip
    ((cause, _),) = caught.value.failures.values()
    assert f"{folder / victim}: cannot be read" in str(cause)
    assert not target.exists()
    pickle.loads((folder / victim).read_bytes()).close()  # noqa: S301, to see that the file would have done it
    assert target.exists()
