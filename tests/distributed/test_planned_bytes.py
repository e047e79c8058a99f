"""Bytes that DeepSpeed's engines hold on real ranks, against what is planned for them."""

import pytest
import torch.distributed as dist

from megamem.parallel.topology import Topology
from megamem.pipeline.engine import build_engine
from megamem.planning.measured import held_by
from megamem.planning.ranks import rank_bytes
from tests.distributed.harness import PARALLEL, run_distributed
from tests.distributed.training_cases import MUP, local_batches, run_config

pytestmark = pytest.mark.distributed
TIED = {"tie_embeddings": True}
CASES = {
    # (pp, tp, zero), precision, changes of the model
    "plain": ((1, 2, 0), "fp32", {}),
    "pipeline": ((2, 2, 0), "fp32", TIED),
    "zero1": ((1, 2, 1), "fp32", {}),
    "zero1-pipeline": ((2, 1, 1), "fp32", TIED),
    "zero1-bf16": ((1, 2, 1), "bf16", {}),
    "zero1-bf16-pipeline": ((2, 1, 1), "bf16", MUP),
    "zero2": ((1, 2, 2), "fp32", {}),
    "zero2-bf16": ((1, 1, 2), "bf16", {}),
    "zero3": ((1, 2, 3), "fp32", {}),
    "zero3-bf16": ((1, 1, 3), "bf16", {}),
}


def config_of(name):
    (pp, tp, zero), precision, model = CASES[name]
    parallel = {"pp": pp, "tp": tp, "zero_stage": zero}
    return run_config(training={"precision": precision}, parallel=parallel, model=model)


def held(names):
    """On each rank: (stage, bytes of each kind) by case."""
    found = {}
    for name in names:
        config = config_of(name)
        topology = Topology.start(config.parallel.tp, pp=config.parallel.pp, device="cpu", timeout_s=45)
        engine = build_engine(config, topology)
        engine.step(local_batches(config, topology, 0), 1e-3)
        engine.backward(local_batches(config, topology, 1))
        found[name] = {"stage": topology.pp_rank, "groups": len(engine.optimizer.param_groups), **held_by(engine)}
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(4, "tests.distributed.test_planned_bytes:held", list(CASES), preload=PARALLEL)


@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_what_was_planned(ranks, name):
    """To the byte, but for ZeRO's padding of each group of parameters to a multiple of 2 DP (ZeRO 3: of each tensor)."""
    config = config_of(name)
    (pp, tp, zero), precision, _ = CASES[name]
    dp = 4 // pp // tp
    planned = rank_bytes(config, tp, pp, dp)
    for rank in ranks:
        here = rank[name]
        plan = planned[here["stage"]]
        tensors = 200 if zero == 3 else here["groups"]
        for kind, each in {"weights": 4 if precision == "fp32" else 2, "gradients": 4, "optimizer": 12}.items():
            more = here[kind] - getattr(plan, kind)
            padded = zero == 3 or (zero > 0 and kind != "weights")
            assert 0 <= more <= (2 * dp * tensors * each if padded else 0), (kind, here[kind], getattr(plan, kind))
