"""An output head split over tensor-parallel ranks, its losses in slices: what one process finds, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.model.stage import build_stage
from megamem.parallel.linears import Linears, PlainLinears, info, initialize_parameters
from tests.distributed.harness import run_distributed
from tests.distributed.training_cases import MODEL

FORMS: dict[str, dict[str, Any]] = {
    "head": {"vocab_size": 64},
    "tied": {"vocab_size": 64, "tie_embeddings": True},
    # of four ranks the third has one word and the last one none
    "padded": {"vocab_size": 33, "padded_vocab_size": 64},
}
TOKENS, ROWS = 8, 3


def measure(form: dict[str, Any], linears: Linears) -> dict[str, Tensor]:
    """What this rank makes of fixed hidden vectors and labels; gradients by name, whole."""
    model = ModelConfig.model_validate({**MODEL, **form, "init_std": 0.5})
    stage = build_stage(model, linears, range(model.layers, model.layers)).double()  # the head alone
    initialize_parameters(stage, 0, linears.tp_size, linears.tp_rank)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(TOKENS, ROWS, model.hidden_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(model.vocab_size, (TOKENS, ROWS), generator=generator)
    # tokens of which the label is the most probable one, by the whole head
    alone = build_stage(model, PlainLinears(), range(model.layers, model.layers)).double()
    initialize_parameters(alone, 0)
    labels[0] = alone.logits(hidden)[0].argmax(-1)
    weights = torch.randn(2, TOKENS, ROWS, generator=generator, dtype=torch.float64)
    name = "embedding.weight" if model.tie_embeddings else "head.weight"
    weight = dict(stage.named_parameters())[name]
    found: dict[str, Tensor] = {}
    for slices, split, recompute in ((1, False, False), (1, True, True), (4, False, False), (4, True, False)):
        linears.sequence_parallel = split and linears.tp_size > 1
        stage.loss_slices, stage.recompute = slices, recompute
        x = linears.split_tokens(hidden).requires_grad_()
        losses, normalizers = stage.token_losses_and_normalizers(x, labels)
        scores, correct = stage.token_scores(x, labels)
        total = (losses * weights[0] + normalizers * weights[1]).sum()
        of_x, of_weight = torch.autograd.grad(total, (x, weight))
        way = f"{slices} {split} {recompute}"
        found |= {
            f"{way} losses": losses.detach(),
            f"{way} normalizers": normalizers.detach(),
            f"{way} scores": scores,
            f"{way} correct": correct,
            f"{way} gradient of x": whole(of_x, 0 if split else None, linears),
            f"{way} gradient of weight": whole(of_weight, info(weight).shard_axis, linears),
        }
    return found


def whole(value: Tensor, axis: int | None, linears: Linears) -> Tensor:
    """All ranks' rows of a gradient [...] that is split along `axis`."""
    if axis is None or linears.tp_size == 1:
        return value
    from megamem.parallel.gather import gather_shards

    return gather_shards(value, axis, linears.group)  # type: ignore[attr-defined]


def measure_all(ranks: int) -> dict[str, dict[str, Tensor]]:
    """Every form on this rank."""
    from megamem.parallel.megatron import MegatronLinears
    from megamem.parallel.topology import Topology

    topology = Topology.start(ranks, device="cpu", timeout_s=120)
    return {name: measure(form, MegatronLinears(topology.tp_group)) for name, form in FORMS.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_find_what_one_process_finds(ranks):
    """Within 1e-12: float64 sums in another order."""
    results = run_distributed(ranks, f"{__name__}:measure_all", ranks)
    for name, form in FORMS.items():
        expected = measure(form, PlainLinears())
        for found in (result[name] for result in results):
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12, msg=f"{name}: {key}")
            assert found["1 False False correct"][0].all()
