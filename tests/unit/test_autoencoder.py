"""Autoencoders: a loop of the equations, one vector for a chunk, stages of a pipeline, costs, refusals, learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megamem.config.load import merge, parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.flops import flops_per_token
from megamem.costs.parameters import parameter_counts
from megamem.data.batch import EvaluationDocument
from megamem.errors import ConfigError, ContractError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.objective import as_predicted
from megamem.evaluation.run import final_evaluation
from megamem.memory.base import Chunk
from megamem.model.objective import build_objective
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.contract.oracles.architectures.memory_model import normed, one_layer

CHUNK, ROWS, VOCABULARY = 8, 3, 32
ENCODER = {"layers": 2, "hidden_size": 12, "heads": 3}
SHAPE: dict[str, Any] = {
    "layers": 4, "hidden_size": 16, "heads": 4, "ffn_size": 24, "vocab_size": VOCABULARY, "chunk_size": CHUNK,
    "init_std": 0.3, "mixer": "local_attention",
}  # fmt: skip
FORMS = [
    {},
    {"expansion": "repeat", "embedded_token": "last_but_one"},
    # windows of 3 channels, which begin again at place 6; another mixer in the encoder
    {"encoder": {"layers": 1, "hidden_size": 6, "heads": 1, "mixer": "masked_mixer"}},
]


def model(architecture: dict[str, Any] | None = None, **shape: Any) -> ModelConfig:
    own = {"kind": "autoencoder", "encoder": ENCODER, **(architecture or {})}
    return ModelConfig.model_validate({**SHAPE, **shape, "architecture": own})


def built(config: ModelConfig, layers: range | None = None) -> Stage:
    stage = build_stage(config, PlainLinears(), layers)
    initialize_parameters(stage, 1)
    return stage.double()


def ids(chunks: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (chunks * CHUNK, ROWS), generator=torch.Generator().manual_seed(3))


def read(stage: Stage, x: Tensor, place: int = 0) -> Tensor:
    output, states, losses = stage(x, {}, Chunk((place,) * x.shape[1]))
    assert states == {}
    assert losses == {}
    return output


def oracle(config: ModelConfig, weights: dict[str, Tensor], chunk: list[int]) -> Tensor:
    """Hidden states after the last norm [chunk_size, hidden_size], by the equations."""
    settings: Any = config.architecture
    last = settings.encoder.layers
    hidden = torch.stack([weights["encoder_embedding.weight"][i] for i in chunk])
    for layer in range(last):
        hidden = one_layer(config.layer_model(layer), config.mixer_at(layer), weights, layer, hidden)
    hidden = normed(config.layer_model(0), weights, f"layers.{last - 1}.writer.norm", hidden)
    embedding = hidden[-1 if settings.embedded_token == "last" else -2]
    width, matrix, bias = (
        len(embedding),
        *(weights[f"layers.{last}.expansion.projection.{n}"] for n in ("weight", "bias")),
    )
    places = []
    for i in range(len(chunk)):
        window = [embedding[(i + j) % width] for j in range(width // 2)]
        places.append(matrix @ (torch.stack(window) if settings.expansion == "unroll" else embedding) + bias)
    hidden = torch.stack(places)
    for layer in range(last, config.layers):
        hidden = one_layer(config, config.mixer_at(layer), weights, layer, hidden)
    return normed(config, weights, "norm", hidden)


@pytest.mark.parametrize("form", FORMS, ids=["unroll", "repeat", "mixer"])
def test_equals_the_naive_loop(form: dict[str, Any]) -> None:
    stage = built(model(form))
    weights = {name: weight.detach() for name, weight in stage.named_parameters()}
    x = ids()
    output = read(stage, x)
    for row in range(ROWS):
        expected = oracle(stage.config, weights, x[:, row].tolist())
        # sums of other orders, through four layers
        assert (output[:, row] - expected).abs().max() < 1e-12


def test_a_chunk_is_read_by_itself_and_only_its_embedding_reaches_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, x = built(model()), ids(2)
    first, second = x.split(CHUNK)
    assert torch.equal(read(stage, second, CHUNK), read(stage, second))
    seen: list[Tensor] = []
    expansion = stage.layers[str(ENCODER["layers"])].get_submodule("expansion")
    forward = type(expansion).forward
    monkeypatch.setattr(type(expansion), "forward", lambda self, e: seen.append(e) or forward(self, e))
    one, two = read(stage, first), read(stage, second)
    assert [tuple(embedding.shape) for embedding in seen] == [(1, ROWS, ENCODER["hidden_size"])] * 2
    monkeypatch.setattr(type(expansion), "forward", lambda self, _: forward(self, seen[0]))
    assert torch.equal(read(stage, second), one)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("borders", [(0, 1, 4), (0, 2, 4), (0, 3, 4), (0, 1, 2, 3, 4)])
def test_stages_in_a_row_are_the_whole_model(borders: tuple[int, ...]) -> None:
    """With the encoder's last layer at the end of a stage, before it and behind it; bit for bit."""
    config, x = model(), ids()
    whole = built(config)
    hidden: Tensor = x
    for begin, end in zip(borders[:-1], borders[1:], strict=True):
        stage = built(config, range(begin, end))
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
        if begin:
            assert tuple(hidden.shape) == stage.border_shape(CHUNK, ROWS)
        hidden = read(stage, hidden)
        if end < config.layers:
            assert tuple(hidden.shape) == stage.shape_above(CHUNK, ROWS)
    assert torch.equal(hidden, read(whole, x))


def test_less_than_a_chunk_is_refused() -> None:
    stage, x = built(model()), ids()
    for part, place in ((x[:5], 0), (x, 3)):
        with pytest.raises(ContractError, match="an autoencoder reads whole chunks of 8 tokens"):
            read(stage, part, place)


@pytest.mark.parametrize("form", FORMS, ids=["unroll", "repeat", "mixer"])
def test_parameters_and_flops_are_those_of_the_formulas(form: dict[str, Any]) -> None:
    # linear layers without biases but the expansion's, and matrix products alone: torch counts the same
    config = model(form, attention_kernel="eager")
    stage = built(config)
    assert parameter_counts(config)["total"] == sum(parameter.numel() for parameter in stage.parameters())
    assert not hasattr(stage, "embedding")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stage.logits(read(stage, ids()))
    from megamem.costs.flops import flops_by_part

    counted = sum(part.forward for part in flops_by_part(config, CHUNK, causal=False).values())
    assert counter.get_total_flops() == pytest.approx(counted * CHUNK * ROWS, rel=1e-12)
    assert flops_per_token(config, CHUNK)["expansion"] > 0


def tree(**sections: Any) -> dict[str, Any]:
    return merge(
        {
            "name": "case",
            "model": {**SHAPE, "architecture": {"kind": "autoencoder", "encoder": ENCODER}},
            "data": {"sources": "none", "sequence_length": 2 * CHUNK, "documents": "join"},
            "training": {"steps": 10, "batch_tokens": 4 * CHUNK, "objective": "autoencode"},
        },
        sections,
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"objective": "next_token"}},
            "next_token does not go with model.architecture autoencoder; use auto",
        ),
        (
            {"model": {"architecture": "decoder"}},
            "autoencode does not go with model.architecture decoder; use next_token",
        ),
        ({"data": {"documents": "pad"}}, "data.documents pad does not go with training.objective autoencode"),
        ({"data": {"feeding": "streams"}}, "data.feeding streams does not go with training.objective autoencode"),
        ({"model": {"tie_embeddings": True}}, "tie_embeddings true does not go with architecture autoencoder"),
        (
            {"model": {"architecture": {"encoder": {"hidden_size": 9, "head_dim": 4}}}},
            "architecture.expansion unroll takes half of the",
        ),
        (
            {"model": {"chunk_size": 1, "architecture": {"embedded_token": "last_but_one"}}},
            "architecture.embedded_token last_but_one: a chunk (chunk_size 1) has no such token; use at least 2",
        ),
        ({"parallel": {"tp": 2}}, "architecture.encoder.heads 3 is not divisible by parallel.tp 2"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(RunConfig, tree(**sections), "file")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_token_is_predicted_at_its_own_place() -> None:
    config = parse_config(RunConfig, tree(), "file")
    objective = build_objective(config.training.objective, config.model)
    x = ids(2)
    tokens, labels = objective.inputs_and_labels(x, x.roll(-1, 0))
    assert torch.equal(tokens, x)
    assert torch.equal(labels, x)


def test_held_out_text_is_cut_into_whole_sequences_and_nothing_remembers() -> None:
    config = parse_config(RunConfig, tree(), "file")
    text = torch.arange(5 * CHUNK + 1) % VOCABULARY
    document = EvaluationDocument("book", text[:-1], text[1:], 5 * CHUNK, None)
    found = list(as_predicted([document], config, None))
    # 41 tokens are two sequences of 16
    assert [part.tokens.tolist() for part in found] == [text[:16].tolist(), text[16:32].tolist()]
    assert all(torch.equal(part.tokens, part.labels) for part in found)
    stage = built(config.model)
    result = final_evaluation(Evaluator(stage, None, 2), lambda: [document], None, config)
    hidden = torch.cat([read(stage, part[:, None]) for part in text[:32].split(CHUNK)])
    expected = F.cross_entropy(stage.logits(hidden)[:, 0], text[:32])
    assert result.losses.loss == pytest.approx(expected.item(), rel=1e-12)
    assert result.memory.memory_off_loss == result.losses.loss
    assert result.sliding is None


def test_learns_to_tell_all_tokens_of_a_chunk() -> None:
    """Four random tokens of 16 kinds from 64 numbers: chance is 1 / 16, and an encoder can keep all of them."""
    config = model(
        {"encoder": {"layers": 2, "hidden_size": 64, "heads": 4, "mixer": "masked_mixer"}}, layers=3, hidden_size=64,
        heads=4, ffn_size=128, chunk_size=4, vocab_size=16, init_std=0.05,
    )  # fmt: skip
    stage = build_stage(config, PlainLinears())
    initialize_parameters(stage, 1)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        x = torch.randint(16, (4, 64), generator=generator)
        hidden, _, _ = stage(x, {}, Chunk((0,) * 64))
        loss = stage.token_losses(hidden, x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.randint(16, (4, 256), generator=generator)
    with torch.no_grad():
        right = stage.token_scores(stage(x, {}, Chunk((0,) * 256))[0], x)[1].float().mean().item()
    assert right > 0.9, right
