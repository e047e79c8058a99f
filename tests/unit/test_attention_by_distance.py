"""What `megamem attention` records, against loops over queries and keys that are written from the equations."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.errors import ConfigError, DataError
from megamem.evaluation.attention.by_distance import ByDistance, DistanceSums, pooled
from megamem.evaluation.attention.recording import attention_layers, held_out_texts, record_attention
from megamem.evaluation.attention.report import attention_table, numbers, write_attention
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.texts import Text
from megamem.model.stage import Stage
from tests.contract.oracles import lamemo, transformer_xl
from tests.contract.oracles.common import rms_norm, swiglu
from tests.unit.evaluation_helpers import documents
from tests.unit.test_lamemo import CHUNK, built, ids, model

ROUNDING = 1e-12
"""float64: means of some hundred shares, each from sums of some ten terms in another order."""
TEXTS = (5 * CHUNK + 4, 7 * CHUNK + 1)
"""Tokens of the documents: 5 and 7 chunks are read of them."""
ONE_V = {"positions": "transformer_xl"}


def texts() -> list[Text]:
    return [Text(f"text {i}", tuple(ids(length, 2)[:, i].tolist())) for i, length in enumerate(TEXTS)]


class Loops:
    """Single shares and alphas of one layer, as loops find them."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[float]] = defaultdict(list)
        """By the distance back."""
        self.ahead: dict[int, list[float]] = defaultdict(list)
        """By the distance ahead."""
        self.memory: list[float] = []
        """What each token and head gives to the memory."""
        self.alpha: dict[int, list[float]] = defaultdict(list)
        """By row."""


class WatchedLayer(lamemo.Layer):
    """The layer of LaMemo's oracle, which notes each share that it finds."""

    loops: dict[int, Loops]
    filling: int

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor], number: int) -> None:
        super().__init__(model, weights, number)
        self.chunk = -1

    def read(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.chunk, self.count = self.chunk + 1, len(rows)
        return super().read(rows, tokens)

    def token(self, i: int, *given: Any) -> lamemo.Record:
        self.place = i
        return super().token(i, *given)

    def row(self, i: int, *given: Any) -> lamemo.Record:
        self.place = i
        old, found = (self.records[i] if self.records else None), super().row(i, *given)
        if self.mixer.look_ahead and self.mixer.interpolate and self.chunk >= self.filling:
            assert old is not None
            for s_old, s_new in zip(old[1], self.sums, strict=True):
                before, now = math.exp(s_old), math.exp(s_new)
                share = before / (before + now + 1e-6 * max(before, now))
                self.loops[self.number].alpha[i].append(share)
        return found

    def look(self, query: Tensor, key: Tensor, value: Tensor, seen: list[tuple[int, int]], bias: str) -> lamemo.Record:
        found = super().look(query, key, value, seen, bias)
        self.sums = found[1]
        if self.chunk < self.filling:
            return found
        own, width = self.loops[self.number], self.model.resolved_head_dim
        table = self.own("distance_key.weight").view(self.model.heads, width, -1)
        for h in range(self.model.heads):
            g = h // (self.model.heads // self.model.resolved_kv_heads)
            content, distance = query[h] + self.own("biases.content")[h], query[h] + self.own(f"biases.{bias}")[h]
            powers = [
                math.exp(
                    float(content @ key[j, g] + distance @ (table[h] @ transformer_xl.wave(d, self.model.hidden_size)))
                    / math.sqrt(width)
                )
                for j, d in seen
            ]
            shares = {j: power / sum(powers) for power, (j, _) in zip(powers, seen, strict=True)}
            for j, share in shares.items():
                if self.place < self.count:
                    own.ahead[j - self.place].append(share)
                else:
                    own.tokens[self.place - j].append(share)
            if self.place >= self.count:
                own.memory.append(sum(share for j, share in shares.items() if j < self.count))
        return found


def weights_of(stage: Stage) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in stage.named_parameters()}


def agrees(found: ByDistance, loops: dict[int, list[float]]) -> None:
    """The same distances, as many pairs, the same means."""
    assert found.distances.tolist() == sorted(loops)
    for distance, share, pairs in zip(found.distances.tolist(), found.share, found.pairs, strict=True):
        assert pairs == len(loops[distance])
        assert share == pytest.approx(np.mean(loops[distance]), abs=ROUNDING)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, {}),
        ({}, {"kv_heads": 2, "qk_norm": True}),
        ({"memory_length": 4}, {}),
        ({"memory_length": 13, "shared_biases": True}, {}),
        (ONE_V, {}),
        ({"order_mask": False, "memory_length": 13}, {}),
        ({"order_mask": False, **ONE_V}, {}),
        ({"interpolate": False}, {}),
        ({"look_ahead": False}, {}),
    ],
    ids=str,
)
def test_lamemo(options: dict[str, Any], shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, rows and alpha, recorded where the memory is full."""
    config = model(shape=shape, **options)
    stage, length = built(config), options.get("memory_length", CHUNK)
    loops = {number: Loops() for number in range(3)}
    monkeypatch.setattr(WatchedLayer, "loops", loops, raising=False)
    monkeypatch.setattr(WatchedLayer, "filling", -(-length // CHUNK), raising=False)
    monkeypatch.setattr(lamemo, "Layer", WatchedLayer)
    for text in texts():
        lamemo.run(None, config, weights_of(stage), torch.tensor(text.ids[: (len(text.ids) - 1) // CHUNK * CHUNK]))
    found = record_attention(stage, texts())
    assert (found.documents, found.tokens) == (2, (5 + 7 - 2 * WatchedLayer.filling) * CHUNK)
    for number, layer in enumerate(found.layers):
        own = loops[number]
        assert (layer.name, layer.title) == (f"layers.{number}.mixer", f"layer {number}")
        agrees(layer.tokens, own.tokens)
        # each token's shares add up to one
        heads_and_tokens = found.tokens * 4
        assert layer.tokens.share @ layer.tokens.pairs == pytest.approx(heads_and_tokens, rel=ROUNDING)
        assert len(own.memory) == heads_and_tokens
        assert layer.memory_share == pytest.approx(np.mean(own.memory), abs=ROUNDING)
        if number == 2 or not config.mixer.look_ahead:
            assert layer.ahead is layer.alpha is None
            continue
        assert layer.ahead is not None
        agrees(layer.ahead, own.ahead)
        rows = length * found.tokens // CHUNK * 4
        assert layer.ahead.share @ layer.ahead.pairs == pytest.approx(rows, rel=ROUNDING)
        if not config.mixer.interpolate:
            assert layer.alpha is None
            continue
        assert layer.alpha is not None
        wanted = [np.mean(own.alpha[row]) for row in range(length)]
        assert layer.alpha == pytest.approx(np.array(wanted), abs=ROUNDING)
        assert 0.05 < min(wanted) < max(wanted) < 0.999, "rows differ"
    together: dict[int, list[float]] = defaultdict(list)
    for own in loops.values():
        for distance, shares in own.tokens.items():
            together[distance] += shares
    agrees(found.all_layers, together)


@pytest.mark.parametrize("same_length", [False, True])
def test_transformer_xl_with_layers_of_different_lengths(same_length: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded begins where the longest memory is full."""
    lengths = (CHUNK, 2 * CHUNK + 1, 3)
    mixers = [{"kind": "transformer_xl", "memory_length": n, "same_length": same_length} for n in lengths]
    memory = [{"layers": [number], "mixer": mixer} for number, mixer in enumerate(mixers)]
    config = model("transformer_xl", shape={"memory": memory})
    stage, filling = built(config), 3
    weights = weights_of(stage)
    noted: list[tuple[list[int], list[float]]] = []
    shares = transformer_xl.shares

    def noting(query: Tensor, head: int, keys: list[Tensor], distances: list[int], weights: Any) -> list[float]:
        noted.append((distances, shares(query, head, keys, distances, weights)))
        return noted[-1][1]

    monkeypatch.setattr(transformer_xl, "shares", noting)
    loops = [Loops() for _ in lengths]
    for text in texts():
        read = text.ids[: (len(text.ids) - 1) // CHUNK * CHUNK]
        hidden = weights["embedding.weight"][list(read)]
        for number, own in enumerate(loops):
            prefix = f"layers.{number}."
            mixer = {
                name.removeprefix(f"{prefix}mixer."): w for name, w in weights.items() if name.startswith(f"{prefix}m")
            }
            normed = rms_norm(hidden, weights[f"{prefix}mixer_norm.weight"], config.norm_eps)
            noted.clear()
            hidden = hidden + transformer_xl.run(config.mixer_at(number), config, mixer, normed).output
            hidden = hidden + swiglu(config, weights, prefix, hidden)
            for call, (distances, found_shares) in enumerate(noted):
                token = call // config.heads
                if token < filling * CHUNK:
                    continue
                for distance, share in zip(distances, found_shares, strict=True):
                    own.tokens[distance].append(share)
                before = [s for d, s in zip(distances, found_shares, strict=True) if d > token % CHUNK]
                own.memory.append(sum(before))
    found = record_attention(stage, texts())
    assert found.tokens == (5 + 7 - 2 * filling) * CHUNK
    for layer, own, length in zip(found.layers, loops, lengths, strict=True):
        agrees(layer.tokens, own.tokens)
        assert layer.tokens.distances[-1] == (length - 1 if same_length else length + CHUNK - 1)
        assert layer.memory_share == pytest.approx(np.mean(own.memory), abs=ROUNDING)
        assert layer.tokens.share @ layer.tokens.pairs == pytest.approx(found.tokens * 4, rel=ROUNDING)
        assert layer.ahead is layer.alpha is None


@pytest.mark.parametrize("kind", ["lamemo", "transformer_xl"])
def test_looking_on_changes_nothing(kind: str) -> None:
    stage = built(model(kind))
    tokens = torch.tensor(texts()[0].ids[: 4 * CHUNK])[:, None]

    class Nobody:
        def attended(self, shares: Tensor, unseen: Tensor) -> None:
            # also where the memory is not full yet, and tokens see less
            assert (shares.masked_select(unseen) == 0).all()
            assert (shares.sum(-1) - 1).abs().max() < ROUNDING

        def looked_ahead(self, shares: Tensor, unseen: Tensor) -> None:
            pass

        def mixed(self, share: Tensor) -> None:
            pass

    plain = Evaluator(stage).logits(tokens)
    assert plain is not None
    for layer in attention_layers(stage).values():
        with layer.observed_by(Nobody()):
            assert torch.equal(Evaluator(stage).logits(tokens), plain)
        assert layer.observer is None


def test_means_of_pairs_that_are_seen() -> None:
    """Two calls by hand: one query, then another one that sees one key only."""
    sums, distances = DistanceSums(), torch.tensor([[1, 0]])
    assert sums.mean() is None
    sums.add(torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[False, False]]), distances)
    sums.add(torch.tensor([[[[0.0, 1.0]]]]), torch.tensor([[True, False]]), distances)
    found = sums.mean()
    assert found is not None
    assert (found.first, found.share.tolist(), found.pairs.tolist()) == (0, [0.875, 0.25], [2, 1])
    both = pooled([found, ByDistance(3, np.array([0.5]), np.array([4]))])
    assert (both.first, both.pairs.tolist()) == (0, [2, 1, 0, 4])
    assert both.share == pytest.approx([0.875, 0.25, math.nan, 0.5], nan_ok=True)


def test_files_and_table(tmp_path: Path) -> None:
    for kind, files in (
        ("lamemo", {"attention.json", "attention.png", "alpha.png"}),
        ("transformer_xl", {"attention.json", "attention.png"}),
    ):
        found = record_attention(built(model(kind)), texts())
        write_attention(tmp_path / kind, found, "a model")
        assert {path.name for path in (tmp_path / kind).iterdir()} == files
        assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (tmp_path / kind).glob("*.png"))
        assert json.loads((tmp_path / kind / "attention.json").read_text()) == numbers(found)
        assert len(numbers(found)["layers"]) == 3
        cells = list(attention_table(found, "a model").columns[2].cells)
        alphas = [layer.alpha for layer in found.layers]
        assert cells == ["-" if alpha is None else f"{alpha.mean():.3f}" for alpha in alphas]
        with pytest.raises(DataError, match="exists already; choose another folder"):
            write_attention(tmp_path / kind, found, "a model")


def test_documents_that_fill_the_memory() -> None:
    """Chunks here have 8 tokens; a document of n tokens has n predicted ones and another one that is predicted last."""
    stage = built(model(memory_length=13, shape={"chunk_size": 8}))
    with pytest.raises(DataError, match="no document has 25 tokens, the fewest with which a memory is read"):
        held_out_texts(documents(23), stage, 2, 8)
    found = held_out_texts(documents(10, 30, 90, 24, 80, 33), stage, 2, 2)
    assert [(text.name, len(text.ids)) for text in found] == [("document 2", 33), ("document 4", 33)]
    found = held_out_texts(documents(10, 30, 90, 24), stage, 2, 8)
    assert [len(text.ids) for text in found] == [33, 31, 25]


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (
            "compressive_transformer", {"chunk_size": 8},
            "model: compressive_transformer has no attention by distance to look at; the mixers that have it: lamemo, "
            "transformer_xl",
        ),
        (
            "transformer_xl", {"architecture": "recurrent_memory"},
            "model.architecture: recurrent_memory puts rows of its own among the tokens, whose distances are none of "
            "the text; only the attention of a decoder can be looked at",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_looked_at(kind: str, shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        attention_layers(built(model(kind, shape=shape)))
    assert str(refused.value) == message
