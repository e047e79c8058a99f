"""Whole chunks that a reader has before it are encoded side by side, with the results of one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import megamem.pipeline.reader as reader_module
from megamem.config.model import ModelConfig
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.losses import whole_readings
from megamem.evaluation.reading import sum_readings
from megamem.memory.base import Chunk, States
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.reader import ChunkReader, RowGroup
from tests.unit.evaluation_helpers import CHUNK, VOCABULARY, documents, make_stage

LENGTHS = (50, 19, 32, 8, 27, 5)
FORMS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "two memories": {"memories_per_chunk": 2, "compressed_size": 5},
    "variable": {"positions": "variable"},
}
ROUNDING = 1e-12
"""Products of more rows may be summed in another order; values are about 1."""


def built(form: str = "fixed") -> Stage:
    """A memory model with weights so large that its memories have a visible effect."""
    tree = {
        "layers": 3, "hidden_size": 16, "heads": 4, "ffn_size": 24, "vocab_size": VOCABULARY, "chunk_size": CHUNK,
        "init_std": 0.3,
        "architecture": {
            "kind": "memory_model", "slots": 3, "encoder": {"layers": 1, "hidden_size": 12, "heads": 3}, **FORMS[form],
        },
    }  # fmt: skip
    stage = build_stage(ModelConfig.model_validate(tree), PlainLinears())
    initialize_parameters(stage, 1)
    return stage.double()


class Encoded:
    """The batch rows of each reading of a stage's encoder."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        mixer = stage.layers["0"].mixer
        forward = mixer.forward
        monkeypatch.setattr(mixer, "forward", lambda x, *rest: self.rows.append(x.shape[1]) or forward(x, *rest))

    def taken(self) -> list[int]:
        """Those since the last call."""
        rows, self.rows = self.rows, []
        return rows


def tokens_ahead(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(reader_module, "TOKENS_AHEAD", tokens)


@pytest.mark.parametrize("form", FORMS)
def test_held_out_losses_are_those_of_chunks_that_are_encoded_alone(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that end documents at different calls, a bound of five chunks in two rows."""
    stage = built(form)
    encoded, readings = Encoded(stage, monkeypatch), whole_readings(documents(*LENGTHS), CHUNK)
    calls: list[int] = []

    def sums() -> Any:
        return sum_readings(ChunkReader(stage), readings, 2, lambda call, _: calls.append(call))

    tokens_ahead(monkeypatch, 5 * 2 * CHUNK)
    ahead, together = sums(), encoded.taken()
    tokens_ahead(monkeypatch, 0)
    alone, apart = sums(), encoded.taken()
    assert calls == [*range(1, 11)] * 2
    assert together == [10, 10]
    assert sum(apart) == 20
    assert max(apart) == 2
    for name in ("slots", "within", "positions"):
        ours, theirs = getattr(ahead, name), getattr(alone, name)
        # summed nats of up to 27 tokens a slot
        assert abs(ours - theirs).max() < 100 * ROUNDING, name
    assert ahead.slots[1].sum() == sum(LENGTHS)


def differences(ours: Sequence[RowGroup], theirs: Sequence[RowGroup]) -> float:
    """The largest difference of two readers' states."""

    def tensors(states: States) -> list[Tensor]:
        return [tensor for state in states.values() for tensor in state.values()]

    assert [group.rows for group in ours] == [group.rows for group in theirs]
    pairs = [
        pair
        for one, two in zip(ours, theirs, strict=True)
        for pair in zip(tensors(one.states), tensors(two.states), strict=True)
    ]
    assert all(one.shape == two.shape for one, two in pairs)
    return max(float((one - two).abs().max()) for one, two in pairs if one.numel())


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_read_as_token_by_token(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with left padding of a part of a chunk and of a whole one, and one without; then further text."""
    stage = built(form)
    encoded = Encoded(stage, monkeypatch)
    prompt, place = torch.randint(VOCABULARY, (3 * CHUNK + 3, 3)), Chunk((-5, 0, -CHUNK))
    tokens_ahead(monkeypatch, 2 * CHUNK)
    ahead, slow = ChunkReader(stage), ChunkReader(stage)
    groups, slowly = ahead.begin(place), slow.begin(place)
    found = ahead.read(prompt, place, groups, keep=2 * CHUNK)
    together = encoded.taken()
    expected = torch.cat([slow.read(prompt[t : t + 1], place.after(t), slowly) for t in range(len(prompt))])
    assert found is not None
    assert (found - expected[-2 * CHUNK :]).abs().max() < ROUNDING
    assert differences(groups, slowly) < ROUNDING
    # of one row two chunks side by side, of two rows one
    assert max(together) == 2
    assert sum(together) == sum(encoded.taken())
    # to the end of the chunk and over the next ones
    place = place.after(len(prompt))
    more = torch.randint(VOCABULARY, (3 * CHUNK, 3))
    found = ahead.read(more, place, groups)
    expected = torch.cat([slow.read(more[t : t + 1], place.after(t), slowly) for t in range(len(more))])
    assert (found - expected).abs().max() < ROUNDING
    assert differences(groups, slowly) < ROUNDING


@torch.no_grad()
def test_a_document_that_follows_an_unfinished_chunk_does_not_see_it() -> None:
    stage = built()
    first, text = torch.randint(VOCABULARY, (CHUNK - 3, 2)), torch.randint(VOCABULARY, (3 * CHUNK + 2, 2))
    place, reader = Chunk((0, 0)), ChunkReader(stage)
    used, fresh = reader.begin(place), reader.begin(place)
    reader.read(first, place, used)
    assert torch.equal(reader.read(text, place, used), reader.read(text, place, fresh))
    assert differences(used, fresh) == 0


def test_contexts_of_scored_tokens_and_prompts_are_encoded_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = built()
    encoded, evaluator = Encoded(stage, monkeypatch), Evaluator(stage)
    texts = [torch.randint(VOCABULARY, (length,)).tolist() for length in (4 * CHUNK + 2, 3 * CHUNK + 6)]
    ahead = evaluator.score(texts, [2, 5])
    # the last chunks are read one by one, for the sake of their logits; the very last one has not ended
    assert encoded.taken() == [6, 2]
    written = evaluator.generate(texts, 3)
    # rows are read apart: the second one's padding ends a chunk, and so does its second new token
    assert encoded.taken() == [4, 1, 3, 1]
    tokens_ahead(monkeypatch, 0)
    alone = evaluator.score(texts, [2, 5])
    assert encoded.taken() == [2] * 4
    # logits in float32
    assert [nats for nats, _ in ahead] == pytest.approx([nats for nats, _ in alone], rel=1e-6)
    assert evaluator.generate(texts, 3) == written


def test_a_pipeline_s_stage_reads_chunk_by_chunk() -> None:
    model = built().config
    lower, whole = build_stage(model, PlainLinears(), range(2)), build_stage(model, PlainLinears())
    assert ChunkReader(lower).chunks_ahead(4) == 1
    assert ChunkReader(whole).chunks_ahead(4) == 16_384 // (4 * CHUNK)
    assert ChunkReader(whole).chunks_ahead(16_384) == 1


def test_models_without_an_encoder_are_read_as_before() -> None:
    """`Stage.prepare` gives back the places it was given."""
    stage = make_stage("elastic_memory")
    places = [Chunk((0,)), Chunk((CHUNK,))]
    assert ChunkReader(stage).prepare(torch.zeros(2 * CHUNK, 1, dtype=torch.int64), places) is places
