"""Dropout by counters: what is dropped, against masks written number by number; and that only training drops."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.data.batch import Batch
from megamem.errors import ConfigError
from megamem.evaluation.evaluator import Evaluator
from megamem.hf.configuration import MegamemConfig
from megamem.hf.modeling import MegamemForCausalLM
from megamem.memory.base import Chunk, detach
from megamem.model.stage import Stage, build_stage
from megamem.ops.attention.nearest import nearest, nearest_attention
from megamem.ops.attention.relative import relative_attention
from megamem.ops.attention.softmax import Past, attention, past_attention, unmasked_attention
from megamem.ops.dropout import Dropout, DropoutKeys
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.reader import ChunkReader
from megamem.pipeline.train_chunk import chunk_places, dropout_keys
from megamem.planning.activations import Activations
from megamem.planning.measured_part import Share
from tests.unit.evaluation_helpers import document

CPU, BITS = torch.device("cpu"), 2**64 - 1
SHARE, CHUNK, ROWS = 0.25, 8, 4


def splitmix(number: int) -> int:
    """The finalizer of splitmix64, as its paper has it."""
    z = number & BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & BITS
    return z ^ (z >> 31)


def is_dropped(share: float, column: int, key: int, *numbers: int) -> bool:
    """Whether a column is dropped: 16 bits of a hash of all numbers, from -32,768 on."""
    for number in numbers:
        key = splitmix(key + 0x9E3779B97F4A7C15 * number)
    bits = splitmix(key + 0x9E3779B97F4A7C15 * (column // 4)) >> 16 * (column % 4) & 0xFFFF
    signed = bits - 0x10000 if bits >= 0x8000 else bits
    return signed < round(share * 2**16) - 2**15


def shares_mask(drops: Dropout, shape: tuple[int, int, int, int], first_column: int) -> Tensor:
    """Factors of shares [B, H, T, K]."""
    kept = torch.tensor(
        [
            0.0 if is_dropped(drops.share, first_column + k, drops.keys.rows[b], drops.first + h, drops.keys.offset + t)
            else 1 / (1 - drops.share)
            for b, h, t, k in product(*map(range, shape))
        ],
        dtype=torch.float64,
    )  # fmt: skip
    return kept.view(shape)


def drops(rows: int = 2, offset: int = 0, first: int = 0, place: str = "here", step: int = 0) -> Dropout:
    return Dropout(SHARE, DropoutKeys.of(5, step, range(rows)).at(offset).inside(place), first=first)


def normal(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return x.requires_grad_()


def zeros_of(dropout: Dropout, tokens: int = 400, channels: int = 250) -> Tensor:
    """What is dropped of ones [tokens, rows, channels], as numbers."""
    x = torch.ones(tokens, len(dropout.keys.rows), channels)
    return (dropout.values(x) == 0).double()


def test_values_are_dropped_where_the_counters_say() -> None:
    dropout = drops(offset=3, first=6)
    found = dropout.values(torch.ones(5, 2, 7, dtype=torch.float64))
    for t, b, c in product(range(5), range(2), range(7)):
        expected = 0.0 if is_dropped(SHARE, 6 + c, dropout.keys.rows[b], 3 + t) else 1 / (1 - SHARE)
        assert found[t, b, c] == expected


def test_side_rows_count_by_themselves() -> None:
    dropout = Dropout(SHARE, drops(offset=4).keys, rows_behind=2)
    found = dropout.values(torch.ones(5, 2, 9, dtype=torch.float64))
    places = [4, 5, 6, -1 - 7 * 2, -2 - 7 * 2]
    for (t, place), b, c in product(enumerate(places), range(2), range(9)):
        assert (found[t, b, c] == 0) == is_dropped(SHARE, c, dropout.keys.rows[b], place)


def test_a_table_is_dropped_alike_for_all_rows() -> None:
    dropout = drops()
    found = dropout.table(torch.ones(4, 6))
    for d, c in product(range(4), range(6)):
        assert (found[3 - d, c] == 0) == is_dropped(SHARE, c, dropout.keys.step, d)


def test_the_share_that_is_dropped() -> None:
    """Means within four standard errors, over rows, tokens and channels each."""
    zeros = zeros_of(drops(rows=6))
    for axes in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        means = zeros.mean(axes)
        error = math.sqrt(SHARE * (1 - SHARE) / (zeros.numel() / means.numel()))
        # four standard errors of one mean; of many means the worst lies further out
        assert (means - SHARE).abs().max() < (4 if means.numel() == 1 else 5) * error
    assert drops().scale == 1 / (1 - SHARE)
    assert Dropout(0.1, drops().keys).scale == pytest.approx(1 / 0.9, rel=1e-5)


@pytest.mark.parametrize("other", ["token", "channel", "four channels", "row", "step", "place", "seed", "table"])
def test_nothing_goes_with_its_neighbors(other: str) -> None:
    """Correlations below four standard errors."""
    zeros = zeros_of(drops())
    pairs = {
        "token": lambda: (zeros[1:], zeros[:-1]),
        "channel": lambda: (zeros[..., 1:], zeros[..., :-1]),
        "four channels": lambda: (zeros[..., 4:], zeros[..., :-4]),
        "row": lambda: (zeros[:, 0], zeros[:, 1]),
        "step": lambda: (zeros, zeros_of(drops(step=1))),
        "place": lambda: (zeros, zeros_of(drops(place="there"))),
        "seed": lambda: (zeros, zeros_of(Dropout(SHARE, DropoutKeys.of(6, 0, range(2)).inside("here")))),
        "table": lambda: (zeros[:, 0], (drops().table(torch.ones(400, 250)) == 0).double()),
    }
    a, b = pairs[other]()
    correlation = ((a - SHARE) * (b - SHARE)).mean() / (SHARE * (1 - SHARE))
    assert abs(correlation) < 4 / math.sqrt(a.numel())


def test_parts_of_ranks_are_parts_of_the_whole() -> None:
    """Tokens, channels and heads that are split over ranks, and calls that are split."""
    x, shares = normal(8, 2, 10).detach(), normal(2, 4, 8, 13).detach()
    whole = drops(offset=2).values(x)
    assert torch.equal(whole, torch.cat([drops(offset=2).values(part, i, 2) for i, part in enumerate(x.split(4))]))
    channels = [drops(offset=2, first=5 * i).values(part) for i, part in enumerate(x.split(5, dim=2))]
    assert torch.equal(whole, torch.cat(channels, dim=2))
    assert torch.equal(whole[3:], drops(offset=2).after(3).values(x[3:]))
    for causal in (False, True):
        whole = drops(offset=2).shares(shares, causal)
        heads = [drops(offset=2, first=2 * i).shares(part, causal) for i, part in enumerate(shares.split(2, dim=1))]
        assert torch.equal(whole, torch.cat(heads, dim=1))
        later = drops(offset=5).shares(shares[:, :, 3:], causal)
        assert torch.equal(whole[:, :, 3:], later)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_pass_where_values_do(dtype: torch.dtype) -> None:
    x = torch.ones(6, 2, 5, dtype=dtype, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = drops().values(x)
    assert not kept, "the mask is made again, not kept"
    assert out.dtype == dtype
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    inputs = normal(3, 2, 5)
    assert torch.autograd.gradcheck(lambda x: drops().values(x), inputs)


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The output, and gradients of a fixed sum of it."""
    weights = torch.arange(out.numel(), dtype=torch.float64).view(out.shape).sin()
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def by_hand(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, factors: Tensor) -> Tensor:
    """Attention of query [T, B, H, D] to key, value [K, B, G, D] where `seen` [T, K]; factors: [B, H, T, K]."""
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, 2) for x in (key, value))
    scores = torch.einsum("tbhd,kbhd->bhtk", query, key) / math.sqrt(query.shape[3])
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1) * factors
    return torch.einsum("bhtk,kbhd->tbhd", shares, value)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["causal", "unmasked", "past", "nearest"])
def test_attention_against_masks_written_out(kind: str, backend: str) -> None:
    """Outputs and gradients; float64, of which sums in another order leave 1e-14."""
    tokens, before, dropout = 5, 7, drops(offset=11, first=2)
    query, key, value = (
        normal(tokens, 2, 4, 6),
        normal(before + tokens, 2, 2, 6),
        normal(before + tokens, 2, 2, 6, seed=1),
    )
    columns = before + tokens
    seen = torch.ones(tokens, columns, dtype=torch.bool)
    past = [Past(key[:3], value[:3]), Past(key[3:before], value[3:before])]
    if kind == "causal":
        seen = seen.tril(before)
        found = attention(query, key[before:], value[before:], past, backend, dropout)
    elif kind == "unmasked":
        parts = [*past, Past(key[before:], value[before:])]
        found = unmasked_attention(query, parts, backend, dropout)
    elif kind == "past":
        found = past_attention(query, Past(key, value), backend, dropout)
    else:
        found = nearest_attention(query, Past(key, value), columns, backend, dropout)
    first = 11 - before if kind == "causal" else -columns
    expected = by_hand(query, key, value, seen, shares_mask(dropout, (2, 4, tokens, columns), first))
    for ours, theirs in zip(
        gradients(found, [query, key, value]), gradients(expected, [query, key, value]), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-12


def test_queries_taken_in_parts_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    query, past, dropout = normal(9, 1, 2, 4), Past(normal(20, 1, 2, 4), normal(20, 1, 2, 4, seed=1)), drops(rows=1)
    whole = past_attention(query, nearest(query, past, 6), "sdpa", dropout)
    monkeypatch.setattr("megamem.ops.attention.nearest.SCORES", 4 * 2 * 20)
    assert (nearest_attention(query, past, 6, "sdpa", dropout) - whole).abs().max() < 1e-12


def test_relative_attention_against_masks_written_out() -> None:
    tokens, columns, dropout = 4, 9, drops(offset=6)
    content, distance = normal(tokens, 2, 2, 6), normal(tokens, 2, 2, 6, seed=1)
    key, value, table = normal(columns, 2, 2, 6), normal(columns, 2, 2, 6, seed=1), normal(columns + 1, 2, 6)
    seen = torch.ones(tokens, columns, dtype=torch.bool).tril(columns - tokens)
    leaves = [content, distance, key, value, table]
    found, received, _ = relative_attention(*leaves, ~seen, count=True, dropout=dropout)
    scores = torch.full((2, 2, tokens, columns), -torch.inf, dtype=torch.float64)
    for i, j in product(range(tokens), range(columns)):
        back = columns - tokens + i - j
        if back >= 0:
            products = (content[i] * key[j]).sum(-1) + (distance[i] * table[columns - back]).sum(-1)
            scores[:, :, i, j] = products / math.sqrt(6)
    shares = scores.softmax(-1)
    factors = shares_mask(dropout, (2, 2, tokens, columns), 6 + tokens - columns)
    expected = torch.einsum("bhtk,kbhd->tbhd", shares * factors, value)
    for ours, theirs in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        assert (ours - theirs).abs().max() < 1e-12
    assert received is not None
    assert torch.allclose(received, shares.sum((1, 2)).T), "what keys got is counted before any of it is dropped"


def model(**more: Any) -> ModelConfig:
    tree: dict[str, Any] = {
        "layers": 2, "hidden_size": 16, "heads": 4, "vocab_size": 32, "chunk_size": CHUNK, "init_std": 0.3,
        "mixer": "transformer_xl", "mlp": "relu", "norm_position": "post", "dropout": 0.3, "attention_dropout": 0.4,
    }  # fmt: skip
    return parse_config(ModelConfig, {**tree, **more}, "test")


def built(config: ModelConfig) -> Stage:
    stage = build_stage(config, PlainLinears())
    initialize_parameters(stage, 1)
    return stage.double()


def batch(rows: range) -> Batch:
    """Rows of a global batch of three chunks."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (3 * CHUNK + 1, ROWS), generator=generator)[:, rows.start : rows.stop]
    starts = np.arange(0, 3 * CHUNK, CHUNK)[:, None].repeat(len(rows), 1)
    return Batch(tokens[:-1], tokens[1:], starts, tuple(rows))


def step_gradients(config: ModelConfig, micro: int, recompute: bool = False, step: int = 0) -> dict[str, Tensor]:
    """The gradient of one optimizer step in micro-batches of so many rows."""
    stage = built(config)
    stage.recompute = recompute
    for first in range(0, ROWS, micro):
        rows = range(first, first + micro)
        own = batch(rows)
        states = stage.initial_states(micro, CPU, torch.float64)
        for c, place in enumerate(chunk_places(own, dropout_keys(config, 3, step, rows))):
            part = slice(c * CHUNK, (c + 1) * CHUNK)
            hidden, states, _ = stage(own.tokens[part], states, place)
            stage.token_losses(hidden, own.labels[part]).sum().backward()
            states = detach(states)
    return {name: parameter.grad for name, parameter in stage.named_parameters() if parameter.grad is not None}


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).norm() / a[name].norm()) for name in a)


def test_micro_batches_and_recomputation_change_nothing() -> None:
    config = model()
    whole = step_gradients(config, 4)
    for micro in (1, 2):
        assert difference(whole, step_gradients(config, micro)) < 1e-12, "float64 sums in another order"
    again = step_gradients(config, 4, recompute=True)
    assert difference(whole, again) < 1e-13, "the same operations, whose products round as their operands lie in memory"
    assert difference(whole, step_gradients(config, 4, step=1)) > 0.01
    assert difference(whole, step_gradients(model(dropout=0.0, attention_dropout=0.0), 4)) > 0.01


@pytest.mark.parametrize("off", ["dropout", "attention_dropout"])
def test_each_share_has_its_own_effect(off: str) -> None:
    assert difference(step_gradients(model(), 4), step_gradients(model(**{off: 0.0}), 4)) > 0.01


def test_every_place_drops() -> None:
    """With a share close to one, next to nothing is left of any branch."""
    stage = built(model(mlp="gelu", norm_position="pre", dropout=0.99999, attention_dropout=0.0))
    own, keys = batch(range(ROWS)), dropout_keys(stage.config, 0, 0, range(ROWS))
    place = chunk_places(own, keys)[0]
    states = stage.initial_states(ROWS, CPU, torch.float64)
    hidden, _, _ = stage(own.tokens[:CHUNK], states, place)
    assert (hidden == 0).double().mean() > 0.9


def test_reading_never_drops() -> None:
    """Evaluation, generation and exports read through one loop, which takes no keys, whatever the model says."""
    dropping = built(model())
    plain = built(model(dropout=0.0, attention_dropout=0.0))
    documents = [document(3 * CHUNK + 2, seed) for seed in range(3)]
    for stage in (dropping, plain):
        stage.train()
    first, second = (Evaluator(stage).losses(documents) for stage in (dropping, plain))
    assert first == second
    reader, keys = ChunkReader(dropping), DropoutKeys.of(0, 0, range(ROWS))
    tokens = batch(range(ROWS)).tokens
    with torch.no_grad():
        reads = [reader.read(tokens, place, reader.begin(place)) for place in (
            Chunk((0,) * ROWS), Chunk((0,) * ROWS, dropout=keys),
        )]  # fmt: skip
    assert torch.equal(*reads)
    exported = MegamemForCausalLM(MegamemConfig(megamem=dropping.config.model_dump(mode="json"))).double()
    exported.model.load_state_dict(dropping.state_dict())
    with torch.no_grad():
        logits = exported.train()(tokens.T).logits
        assert torch.equal(logits, exported.eval()(tokens.T).logits)
        assert torch.allclose(logits, plain.logits(reads[0]).transpose(0, 1), atol=1e-12)


def test_a_model_that_drops_nothing_has_no_keys() -> None:
    assert dropout_keys(model(dropout=0.0, attention_dropout=0.0), 0, 0, range(2)) is None
    assert all(place.dropout is None for place in chunk_places(batch(range(ROWS))))
    assert Chunk((0,), dropout=DropoutKeys.of(0, 0, [1])) == Chunk((0,)), "what is cached by place stays cached"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, "dropout: should be less than 1 (got 1.0)"),
        ({"dropout": -0.1}, "dropout: should be greater than or equal to 0 (got -0.1)"),
        ({"attention_dropout": 1.5}, "attention_dropout: should be less than 1 (got 1.5)"),
        (
            {"mixer": "retnet", "memory": [{"layers": [1], "mixer": "delta_net"}]},
            "attention_dropout 0.4: no layer has softmax attention with shares to drop (mixers: retnet, delta_net); "
            "use 0, or dropout for the residual stream",
        ),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(**options)
    assert str(caught.value) == f"test: {message}"


def test_no_mask_is_planned_for_and_scores_are() -> None:
    """What is added to the residual stream takes what it took; attention keeps its scores."""
    share = Share(2, 1)
    kept = {
        name: Activations(model(**options, mixer="local_attention", mlp="gelu"), "fp32", 2).layer(0, share)[1]
        for name, options in {
            "plain": {"dropout": 0.0, "attention_dropout": 0.0},
            "values": {"attention_dropout": 0.0},
            "shares": {"dropout": 0.0},
        }.items()
    }
    assert kept["values"].kept == kept["plain"].kept
    assert kept["shares"].kept > kept["plain"].kept
