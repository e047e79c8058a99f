"""Bytes that DeepSpeed's engines hold on real ranks, against what is planned for them."""

import pytest

from megamem.parallel.topology import Topology
from megamem.pipeline.engine import build_engine
from megamem.planning.ranks import rank_bytes
from tests.distributed.freezing_cases import GPT2, MODEL
from tests.distributed.freezing_cases import config_of as frozen_config
from tests.distributed.harness import run_distributed
from tests.distributed.training_cases import LAMEMO, MUP, local_batches, run_config

pytestmark = pytest.mark.distributed
TIED = {"tie_embeddings": True}
CASES = {
    # (pp, tp, zero), precision, changes of the model
    "plain": ((1, 2, 0), "fp32", {}),
    "zero1": ((1, 2, 1), "fp32", {}),
    "zero1-bf16-pipeline": ((2, 1, 1), "bf16", MUP),
    "zero2-bf16": ((1, 1, 2), "bf16", {}),
    "zero3": ((1, 2, 3), "fp32", {}),
    "lamemo-zero1-bf16-pipeline": ((2, 1, 1), "bf16", LAMEMO),
    "frozen-pipeline": ((2, 2, 0), "fp32", GPT2),
    "frozen-zero3": ((1, 2, 3), "fp32", MODEL),
}
REST = {
    "pipeline": ((2, 2, 0), "fp32", TIED),
    "zero1-pipeline": ((2, 1, 1), "fp32", TIED),
    "frozen-zero1-bf16": ((1, 2, 1), "bf16", MODEL),
    "zero1-bf16": ((1, 2, 1), "bf16", {}),
    "zero2": ((1, 2, 2), "fp32", {}),
    "zero3-bf16": ((1, 1, 3), "bf16", {}),
    "lamemo-pipeline": ((2, 2, 0), "fp32", LAMEMO),
    "frozen-zero2": ((1, 2, 2), "fp32", MODEL),
}
"""Between those above; slow tests."""


def config_of(name):
    (pp, tp, zero), precision, model = (CASES | REST)[name]
    parallel = {"pp": pp, "tp": tp, "zero_stage": zero}
    if name.startswith("frozen"):
        return frozen_config({"training": {"precision": precision}, "parallel": parallel, "model": model})
    return run_config(training={"precision": precision}, parallel=parallel, model=model)


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gradients(engine):
    """Wherever DeepSpeed sums them: parameters, flat FP32 groups (BF16), partitions (ZeRO 2), one buffer (ZeRO 3)."""
    inner = engine.engine.optimizer
    if (flat := getattr(inner, "fp32_groups_gradients_flat", None)) is not None:
        return bytes_of(flat)
    if engine.config.parallel.zero_stage == 3:
        return inner.grad_partitions_flat_buffer.nbytes
    if engine.config.parallel.zero_stage == 2:
        return bytes_of(g for group in inner.averaged_gradients.values() for g in group or () if g is not None)
    return bytes_of(p.grad for p in engine.stage.parameters() if p.grad is not None)


def optimizer(engine):
    """Both moments, and FP32 weights where ZeRO keeps its own."""
    zero = engine.config.parallel.zero_stage
    own = [p for group in engine.optimizer.param_groups for p in group["params"]] if zero in (1, 2) else []
    own = engine.engine.optimizer.fp32_partitioned_groups_flat if zero == 3 else own
    return bytes_of([*own, *(x for state in engine.optimizer.state.values() for x in state.values() if x.ndim)])


def held(names):
    """On each rank, by case: its stage, its groups of parameters, bytes of each kind. Gradients: most within a step."""
    return {name: held_in(config_of(name)) for name in names}


def held_in(config):
    topology = Topology.start(config.parallel.tp, pp=config.parallel.pp, device="cpu", timeout_s=120)
    engine = build_engine(config, topology)
    engine.step(local_batches(config, topology, 0), 1e-3)
    seen = []
    engine.step(local_batches(config, topology, 1), 1e-3, lambda action: seen.append(gradients(engine)))
    parameters = list(engine.stage.parameters())
    return {
        "stage": topology.pp_rank,
        "groups": len(parameters) if config.parallel.zero_stage == 3 else len(engine.optimizer.param_groups),
        "weights": bytes_of(getattr(parameter, "ds_tensor", parameter) for parameter in parameters),
        "gradients": max(seen),
        "optimizer": optimizer(engine),
    }


def run_ranks(names):
    return run_distributed(4, "tests.distributed.test_planned_bytes:held", list(names))


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(CASES)


@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_what_was_planned(ranks, name):
    assert_planned(ranks, name)


@pytest.mark.slow
def test_the_rest_too():
    ranks = run_ranks(REST)
    for name in REST:
        assert_planned(ranks, name)


def assert_planned(ranks, name):
    """To the byte, but for ZeRO's padding of each group of parameters to a multiple of 2 DP (ZeRO 3: each tensor)."""
    config = config_of(name)
    (pp, tp, zero), precision, _ = (CASES | REST)[name]
    dp = 4 // pp // tp
    planned = rank_bytes(config, tp, pp, dp)
    for rank in ranks:
        here = rank[name]
        plan = planned[here["stage"]]
        for kind, each in {"weights": 4 if precision == "fp32" else 2, "gradients": 4, "optimizer": 12}.items():
            more = here[kind] - getattr(plan, kind)
            padded = zero == 3 or (zero > 0 and kind != "weights")
            assert 0 <= more <= (2 * dp * here["groups"] * each if padded else 0), (
                kind,
                here[kind],
                getattr(plan, kind),
            )
