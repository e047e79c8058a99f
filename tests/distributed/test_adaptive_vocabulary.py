"""Clusters of words split over tensor-parallel ranks find what one process finds, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.evaluation.evaluator import Evaluator
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import Linears, PlainLinears, info, initialize_parameters
from tests.distributed.harness import run_distributed
from tests.distributed.training_cases import ADAPTIVE, MODEL, TIED_ADAPTIVE

RANKS = 2
PROMPTS = [[5, 60, 31, 2], [44, 11]]
FORMS = {
    "narrow": ADAPTIVE,
    "wide": {"adaptive": {**ADAPTIVE["adaptive"], "divisor": 1}},
    "tied": {**ADAPTIVE, "tie_embeddings": True},
    "tied-projections": TIED_ADAPTIVE,
    # a rank has none of the last cluster's words
    "few-words": {"adaptive": {"cutoffs": [10, 62], "divisor": 2, "row_multiple": 4}},
}


def measure(form: dict[str, Any], linears: Linears, evaluator: Any = Evaluator) -> dict[str, Any]:
    """What this rank makes of fixed hidden vectors and words; gradients by name, of its own rows."""
    model = ModelConfig.model_validate({**MODEL, **form, "init_std": 0.5})
    stage = build_stage(model, linears).double()
    initialize_parameters(stage, 0, linears.tp_size, linears.tp_rank)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(8, 3, model.hidden_size, generator=generator, dtype=torch.float64)
    tokens, labels = torch.randint(model.vocab_size, (2, 8, 3), generator=generator)
    weights = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    found: dict[str, Any] = {}
    for split in (False, True):
        linears.sequence_parallel = split and linears.tp_size > 1
        x = linears.split_tokens(hidden).requires_grad_()
        rows = linears.split_tokens(torch.ones_like(hidden))
        losses = stage.token_losses(x, labels)
        scores, correct = stage.token_scores(x, labels)
        logits = stage.logits(x)
        embedded = stage.embedding(tokens)
        named = {name: p for name, p in stage.named_parameters() if name.startswith(("embedding.", "head."))}
        trained = (losses * weights).sum() + (embedded * rows).square().sum()
        suffix = "-split" if split else ""
        found |= {f"{name}{suffix}": value.detach() for name, value in (
            ("losses", losses), ("scores", scores), ("correct", correct), ("logits", logits),
        )}  # fmt: skip
        for kind, total in (("trained", trained), ("logits", own_sum(logits))):
            wanted = [x, *named.values()]
            grads = torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)
            axes = [0 if split else None, *(info(parameter).shard_axis for parameter in named.values())]
            for name, axis, leaf, gradient in zip(["hidden", *named], axes, wanted, grads, strict=True):
                value = torch.zeros_like(leaf) if gradient is None else gradient
                found[f"{kind}/{name}{suffix}"] = whole(value, axis, linears)
    linears.sequence_parallel = False
    found["generated"] = evaluator(stage).generate(PROMPTS, 6)
    return found


def own_sum(logits: Tensor) -> Tensor:
    """A function of this rank's logits [8, 3, columns], of which all ranks' sum is that of all logits."""
    return logits.masked_fill(logits == -torch.inf, 0.0).square().sum()


def whole(value: Tensor, axis: int | None, linears: Linears) -> Tensor:
    """All ranks' rows of a gradient [...] that is split along `axis`."""
    if axis is None or linears.tp_size == 1:
        return value
    from megamem.parallel.gather import gather_shards

    return gather_shards(value, axis, linears.group)  # type: ignore[attr-defined]


def measure_all(forms: dict[str, Any]) -> dict[str, Any]:
    """Every form on this rank."""
    from megamem.parallel.megatron import MegatronLinears
    from megamem.parallel.topology import Topology

    topology = Topology.start(RANKS, device="cpu", timeout_s=120)

    def evaluator(stage: Stage) -> Evaluator:
        return Evaluator(stage, topology)

    return {name: measure(form, MegatronLinears(topology.tp_group), evaluator) for name, form in forms.items()}


@pytest.mark.distributed
def test_ranks_find_what_one_process_finds():
    ranks = run_distributed(RANKS, f"{__name__}:measure_all", FORMS)
    for name, form in FORMS.items():
        expected = measure(form, PlainLinears())
        for found in (rank[name] for rank in ranks):
            assert found.keys() == expected.keys()
            assert found.pop("generated") == expected["generated"]
        for key in ranks[0][name]:
            parts = [rank[name][key] for rank in ranks]
            one = torch.cat(parts, -1) if key.startswith("logits") and "/" not in key else parts[0]
            # partial sums in another order
            torch.testing.assert_close(one, expected[key], rtol=0, atol=1e-10, msg=f"{name}: {key}")
