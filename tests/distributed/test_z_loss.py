"""The z-loss: its value and its gradients, by formula and over split vocabularies, stages and batches."""

from __future__ import annotations

import pytest
import torch

from megamem.memory.base import LABEL_IGNORED, Chunk
from megamem.model.objective import build_objective
from megamem.model.objectives.next_token import NextTokenConfig
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.distributed.harness import run_distributed
from tests.distributed.training_cases import run_config

COEFFICIENT = 0.1
"""Large, so that its gradients are no rounding error of those of the cross-entropy."""
SECTIONS = {"training": {"objective": {"kind": "next_token", "z_loss": COEFFICIENT}}}
LAYOUTS = {
    1: {"one": {}, "recompute": {"training": {"recompute": True}}},
    2: {
        "tp2": {"parallel": {"tp": 2, "zero_stage": 0}},
        "tp2-recompute": {"parallel": {"tp": 2}, "training": {"recompute": True}},
        "pp2": {"parallel": {"pp": 2}},
        "dp2": {"parallel": {"zero_stage": 2}},
        "dp2-zero3": {"parallel": {"zero_stage": 3}},
    },
}


def measure(layouts: dict[str, dict]) -> dict[str, tuple[list[float], float]]:
    """Both losses per predicted token, and the norm of all gradients, by layout."""
    import torch.distributed as dist

    from megamem.parallel.topology import Topology
    from megamem.pipeline.engine import build_engine
    from tests.distributed.training_cases import local_batches

    found = {}
    for name, sections in layouts.items():
        training = {**SECTIONS["training"], **sections.get("training", {})}
        config = run_config(**{**sections, "training": training})
        topology = Topology.start(config.parallel.tp, pp=config.parallel.pp, device="cpu", timeout_s=120)
        engine = build_engine(config, topology)
        result = engine.step(local_batches(config, topology, 0), 1e-3)
        sums = result.losses.clone()
        dist.all_reduce(sums, group=topology.dp_group)
        found[name] = (sums / result.predicted).tolist(), float(result.grad_norm)
    return found


@pytest.mark.distributed
def test_it_is_the_same_under_every_layout():
    runs = {world: run_distributed(world, f"{__name__}:measure", LAYOUTS[world]) for world in LAYOUTS}
    losses, norm = runs[1][0]["one"]
    assert losses[1] > 0.01 * losses[0], "it has a weight"
    for ranks in runs.values():
        for found in ranks:
            for name, (those, their_norm) in found.items():
                # FP32 sums in another order
                assert those == pytest.approx(losses, rel=1e-5), name
                assert their_norm == pytest.approx(norm, rel=1e-4), name


def test_value_and_gradient_are_those_of_the_formula():
    config = run_config()
    stage = build_stage(config.model, PlainLinears()).double()
    initialize_parameters(stage, 0)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(config.model.vocab_size, (2, 16, 3), generator=generator)
    labels[5:9, 1] = LABEL_IGNORED
    hidden, *_ = stage.read_chunk(tokens, stage.initial_states(3, torch.device("cpu"), torch.float64), Chunk((0, 0, 0)))
    objective = build_objective(NextTokenConfig(z_loss=COEFFICIENT), config.model)
    plain = build_objective(NextTokenConfig(), config.model)
    losses = objective.losses(stage, hidden, labels)
    assert tuple(losses) == objective.names == ("next_token", "z_loss")
    assert torch.equal(losses["next_token"], plain.losses(stage, hidden, labels)["next_token"])
    assert plain.names == ("next_token",)
    logits = stage.logits(hidden)
    expected = COEFFICIENT * (logits.exp().sum(-1).log().square() * (labels != LABEL_IGNORED)).sum()
    torch.testing.assert_close(losses["z_loss"], expected, rtol=1e-12, atol=0)
    one, other = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for loss in (losses["z_loss"], expected))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
