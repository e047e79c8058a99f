"""Checkpoints read in one process: tensors put together, compared bit by bit, merged; which one a path means."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.find import find_checkpoint
from checkpoints.folder import MARKER, Checkpoint, folder_name, open_checkpoint
from checkpoints.read import MASTER, compare, merge_weights, read_tensor, read_weights
from checkpoints.whole import whole_model
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.errors import CheckpointError
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.start_weights import open_weights
from tests.saved_run import saved_run


def write(folder, tensors, ranks=1, step=4):
    """A checkpoint whose tensors are cut along their first axis, a piece for each rank; scalars lie with rank 0."""
    path = folder / folder_name(step)
    path.mkdir(parents=True)
    files, index = [{} for _ in range(ranks)], {}
    for name, tensor in tensors.items():
        pieces, at = [], 0
        for rank, part in enumerate(tensor.chunk(ranks) if tensor.ndim else [tensor]):
            offsets = [at, *[0] * (tensor.ndim - 1)] if tensor.ndim else []
            files[rank][f"{name}@{','.join(map(str, offsets))}"] = part.contiguous()
            pieces.append((offsets, list(part.shape), f"rank-{rank:05d}.safetensors"))
            at += len(part) if tensor.ndim else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "shape": list(tensor.shape), "pieces": pieces}
    for rank, held in enumerate(files):
        save_file(held, path / f"rank-{rank:05d}.safetensors")
    (path / "index.json").write_text(json.dumps(index))
    (path / MARKER).touch()
    return Checkpoint(path, step)


TENSORS = {
    "master/weight": torch.arange(12.0).view(4, 3),
    "master/gate": torch.tensor(0.5),
    "exp_avg/weight": torch.linspace(-1, 1, 12).view(4, 3).bfloat16(),
    "rng/cpu": torch.arange(5, dtype=torch.uint8),
    "states/counter": torch.tensor([3, -4]),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensors_are_put_together_from_pieces(tmp_path, ranks):
    checkpoint = write(tmp_path, TENSORS, ranks)
    for name, tensor in TENSORS.items():
        found = read_tensor(checkpoint, name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    weights = dict(read_weights(checkpoint))
    assert list(weights) == ["weight", "gate"], "the FP32 ones, without moments and states"


def test_what_is_not_there_is_named(tmp_path):
    checkpoint = write(tmp_path, TENSORS, 2)
    with pytest.raises(CheckpointError, match=r"step-00000004: holds no tensor master/other$"):
        read_tensor(checkpoint, "master/other")
    (checkpoint.path / "rank-00001.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors: cannot be read \(") as caught:
        read_tensor(checkpoint, "master/weight")
    assert "\n" not in str(caught.value)


# comparison


def differences(tmp_path, changes, ranks=(1, 1)):
    a = write(tmp_path / "a", TENSORS, ranks[0])
    b = write(
        tmp_path / "b", {name: value for name, value in {**TENSORS, **changes}.items() if value is not None}, ranks[1]
    )
    count, found = compare(a, b)
    return count, [str(difference) for difference in found]


def test_how_pieces_lie_is_no_difference(tmp_path):
    assert differences(tmp_path, {}, ranks=(1, 4)) == (5, [])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("master/weight", torch.arange(12.0).view(4, 3).sqrt(), "10 of 12 values differ, by 7.68 at most"),
        ("master/gate", torch.tensor(0.75), "1 of 1 values differ, by 0.25 at most"),
        ("master/weight", torch.arange(12.0).view(3, 4), "torch.float32 [4, 3] and torch.float32 [3, 4]"),
        ("master/weight", torch.arange(12.0).view(4, 3).double(), "torch.float32 [4, 3] and torch.float64 [4, 3]"),
        ("states/counter", torch.tensor([3, -5]), "1 of 2 values differ, by 1 at most"),
        ("rng/cpu", torch.tensor([0, 1, 2, 3, 255], dtype=torch.uint8), "1 of 5 values differ, by 251 at most"),
    ],
)
def test_differences_in_words(tmp_path, name, value, said):
    assert differences(tmp_path, {name: value}) == (5, [f"{name}: {said}"])


def test_tensors_of_one_checkpoint_only(tmp_path):
    count, found = differences(tmp_path, {"master/gate": None, "master/new": torch.ones(1)})
    assert count == 6
    assert found == [
        f"master/gate: only in {tmp_path / 'a' / 'step-00000004'}",
        f"master/new: only in {tmp_path / 'b' / 'step-00000004'}",
    ]


@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_bits_are_compared_and_not_numbers(tmp_path, shape):
    """NaN equals itself, and zero is not minus zero."""
    nan, zero = torch.full(shape, torch.nan), torch.zeros(shape)
    one = write(tmp_path / "1", {"nan": nan, "zero": zero})
    assert list(compare(one, write(tmp_path / "2", {"nan": nan, "zero": zero}))[1]) == []
    (found,) = compare(one, write(tmp_path / "3", {"nan": nan, "zero": -zero}))[1]
    assert found.name == "zero"


# merged weights


def test_weights_are_merged_into_one_file(tmp_path):
    checkpoint = write(tmp_path, TENSORS, 4)
    (checkpoint.path / "run.json").write_text(json.dumps(saved_run(4, vocabulary_sha256="abc")))
    assert merge_weights(checkpoint, tmp_path / "new" / "weights.safetensors") == 2
    merged = load_file(tmp_path / "new" / "weights.safetensors")
    assert sorted(merged) == ["gate", "weight"]
    assert all(torch.equal(value, TENSORS[MASTER + name]) for name, value in merged.items())
    assert open_weights(tmp_path / "new" / "weights.safetensors").tokenizer == "abc"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights.safetensors"], "nothing temporary"


def test_no_file_is_overwritten(tmp_path):
    checkpoint, path = write(tmp_path, TENSORS), tmp_path / "weights.safetensors"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: exists already; choose another file"):
        merge_weights(checkpoint, path)
    assert path.read_text() == "mine"
    with pytest.raises(
        CheckpointError, match=r"weights\.safetensors/x: cannot be written \((File exists|Not a directory)\)"
    ):
        merge_weights(checkpoint, path / "x")


# which checkpoint a path means


def test_a_path_means_a_checkpoint_or_the_newest_of_a_run(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    for step in (2, 10, 9):
        write(folder, TENSORS, step=step)
    (folder / folder_name(10) / MARKER).unlink()
    for path in (tmp_path / "run", folder):
        assert find_checkpoint(path).step == 9, "10 was not written to its end"
    assert find_checkpoint(folder / "step-00000002").step == 2
    assert find_checkpoint(folder / "step-00000010").step == 10, "as it was named: its state is told by `verify`"


def test_paths_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint in it"):
        find_checkpoint(tmp_path)
    for name in ("step-3", "step-00000003"):  # a wrong name, and no folder
        with pytest.raises(CheckpointError, match=rf"{name}: no checkpoint \(a folder called step-NNNNNNNN\)"):
            find_checkpoint(tmp_path / name)
    (tmp_path / "step-123456789").mkdir()
    assert open_checkpoint(tmp_path / "step-123456789").step == 123_456_789, "more than eight digits"


# a whole model


MODEL = {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4, "mixer": "infini_attention"}


@pytest.fixture
def trained(tmp_path):
    """(model, its weights by name, the checkpoint's tensors)."""
    model = parse_config(ModelConfig, MODEL, "test")
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, 3)
    weights = {name: parameter.detach() for name, parameter in stage.named_parameters()}
    return model, weights, {MASTER + name: value for name, value in weights.items()}


def test_a_whole_model_holds_the_checkpoint_s_weights(tmp_path, trained):
    model, weights, tensors = trained
    found = whole_model(write(tmp_path, {**tensors, "exp_avg/x": torch.ones(2)}, 2), model, torch.float64)
    assert not found.training
    loaded = dict(found.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], value.double()) for name, value in weights.items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path, trained):
    model, _, tensors = trained
    without = {name: value for name, value in tensors.items() if name != "master/head.weight"}
    said = r"step-00000004: head\.weight is in the checkpoint or in the model, but not in both"
    with pytest.raises(CheckpointError, match=said):
        whole_model(write(tmp_path / "a", without), model)
    other = {**tensors, "master/head.weight": torch.ones(16, 9)}
    said = r"step-00000004: head\.weight has shape \[16, 9\], but the model's is \[16, 8\]"
    with pytest.raises(CheckpointError, match=said):
        whole_model(write(tmp_path / "b", other), model)
