"""Adaptive input and softmax in one process: against the definition word by word, and against torch's own module."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.flops import embedding_flops, flops_per_token, head_flops
from megamem.costs.parameters import parameter_counts
from megamem.errors import ConfigError
from megamem.evaluation.evaluator import Evaluator
from megamem.memory.base import LABEL_IGNORED, Chunk
from megamem.model.adaptive_vocabulary import AdaptiveEmbedding
from megamem.model.stage import build_stage, typical_labels
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.planning.rank_linears import tp_sizes
from megamem.planning.ranks import part_parameters
from tests.distributed.training_cases import run_config

V, D, CHUNK, ROWS = 61, 16, 8, 3
CUTOFFS = [10, 21, 40]
BASE = {
    "layers": 1, "hidden_size": D, "heads": 2, "chunk_size": CHUNK, "vocab_size": V, "ffn_size": 12, "init_std": 0.5,
}  # fmt: skip
FORMS = {
    "wide": {"divisor": 1},
    "narrow": {"divisor": 2},
    "softmax": {"divisor": 2, "input": False},
    "input": {"divisor": 2, "softmax": False},
    "tied-wide": {"divisor": 1, "tied": True},
    "tied-narrow": {"divisor": 2, "tied": True},
    "tied-projections": {"divisor": 2, "tied": True, "tie_projections": True},
}


def model_of(divisor=2, tied=False, **adaptive):
    section = {"cutoffs": CUTOFFS, "divisor": divisor, **adaptive}
    return ModelConfig.model_validate({**BASE, "tie_embeddings": tied, "adaptive": section})


def stage_of(model, seed=0):
    stage = build_stage(model, PlainLinears()).double()
    initialize_parameters(stage, seed)
    return stage


@pytest.fixture(params=FORMS)
def stage(request):
    return stage_of(model_of(**FORMS[request.param]))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(CHUNK, ROWS, D, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, torch.randint(V, (CHUNK, ROWS), generator=generator)


def bounds():
    return list(itertools.pairwise((0, *CUTOFFS, V)))


def columns(model):
    """First and last column of each cluster in the matrix of projections; None where it has none."""
    found, at = [], 0
    for i in range(len(CUTOFFS) + 1):
        width = D // model.adaptive.divisor**i
        found.append((at, at + width) if width < D else None)
        at += width if width < D else 0
    return found


def log_probabilities(stage, x):
    """The logarithms of all words' probabilities after one hidden vector x [D], by the definition: [V]."""
    weights, model = dict(stage.named_parameters()), stage.config
    if not model.adaptive.softmax:
        return (weights["head.weight"][:V] @ x).log_softmax(0)
    tied = model.tie_embeddings
    vectors = [weights[f"{'embedding' if tied else 'head'}.clusters.{i}.weight"] for i in range(len(CUTOFFS) + 1)]
    owner = "embedding" if model.adaptive.tie_projections else "head"
    scores = [vectors[0][word] @ x for word in range(CUTOFFS[0])]
    scores += [weights["head.cluster_vectors.weight"][k] @ x for k in range(len(CUTOFFS))]
    head = torch.stack(scores).log_softmax(0)
    found = [*head[: CUTOFFS[0]]]
    for i, (begin, end) in enumerate(bounds()[1:], 1):
        narrow = x
        if (place := columns(model)[i]) is not None:
            narrow = weights[f"{owner}.projections.weight"][:, slice(*place)].T @ x
        words = torch.stack([vectors[i][word] @ narrow for word in range(end - begin)])
        found += [*(head[CUTOFFS[0] + i - 1] + words.log_softmax(0))]
    return torch.stack(found)


def embedded(stage, token):
    """The embedding of one token [D], by the definition."""
    weights, model = dict(stage.named_parameters()), stage.config
    if not model.adaptive.input:
        return weights["embedding.weight"][token]
    i = sum(token >= cutoff for cutoff in CUTOFFS)
    vector = weights[f"embedding.clusters.{i}.weight"][token - bounds()[i][0]]
    place = columns(model)[i]
    return vector if place is None else weights["embedding.projections.weight"][:, slice(*place)] @ vector


def gradients(stage, hidden, total):
    """The gradients of a scalar in all parameters that it depends on and in the hidden vectors."""
    named = dict(stage.named_parameters())
    found = torch.autograd.grad(total, [hidden, *named.values()], retain_graph=True, allow_unused=True)
    return dict(zip(["hidden", *named], found, strict=True))


def assert_gradients_agree(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        expected = other[name]
        if value is None or expected is None:  # what one does not use is zero in the other
            found = value if expected is None else expected
            assert found is None or not found.any(), name
        else:
            # the same sums in another order
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-10, msg=name)


def test_losses_scores_and_gradients_are_those_of_the_definition(stage, batch):
    hidden, labels = batch
    oracle = torch.stack([torch.stack([log_probabilities(stage, x) for x in row]) for row in hidden])
    expected = -oracle.gather(-1, labels[..., None])[..., 0]
    losses = stage.token_losses(hidden, labels)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
    weights = torch.randn(losses.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_gradients_agree(
        gradients(stage, hidden, (losses * weights).sum()), gradients(stage, hidden, (expected * weights).sum())
    )
    scored, correct = stage.token_scores(hidden, labels)
    torch.testing.assert_close(scored, losses, rtol=0, atol=1e-10)
    assert torch.equal(correct, oracle.argmax(-1) == labels)
    # every most probable word, some of them in each cluster, is found
    best = oracle.argmax(-1)
    assert stage.token_scores(hidden, best)[1].all()


def test_logits_are_log_probabilities_of_all_words(stage, batch):
    hidden, _ = batch
    logits = stage.logits(hidden)
    assert logits.shape == (CHUNK, ROWS, 64)
    assert (logits[..., V:] == -torch.inf).all()
    logs = logits[..., :V].log_softmax(-1)
    oracle = torch.stack([torch.stack([log_probabilities(stage, x) for x in row]) for row in hidden])
    torch.testing.assert_close(logs, oracle, rtol=0, atol=1e-10)
    if stage.config.adaptive.softmax:
        torch.testing.assert_close(logits[..., :V], oracle, rtol=0, atol=1e-10)
        torch.testing.assert_close(logits.exp().sum(-1), torch.ones(CHUNK, ROWS).double(), rtol=0, atol=1e-12)
    weights = torch.randn(oracle.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert_gradients_agree(
        gradients(stage, hidden, (logs * weights).sum()), gradients(stage, hidden, (oracle * weights).sum())
    )


def test_embeddings_are_those_of_the_definition(stage):
    tokens = torch.arange(V)[:, None]
    found = stage.embedding(tokens)
    expected = torch.stack([embedded(stage, token) for token in range(V)])[:, None]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    dummy = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert_gradients_agree(
        gradients(stage, dummy, (found * weights).sum() + dummy),
        gradients(stage, dummy, (expected * weights).sum() + dummy),
    )


@pytest.mark.parametrize("divisor", [1, 2])
def test_torchs_own_module_finds_the_same(divisor, batch):
    hidden, labels = batch
    stage = stage_of(model_of(divisor))
    weights = dict(stage.named_parameters())
    other = nn.AdaptiveLogSoftmaxWithLoss(D, V, CUTOFFS, div_value=divisor, head_bias=False).double()
    with torch.no_grad():
        vectors = weights["head.cluster_vectors.weight"][: len(CUTOFFS)]
        other.head.weight.copy_(torch.cat((weights["head.clusters.0.weight"][: CUTOFFS[0]], vectors)))
        for i, (begin, end) in enumerate(bounds()[1:], 1):
            place = columns(stage.config)[i]
            projection = torch.eye(D) if place is None else weights["head.projections.weight"][:, slice(*place)].T
            other.tail[i - 1][0].weight.copy_(projection)
            other.tail[i - 1][1].weight.copy_(weights[f"head.clusters.{i}.weight"][: end - begin])
        flat = hidden.flatten(0, 1)
        torch.testing.assert_close(
            stage.token_losses(hidden, labels).flatten(), -other(flat, labels.flatten()).output, rtol=0, atol=1e-10
        )
        torch.testing.assert_close(
            stage.logits(hidden)[..., :V].flatten(0, 1), other.log_prob(flat), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("label", [0, 10, 60, LABEL_IGNORED])
def test_parameters_of_clusters_without_a_token_get_gradients_of_zero(stage, batch, label):
    """ZeRO 3 waits for a gradient of each parameter."""
    hidden, _ = batch
    losses = stage.token_losses(hidden, torch.full((CHUNK, ROWS), label))
    used = {name: p for name, p in stage.named_parameters() if name.startswith("head.")}
    found = torch.autograd.grad(losses.sum(), list(used.values()))
    assert all(gradient.isfinite().all() for gradient in found)
    if label == LABEL_IGNORED:
        assert not losses.any()
        assert not any(gradient.any() for gradient in found)


def test_recomputation_changes_nothing(stage, batch):
    hidden, labels = batch
    once = torch.autograd.grad(stage.token_losses(hidden, labels).sum(), hidden)[0]
    stage.recompute = True
    again = torch.autograd.grad(stage.token_losses(hidden, labels).sum(), hidden)[0]
    # products of the same numbers round as their operands lie in memory
    torch.testing.assert_close(again, once, rtol=0.0, atol=1e-13)


def test_generation_takes_the_likeliest_words_and_scores_sequences(stage):
    evaluator = Evaluator(stage)
    prompt = [3, 55, 12, 30, 1]
    made = evaluator.generate([prompt], 6)[0]
    tokens = torch.tensor([*prompt, *made])
    logits = evaluator.logits(tokens[:-1, None])
    assert logits is not None
    assert logits[len(prompt) - 1 :, 0].argmax(-1).tolist() == made
    nats, likeliest = evaluator.score([tokens.tolist()], [len(made)])[0]
    assert likeliest
    logs = logits[:, 0, :V].log_softmax(-1).double()
    expected = logs.gather(-1, tokens[1:, None])[len(prompt) - 1 :].sum()
    assert nats == pytest.approx(expected.item(), abs=1e-5)  # logits are handed out in float32


def test_bf16_is_near_float64(stage, batch):
    hidden, labels = batch
    exact = stage.token_losses(hidden, labels)
    rounded = stage.to(torch.bfloat16).token_losses(hidden.bfloat16(), labels)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 0.1  # logits of up to 10 are rounded to 0.03


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cutoffs": []}, "adaptive.cutoffs"),
        ({"cutoffs": [0, 5]}, "greater than 0"),
        ({"cutoffs": [20, 10]}, "adaptive.cutoffs [20, 10] do not ascend; give each cluster's first token id in order"),
        ({"cutoffs": [10, 10]}, "adaptive.cutoffs [10, 10] do not ascend"),
        ({"cutoffs": [10, 61]}, "61 is not below vocab_size 61, so the last cluster would be empty"),
        ({"divisor": 4}, "adaptive.divisor 4 leaves cluster 3 no width: hidden_size 16 / 4^3 is below 1"),
        ({"input": False, "softmax": False}, "leave nothing in clusters; leave adaptive out"),
        ({"input": False, "tied": True}, "tie_embeddings true does not go with adaptive.input false"),
        ({"softmax": False, "tied": True}, "adaptive.softmax false; both ends need the same clusters"),
        ({"tie_projections": True}, "adaptive.tie_projections true needs tie_embeddings true and adaptive.divisor"),
        ({"tie_projections": True, "tied": True, "divisor": 1}, "adaptive.divisor above 1 (it is 1)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    tied = change.pop("tied", False)
    section = {"cutoffs": CUTOFFS, "divisor": 2, **change}
    with pytest.raises((ValidationError, ValueError)) as refused:
        ModelConfig.model_validate({**BASE, "tie_embeddings": tied, "adaptive": section})
    assert message in str(refused.value).replace("adaptive\n", "adaptive.")  # pydantic's own lines name the path first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padded_vocab_size": 64}, "padded_vocab_size 64 does not go with adaptive"),
        ({"mup": {"base_width": 8}}, "adaptive does not go with mup"),
    ],
)
def test_options_of_one_table_are_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate({**BASE, "adaptive": {"cutoffs": CUTOFFS}, **change})


def test_runs_refuse_ranks_that_cannot_share_clusters_and_the_z_loss():
    tree = run_config().model_dump(mode="json")
    tree["model"]["adaptive"] = {"cutoffs": [16, 40], "row_multiple": 3}
    tree["parallel"]["tp"] = 2
    with pytest.raises(ConfigError, match=r"model.adaptive.row_multiple 3 is not divisible by parallel.tp 2"):
        parse_config(RunConfig, tree, "test")
    tree["model"]["adaptive"]["row_multiple"] = 4
    assert tp_sizes(parse_config(RunConfig, tree, "test").model) == [1, 2]
    tree["training"]["objective"] = {"kind": "next_token", "z_loss": 1e-4}
    with pytest.raises(ConfigError, match=r"z_loss 0.0001 does not go with model.adaptive.softmax true"):
        parse_config(RunConfig, tree, "test")


@pytest.mark.parametrize("form", FORMS)
def test_parameters_are_counted(form):
    model = model_of(**FORMS[form])
    stage = build_stage(model, PlainLinears())
    counts = parameter_counts(model)
    assert counts["total"] == sum(p.numel() for p in stage.parameters())
    assert counts["embedding"] == sum(p.numel() for p in stage.embedding.parameters())
    for tp_size in (1, 2):
        parts = part_parameters(model, tp_size)
        words = sum(c.rows * c.width for c in model.clusters)
        assert parts.tied == (words // tp_size if model.tie_embeddings else 0) + (
            14 * D if model.adaptive.tie_projections else 0
        )


def test_flops_are_those_of_clusters_as_frequent_as_zipf_says():
    model = model_of(2)
    harmonic = [math.fsum(1 / rank for rank in range(1, bound + 1)) for bound in (0, *CUTOFFS, V)]
    shares = [(b - a) / harmonic[-1] for a, b in itertools.pairwise(harmonic)]
    assert model.adaptive.shares(V) == pytest.approx(shares, rel=0.01)
    assert math.fsum(model.adaptive.shares(V)) == pytest.approx(1)
    expected = 2 * D * (16 + 8) + sum(
        2 * share * (D * width + width * rows)
        for share, width, rows in zip(shares[1:], (8, 4, 2), (16, 24, 24), strict=True)
    )
    assert head_flops(model) == pytest.approx(expected, rel=0.01)
    assert embedding_flops(model) == 2 * D * (8 + 4 + 2)
    assert flops_per_token(model, CHUNK)["embedding"] == embedding_flops(model)
    assert "embedding" not in flops_per_token(model_of(1), CHUNK)
    # the labels that losses are measured with are as frequent
    labels = typical_labels(model, 1000, 2)
    assert labels.shape == (1000, 2)
    found = [((begin <= labels) & (labels < end)).double().mean().item() for begin, end in bounds()]
    assert found == pytest.approx(model.adaptive.shares(V), abs=1e-3)


def test_every_word_can_be_read(stage):
    tokens = torch.arange(V + 3).clamp(max=V - 1)[: 2 * CHUNK, None]
    hidden, _, _ = stage.read_chunk(tokens[:CHUNK], stage.initial_states(1, tokens.device, torch.float64), Chunk((0,)))
    assert hidden.isfinite().all()


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    tree = {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 40, "chunk_size": 4}
    model = parse_config(ModelConfig, {**tree, "adaptive": {"cutoffs": [8, 20]}}, "test")
    embedding = AdaptiveEmbedding(model, PlainLinears(), projects=True)
    for wrong, said in ((40, "token ids from 1 to 40 in a vocabulary of 40"), (-1, "token ids from -1 to 1 in")):
        with pytest.raises(IndexError, match=said):
            embedding(torch.tensor([[1], [wrong]]))
