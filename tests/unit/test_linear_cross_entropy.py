"""The output head and the cross-entropy behind it in slices of tokens: against the whole logits, in one process.

Over ranks: tests/distributed/test_linear_cross_entropy.py.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import LABEL_IGNORED
from megamem.model.stage import Stage, build_stage
from megamem.ops import linear_cross_entropy
from megamem.ops.linear_cross_entropy import label_scores, label_scores_and_best, slice_count
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.planning.ledger import Ledger, Storages

TOKENS, WIDTH, ROWS, WORDS = 37, 12, 24, 21
CHUNK, BATCH = 8, 3
MODEL = {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 53, "chunk_size": CHUNK, "init_std": 0.5}
FORMS: dict[str, dict[str, Any]] = {
    "head": {},
    "tied": {"tie_embeddings": True},
    "padded": {"padded_vocab_size": 64},
    "mup": {"mup": {"base_width": 8, "base_heads": 1, "base_kv_heads": 1}},
}


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs [N, D], weight [V, D], labels [N], and the gradients of log sums and label logits, [N] each."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (TOKENS, ROWS))
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    gradients = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, *gradients


def in_float64(x: Tensor, weight: Tensor, labels: Tensor, *gradients: Tensor) -> list[Tensor]:
    """Log sums, label logits and the gradients of x and weight by autograd over whole logits, all in float64."""
    x, weight = (each.detach().double().requires_grad_() for each in (x, weight))
    logits = (x @ weight.mT)[:, :WORDS]
    scores = logits.exp().sum(-1).log(), logits[torch.arange(TOKENS), labels]
    of_both = torch.autograd.grad(scores, (x, weight), [each.double() for each in gradients])
    return [*(score.detach() for score in scores), *of_both]


def found(slices: int, keep: bool, x: Tensor, weight: Tensor, labels: Tensor, *gradients: Tensor) -> list[Tensor]:
    scores = label_scores(x, weight, labels, WORDS, slices, keep)
    of_both = torch.autograd.grad(scores, (x, weight), [each.to(scores[0].dtype) for each in gradients])
    return [*(score.detach() for score in scores), *of_both]


# slices that are nearly equal, of one token each, and one without any
@pytest.mark.parametrize("slices", [1, 2, 5, TOKENS, TOKENS + 1])
@pytest.mark.parametrize("keep", [True, False])
def test_values_and_gradients_are_those_of_the_whole_logits(slices, keep):
    """Within 1e-12: float64 sums in another order."""
    for ours, theirs in zip(found(slices, keep, *given()), in_float64(*given()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slices", [1, 3])
def test_losses_are_those_of_torch(slices):
    x, weight, labels, gradient, _ = given()
    log_sums, label_logits = label_scores(x, weight, labels, ROWS, slices)
    losses = F.cross_entropy(x @ weight.mT, labels, reduction="none")
    torch.testing.assert_close(log_sums - label_logits, losses, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad(each, (x, weight), gradient) for each in (log_sums - label_logits, losses))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slices", [1, 4])
def test_a_backward_pass_may_be_followed_by_another(slices):
    x, weight, labels, *gradients = given()
    scores = label_scores(x, weight, labels, WORDS, slices)
    once = torch.autograd.grad(scores, (x, weight), gradients, retain_graph=True)
    for one, other in zip(torch.autograd.grad(scores, (x, weight), gradients), once, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("learning", [0, 1])
def test_gradients_are_made_of_what_learns_alone(slices, learning):
    """A frozen head hands gradients on, and a head behind a frozen model has its own."""
    x, weight, labels, *gradients = given()
    leaves = x, weight
    leaves[1 - learning].requires_grad_(False)
    scores = label_scores(x, weight, labels, WORDS, slices)
    torch.autograd.backward(scores, gradients)
    assert leaves[1 - learning].grad is None
    expected = in_float64(*given())[2 + learning]
    torch.testing.assert_close(leaves[learning].grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slices", [1, 3])
def test_labels_of_other_ranks_count_nothing(slices):
    """A rank with rows 10 to 23 has nothing of labels before these but their sums."""
    x, weight, labels, *gradients = given()
    own = labels - 10
    log_sums, label_logits = label_scores(x, weight[10:], own, WORDS - 10, slices)
    theirs = own < 0
    assert theirs.any()
    assert (label_logits[theirs] == 0).all()
    logits = (x @ weight.mT)[:, 10:WORDS]
    expected = logits.exp().sum(-1).log(), torch.where(theirs, 0.0, logits.gather(1, own.clamp(min=0)[:, None])[:, 0])
    torch.testing.assert_close(torch.stack([log_sums, label_logits]), torch.stack(expected), rtol=0, atol=1e-12)
    ours, exact = (
        torch.autograd.grad(scores, (x, weight), gradients) for scores in ((log_sums, label_logits), expected)
    )
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("keep", [True, False])
def test_a_rank_without_words(slices, keep):
    """Its rows only fill up: the sums are those of no terms, and whatever comes back, the gradients are zero."""
    x, weight, labels, *gradients = given()
    scores = label_scores(x, weight, labels - ROWS, 0, slices, keep)
    assert (scores[0] == -torch.inf).all()
    assert (scores[1] == 0).all()
    for gradient in torch.autograd.grad(scores, (x, weight), gradients):
        assert (gradient == 0).all()
    *_, largest, row = label_scores_and_best(x, weight, labels - ROWS, 0, slices)
    assert (largest == -torch.inf).all()
    assert (row == 0).all()


@pytest.mark.parametrize("slices", [1, 4])
def test_the_best_row_is_the_first_of_equals(slices):
    x, weight, labels, *_ = given()
    with torch.no_grad():
        weight[9] = weight[4]  # always as good, and further behind
        weight[22] = 100 * weight[0].sign()  # no word
    log_sums, label_logits, largest, row = label_scores_and_best(x, weight, labels, WORDS, slices)
    logits = (x @ weight.mT)[:, :WORDS]
    assert torch.equal(row, logits.argmax(-1))
    assert (row == 4).any()
    torch.testing.assert_close(largest, logits.amax(-1), rtol=0, atol=1e-12)
    ours = torch.stack(label_scores(x, weight, labels, WORDS, slices))
    assert torch.equal(torch.stack((log_sums, label_logits)), ours)


def test_fp32_and_bf16_are_as_exact_as_their_numbers():
    """FP32 within a few roundings of numbers up to 20. In BF16 the logits are rounded once (2^-9 of at most 20) and so
    is each gradient of logits: the gradients of x are sums of 24 such terms times weights of about 1."""
    for dtype, of_scores, of_gradients in ((torch.float32, 2e-5, 5e-5), (torch.bfloat16, 0.05, 0.1)):
        exact = in_float64(*given(dtype))
        for slices in (1, 4):
            ours = found(slices, True, *given(dtype))
            assert [each.dtype for each in ours] == [torch.float32] * 2 + [dtype] * 2
            for one, other, atol in zip(ours, exact, (of_scores,) * 2 + (of_gradients,) * 2, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=atol)


def test_the_gradient_of_a_bf16_weight_is_summed_in_fp32():
    """256 slices of one token, which all add the same to one row: BF16 would stop at 256 times less of the last bit."""
    tokens = 512
    x = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    _, label_logits = label_scores(x, weight, labels, 2, slices=tokens)
    (gradient,) = torch.autograd.grad(label_logits.sum(), weight)
    assert gradient[0].item() == tokens


def test_one_slice_where_logits_fit(monkeypatch):
    assert slice_count(1, 10**9) == 1
    assert slice_count(2048, 32_768) == 1
    assert slice_count(2049, 32_768) == 2
    assert slice_count(2049 * 2, 32_768) == 4
    assert slice_count(4096 * 8, 32_768) == 16
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 1)
    assert slice_count(7, 100) == 8  # the last of them is empty


def test_what_is_kept_and_taken():
    """The largest tensors that live: a slice's logits and its gradient, the FP32 sum; nothing of the logits is kept."""
    tokens, rows, slices = 4096, 2048, 8
    x = torch.zeros(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    peaks, kept = {}, {}
    for cut in (1, slices):
        gc.collect()
        with Ledger() as ledger:
            scores = label_scores(x, weight, labels, rows, cut)
            kept[cut] = ledger.live
            torch.autograd.backward(scores, [torch.ones(tokens)] * 2)
            peaks[cut] = Storages.of(ledger).live(ledger.time).max()
        del scores
        x.grad = weight.grad = None
    logits = tokens * rows * 4
    assert kept[1] > logits
    assert kept[slices] < 0.02 * logits
    assert peaks[1] > 2 * logits  # exponentials and their gradient
    assert peaks[slices] < 0.3 * logits  # of an eighth; and gradients of x and weight


def stage_of(form: dict[str, Any], dtype: torch.dtype = torch.float64) -> Stage:
    stage = build_stage(parse_config(ModelConfig, {**MODEL, **form}, "test"), PlainLinears()).to(dtype)
    initialize_parameters(stage, 0)
    return stage


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("slices", [None, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_of_a_model_are_those_of_its_logits(form, slices, recompute):
    """Values and gradients within 1e-12, ignored labels, normalizers and most probable tokens included."""
    stage = stage_of(form)
    stage.loss_slices, stage.recompute = slices, recompute
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(CHUNK, BATCH, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(MODEL["vocab_size"], (CHUNK, BATCH), generator=generator)
    weights = torch.randn(CHUNK, BATCH, generator=generator, dtype=torch.float64)
    logits = stage.logits(hidden)
    labels[0] = logits[0].argmax(-1)
    labels[2:5, 1] = LABEL_IGNORED
    ignored = labels == LABEL_IGNORED
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=LABEL_IGNORED)
    normalizers = logits.logsumexp(-1).masked_fill(ignored, 0.0)
    expected = theirs.view(CHUNK, BATCH), normalizers
    found = stage.token_losses_and_normalizers(hidden, labels)
    assert torch.equal(stage.token_losses(hidden, labels), found[0])
    scores, correct = stage.token_scores(hidden, labels)
    assert torch.equal(scores, found[0])
    assert torch.equal(correct, (logits.argmax(-1) == labels) & ~ignored)
    assert correct[0].all()
    leaves = [hidden, *(p for name, p in stage.named_parameters() if name.startswith(("embedding.", "head.")))]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)
        gradients = [
            torch.autograd.grad((each * weights).sum(), leaves, retain_graph=True, allow_unused=True)
            for each in (ours, exact)
        ]
        for one, other in zip(*gradients, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
