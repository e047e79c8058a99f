"""Embeddings of a frozen encoder on disk: found again bit for bit, in training too; what is cut off or damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import SmallDisk
from torch import Tensor

from megamem.config.load import merge, parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.memory.base import Chunk, detach
from megamem.model.encoder_stage import EncoderStage
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.embedding_cache import ENTRY_BYTES, EmbeddingCache, identity_of
from megamem.pipeline.window import Window

CHUNK, CHUNKS, ROWS, TEXTS = 16, 3, 4, 24
MODEL: dict[str, Any] = {
    "layers": 4, "hidden_size": 32, "heads": 4, "vocab_size": 64, "chunk_size": CHUNK, "mixer": "local_attention",
    "architecture": {
        "kind": "memory_model", "slots": CHUNKS - 1, "memories_per_chunk": 2, "compressed_size": 8,
        "encoder": {"layers": 2, "hidden_size": 24, "heads": 4, "mixer": "masked_mixer"},
    },
}  # fmt: skip
SHAPE = (2, 24)


def cache(folder: Path, name: str = "encoder", dtype: torch.dtype = torch.float32) -> EmbeddingCache:
    return EmbeddingCache(folder, {"weights": name}, SHAPE, dtype)


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(64, (CHUNK, count), generator=torch.Generator().manual_seed(seed))


def embeddings(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, count, 24, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_added_is_found_again_by_this_process_and_the_next(tmp_path: Path, dtype: torch.dtype) -> None:
    x, made = ids(5), embeddings(5, dtype)
    first = cache(tmp_path, dtype=dtype)
    assert first.find(x) is None
    first.add(x, made)
    order = torch.tensor([3, 0, 3, 4, 0])
    for known in (first, cache(tmp_path, dtype=dtype)):
        found = known.find(x[:, order])
        assert found is not None
        assert found.dtype == dtype
        assert torch.equal(found, made[:, order])
        # one that is not there, and all would have to be made
        assert known.find(torch.cat((x[:, 1:], ids(1, seed=5)), 1)) is None
        # another number side by side may be summed in another order
        assert known.find(x[:, :4]) is None
    other = cache(tmp_path, "another encoder", dtype)
    assert len(other) == 0
    assert other.folder != first.folder


def test_two_processes_write_side_by_side(tmp_path: Path) -> None:
    one, two = cache(tmp_path), cache(tmp_path)
    x, made = ids(4), embeddings(4)
    one.add(x[:, :2], made[:, :2])
    two.add(x[:, 1:3], made[:, 1:3])
    found = cache(tmp_path).find(x[:, [2, 0]])
    assert found is not None
    assert torch.equal(found, made[:, [2, 0]])


@pytest.mark.parametrize(("suffix", "lost"), [(".keys", ENTRY_BYTES + 3), (".rows", 5)])
def test_what_a_kill_cut_off_is_made_again(tmp_path: Path, suffix: str, lost: int) -> None:
    x, made = ids(4), embeddings(4)
    first = cache(tmp_path)
    first.add(x, made)
    (part,) = first.folder.glob(f"*{suffix}")
    part.write_bytes(part.read_bytes()[:-lost])
    left = cache(tmp_path)
    kept = 2 if suffix == ".keys" else 3
    assert len(left) == kept
    assert left.find(x) is None
    left.add(x, made)
    found = cache(tmp_path).find(x)
    assert found is not None
    assert torch.equal(found, made)


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_what_is_damaged_is_told_and_made_again(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    x, made = ids(2), embeddings(2)
    first = cache(tmp_path)
    first.add(x, made)
    (part,) = first.folder.glob("*.rows")
    left = cache(tmp_path)
    if harm == "flip":
        data = bytearray(part.read_bytes())
        data[3] ^= 1
        part.write_bytes(data)
    else:
        part.unlink()
    assert left.find(x) is None
    (record,) = caplog.records
    why = "the embeddings of chunk 0 are damaged" if harm == "flip" else "cannot be read (No such file or directory)"
    assert record.getMessage() == f"training.embedding_cache {part}: {why}; made again"
    while left.find(x) is None:
        left.add(x, made)
    found = left.find(x)
    assert found is not None
    assert torch.equal(found, made)


def test_a_full_disk_ends_the_keeping_and_not_the_run(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    """What was kept before is found, also by the next process, which keeps on where there is room again."""
    x, made = ids(4), embeddings(4)
    first = cache(small_disk.folder)
    first.add(x, made)
    small_disk.fill()
    many, more = ids(5000, seed=3), torch.zeros(2, 5000, 24)
    for _ in range(2):
        assert first.find(many) is None
        first.add(many, more)
    (record,) = caplog.records
    said = f"{first.folder}/00000.rows: cannot be written (No space left on device); nothing more is kept"
    assert record.getMessage() == f"training.embedding_cache {said}"
    assert len(first) == 4
    for known in (first, cache(small_disk.folder)):
        found = known.find(x)
        assert found is not None
        assert torch.equal(found, made)
    small_disk.empty()
    last = cache(small_disk.folder)
    y, others = ids(3, seed=4), embeddings(3)
    last.add(y, others)
    found = cache(small_disk.folder).find(y)
    assert found is not None
    assert torch.equal(found, others)


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It goes on asking the other ranks, which may have what this one cannot keep."""
    (tmp_path / "file").touch()
    asked: list[bool] = []
    none = EmbeddingCache(tmp_path / "file", {}, SHAPE, torch.float32, lambda known: bool(asked.append(known)))
    none.add(ids(2), embeddings(2))
    assert none.find(ids(2)) is None
    assert asked == [False]
    (record,) = caplog.records
    assert record.getMessage().endswith(": cannot be used (Not a directory); nothing more is kept")


def test_what_one_rank_cannot_read_all_make(tmp_path: Path) -> None:
    asked: list[bool] = []
    x = ids(2)
    shared = EmbeddingCache(tmp_path, {}, SHAPE, torch.float32, lambda known: asked.append(known) or known)
    shared.add(x, embeddings(2))
    (part,) = shared.folder.glob("*.rows")
    part.write_bytes(bytes(part.stat().st_size))
    assert shared.find(x) is None
    assert asked == [False]


def frozen(dtype: torch.dtype) -> EncoderStage:
    stage = build_stage(ModelConfig.model_validate(MODEL), PlainLinears())
    initialize_parameters(stage, 1)
    assert isinstance(stage, EncoderStage)
    for name, parameter in stage.named_parameters():
        in_encoder = name.startswith(("encoder_embedding", "layers.0.", "layers.1.")) and "projections" not in name
        parameter.requires_grad_(not in_encoder)
    return stage.to(dtype)


def trained(stage: EncoderStage, epochs: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights of plain descent on the same texts in another order in each epoch."""
    window = Window(stage, NextToken(stage.config))
    texts = torch.randint(64, (TEXTS, CHUNKS * CHUNK + 1), generator=torch.Generator().manual_seed(2))
    places, losses = [Chunk((c * CHUNK,) * ROWS) for c in range(CHUNKS)], []
    for epoch in range(epochs):
        order = torch.randperm(TEXTS, generator=torch.Generator().manual_seed(epoch))
        for rows in texts[order].split(ROWS):
            states = detach(stage.initial_states(ROWS, torch.device("cpu"), next(stage.parameters()).dtype))
            loss, terms, _ = window(rows[:, :-1].t(), rows[:, 1:].t(), places, states, torch.tensor(1e-2))
            loss.backward()
            losses.append(terms)
            with torch.no_grad():
                for parameter in stage.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    return losses, {name: p.detach().clone() for name, p in stage.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_kept_embeddings_is_training_that_makes_them_again(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, though chunks meet other ones in each epoch; and from the second epoch on the encoder never runs."""
    plain, keeping = frozen(dtype), frozen(dtype)
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    expected_losses, expected = trained(plain, epochs=3)
    keeping.kept_embeddings = cache(tmp_path, dtype=dtype)
    calls, through = [], EncoderStage._embed_chunk
    monkeypatch.setattr(EncoderStage, "_embed_chunk", lambda *given: calls.append(1) or through(*given))
    losses, weights = trained(keeping, epochs=3)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected_losses, strict=True))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert len(calls) == TEXTS // ROWS
    encoder = [name for name, p in keeping.named_parameters() if not p.requires_grad]
    assert all(torch.equal(weights[name], start[name]) for name in encoder)
    moved = [name for name in weights if not torch.equal(weights[name], start[name])]
    assert any("projections" in name for name in moved)


TREE: dict[str, Any] = {
    "name": "case",
    "model": MODEL,
    "data": {"sources": "none", "sequence_length": CHUNKS * CHUNK, "documents": "drop"},
    "training": {
        "steps": 2, "batch_tokens": ROWS * CHUNKS * CHUNK, "freeze": "encoder", "init_from": {"encoder": "weights"},
        "embedding_cache": "kept", "precision": "fp32",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"pp": 2}}, "training.embedding_cache does not go with parallel.pp 2; it needs a memory_model"),
        ({"parallel": {"zero_stage": 3}}, "training.embedding_cache does not go with parallel.zero_stage 3"),
        ({"model": {"dropout": 0.1}}, "training.embedding_cache does not go with dropout 0.1"),
        ({"training": {"freeze": None}}, "embedding_cache kept keeps what a frozen encoder makes; use freeze encoder"),
    ],
)
def test_where_it_cannot_be_used_it_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(RunConfig, merge(TREE, sections), "file")
    assert message in str(caught.value)


def test_what_bits_depend_on_is_told_apart() -> None:
    """Another encoder, precision or way of computing has embeddings of its own; another decoder or rate has not."""

    def identity(stage: EncoderStage, rank: int = 0, **sections: Any) -> dict[str, Any]:
        return identity_of(parse_config(RunConfig, merge(TREE, sections), "file"), stage, rank, torch.device("cpu"))

    stage, changed = frozen(torch.float32), frozen(torch.float32)
    same = identity(stage)
    with torch.no_grad():
        changed.layer(2).get_parameter("mlp.up.weight").add_(1)
        changed.layer(1).get_parameter("writer.projections.0.weight").add_(1)
    assert identity(changed, model={"layers": 5}, optimizer={"lr": 1e-5}, training={"steps": 7}) == same
    assert identity(stage, training={"precision": "bf16"}) != same
    assert identity(stage, training={"compile": True}) != same
    assert identity(stage, rank=1) != same
    assert identity(stage, model={"architecture": {"encoder": {"mixer": "local_attention"}}}) != same
    with torch.no_grad():
        changed.layer(1).get_parameter("writer.norm.weight")[0] += 1
    assert identity(changed) != same
    assert identity(frozen(torch.bfloat16)) != same


def test_what_one_rank_lacks_all_make(tmp_path: Path) -> None:
    """Tensor-parallel ranks encode together: one that has not got a chunk makes the others encode it too."""
    known: list[bool] = []

    def asks(found: bool) -> bool:
        known.append(found)
        return False

    x = ids(2)
    shared = EmbeddingCache(tmp_path, {}, SHAPE, torch.float32, asks)
    assert shared.find(x) is None
    shared.add(x, embeddings(2))
    assert shared.find(x) is None
    assert known == [False, True]
