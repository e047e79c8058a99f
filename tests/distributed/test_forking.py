"""Requests that share prefixes on two processes, in every kind of layout: the answers of one process."""

import pytest
import torch

from megamem.evaluation.evaluator import Evaluator
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.parallel.topology import Topology
from megamem.pipeline import reader
from tests.distributed.harness import run_distributed
from tests.distributed.test_evaluation import LAYOUTS, TOLERANCE, built, memory_model, run_config
from tests.unit.evaluation_helpers import CHUNK, make_stage

pytestmark = pytest.mark.distributed


def asked(stage, topology):
    """Scores and continuations, more of them for one prefix than a batch holds, and a rank without any in the last."""
    evaluator = Evaluator(stage, topology, rows=3)
    prefixes = [list(range(1, 2 * CHUNK)), [7, 9], [5] * (CHUNK + 3)]
    requests = [prefix + [(3 * i + j) % 32 for j in range(1 + i)] for prefix in prefixes for i in range(5)]
    scores = evaluator.score(requests, [1 + i % 5 for i in range(len(requests))])
    limits = [1 + i % 7 for i in range(len(requests))]
    return scores, evaluator.continue_greedily(requests, limits, stop=lambda i, new: i == 4 and len(new) == 2)


def all_layouts(payload):
    results = {}
    for name, tp, pp in (("dp", 1, 1), ("tp", 2, 1), ("tp, tokens split", 2, 1), ("pp", 1, 2)):
        topology = Topology.start(tp=tp, pp=pp, device="cpu")
        results[name] = asked(built(topology, "split" in name), topology)
        if name == "dp":
            results["zero 3"] = under_zero_3(topology)
            reader.TOKENS_AHEAD = AHEAD
            results["memory model"] = under_zero_3(topology, memory_model(), asked_of_long_prefixes)
    return results


def under_zero_3(topology, model=None, ask=asked):
    """Answers, and the calls of the model that this rank made."""
    from megamem.pipeline.engine import build_engine

    engine = build_engine(run_config(topology.dp_size, model), topology)
    calls = []
    engine.stage.register_forward_pre_hook(lambda *_: calls.append(1))
    return ask(engine.stage, topology), len(calls)


AHEAD = 3 * CHUNK
"""Tokens that an encoder reads at once: three chunks of one row, one chunk of three."""


def asked_of_long_prefixes(stage, topology):
    """Scores in one batch, of which the first rank has one prefix and the second three."""
    evaluator = Evaluator(stage, topology, rows=3)
    texts = [[(3 * i + seed) % 29 for i in range(5 * CHUNK)] for seed in (0, 7, 11)]
    requests = [*([*texts[0], i, i + 1] for i in range(4)), [*texts[1], 1, 2], [*texts[2], 1, 2]]
    return evaluator.score(requests, [1] * len(requests)), []


@pytest.fixture(scope="module")
def world():
    return run_distributed(2, "tests.distributed.test_forking:all_layouts")


@pytest.fixture(scope="module")
def alone():
    return asked(make_stage("elastic_memory", torch.float32), None)


def assert_same(found, expected):
    for (nats, likeliest), (expected_nats, expected_flag) in zip(found[0], expected[0], strict=True):
        assert nats == pytest.approx(expected_nats, rel=TOLERANCE, abs=TOLERANCE)
        assert likeliest == expected_flag
    assert found[1] == expected[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_answer_as_one(world, alone, layout):
    """Tensor parallelism, a pipeline, and data-parallel ranks that share the requests."""
    assert world[0][layout] == world[1][layout]
    assert_same(world[0][layout], alone)


def test_zero_3_ranks_share_requests_in_the_same_calls(world, alone):
    (first, calls), (second, other_calls) = (rank["zero 3"] for rank in world)
    assert calls == other_calls > 0
    assert first == second
    assert_same(first, alone)


def test_encoders_of_zero_3_ranks_read_as_many_chunks_at_once(world):
    """Whatever rows each rank has: every call gathers the encoder's parameters from all of them."""
    stage = build_stage(memory_model(), PlainLinears())
    initialize_parameters(stage, 1)
    (first, calls), (second, other_calls) = (rank["memory model"] for rank in world)
    assert calls == other_calls > 0
    assert first == second
    assert_same(first, asked_of_long_prefixes(stage, None))
