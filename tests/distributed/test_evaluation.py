"""Evaluation and generation on two processes, in every kind of layout, give the figures and texts of one."""

import json

import numpy as np
import pytest
import torch

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.data.batch import Batch
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.run import final_evaluation
from megamem.evaluation.sampling import Sampling
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.parallel.megatron import MegatronLinears
from megamem.parallel.topology import Topology
from tests.distributed.harness import run_distributed
from tests.distributed.training_cases import EVERY, MEMORY_MODEL, MODEL
from tests.unit.evaluation_helpers import CHUNK, documents, make_stage, model_config

pytestmark = pytest.mark.distributed

LAYOUTS = ["dp", "tp", "tp, tokens split", "pp"]
LENGTHS = (5, 50, 19, 32, 8, 1, 27)
BOUND = 96
"""Cuts the long documents."""
TOLERANCE = 1e-5
"""float32 losses around 4 whose sums differ in order: some 1e-7 each."""


def figures(stage, topology):
    """All reports as nested plain data."""
    texts = documents(*LENGTHS)
    evaluator = Evaluator(stage, topology, rows=2)
    return {
        "losses": evaluator.losses(texts).to_dict(),
        "bounded": evaluator.losses(texts, max_tokens=BOUND).to_dict(),
        "sliding": evaluator.sliding_losses(texts, stride=4).to_dict(),
        "memory": evaluator.memory_use(texts).to_dict(),
    }


def run_config(dp, model=None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "evaluation",
            "model": (model or model_config("elastic_memory")).model_dump(),
            "data": {"sources": ["none"], "sequence_length": 4 * CHUNK},
            "training": {"steps": 2, "batch_tokens": 4 * CHUNK * dp, "precision": "fp32", "seed": 1},
            "parallel": {"zero_stage": 3, "device": "cpu"},
            "evaluation": {"rows": 2},
        }
    )


PROMPTS = [[3], [5, 9, 2, 7], list(range(2 * CHUNK + 3))]


def continued(stage, topology):
    """Greedy and sampled continuations, across chunk borders, with an early end."""
    evaluator = Evaluator(stage, topology)
    return [
        evaluator.generate(PROMPTS, CHUNK + 2),
        evaluator.generate(PROMPTS, CHUNK + 2, sampling=Sampling(0.7, seed=3)),
        evaluator.generate(PROMPTS[:1], CHUNK + 2, end_token=evaluator.generate(PROMPTS[:1], 3)[0][-1]),
    ]


def built(topology, split_tokens=False):
    layers = range(topology.pp_rank, topology.pp_rank + 1) if topology.pp_size == 2 else None
    stage = build_stage(model_config("elastic_memory"), MegatronLinears(topology.tp_group, split_tokens), layers)
    initialize_parameters(stage, 1, topology.tp_size, topology.tp_rank)
    return stage


def training_batch(rank):
    text = torch.randint(32, (4 * CHUNK + 1, 1), generator=torch.Generator().manual_seed(100 + rank))
    starts = np.arange(4)[:, None] * CHUNK
    return Batch(text[:-1].contiguous(), text[1:].contiguous(), starts, (rank,))


def under_zero_3(topology):
    """Figures before training, calls of the model, and the loss of two training steps with an evaluation between."""
    from megamem.pipeline.engine import build_engine

    config = run_config(topology.dp_size)
    engine = build_engine(config, topology)
    calls = []
    engine.stage.register_forward_pre_hook(lambda *_: calls.append(engine.stage.training))
    before = figures(engine.stage, topology)
    made = len(calls)
    evaluator = Evaluator(engine.stage, topology, rows=2)
    uneven = evaluator.losses(documents(50)).loss
    losses = []
    for _ in range(2):
        losses.append(float(engine.step([training_batch(topology.dp_rank)], 1e-2).loss_sum))
        final = final_evaluation(evaluator, lambda: iter(documents(*LENGTHS)), None, config)
        losses.append(final.losses.loss)
    return {
        "figures": json.dumps(before),
        "calls": made,
        "uneven": uneven,
        "losses": losses,
        "modes": calls[:made],
    }


def every_mechanism():
    """A model with a layer of each registered mechanism."""
    return ModelConfig.model_validate({**MODEL, **EVERY, "chunk_size": CHUNK, "init_std": 0.3})


def memory_model():
    """An encoder that reads many chunks side by side."""
    return ModelConfig.model_validate({**MODEL, **MEMORY_MODEL, "chunk_size": CHUNK, "init_std": 0.3})


def growing_memory_model():
    """The same with as many memories as chunks were read: rows at different chunks cannot be read in one call."""
    architecture = {**MEMORY_MODEL["architecture"], "positions": "variable", "slots": 8}
    changes = {**MEMORY_MODEL, "architecture": architecture}
    return ModelConfig.model_validate({**MODEL, **changes, "chunk_size": CHUNK, "init_std": 0.3})


def losses_in_a_pipeline(topology, model):
    """Losses of two stages with as many layers each."""
    own = range(topology.pp_rank * model.layers // 2, (topology.pp_rank + 1) * model.layers // 2)
    stage = build_stage(model, PlainLinears(), own)
    initialize_parameters(stage, 1)
    return json.dumps(losses_of(stage, topology))


def losses_under_zero_3(topology, model):
    """Losses before training: the stage is read past DeepSpeed's engine, which gathers no parameters of mixers then."""
    from megamem.pipeline.engine import build_engine

    engine = build_engine(run_config(topology.dp_size, model), topology)
    return json.dumps(losses_of(engine.stage, topology))


def losses_of(stage, topology):
    return Evaluator(stage, topology, rows=2).losses(documents(*LENGTHS)).to_dict()


def all_layouts(payload):
    results = {}
    for name, tp, pp in (("dp", 1, 1), ("tp", 2, 1), ("tp, tokens split", 2, 1), ("pp", 1, 2)):
        topology = Topology.start(tp=tp, pp=pp, device="cpu")
        stage = built(topology, "split" in name)
        results[name] = json.dumps(figures(stage, topology))
        results[f"{name}: texts"] = continued(stage, topology)
        if name == "dp":
            results["zero3"] = under_zero_3(topology)
            results["every mechanism"] = losses_under_zero_3(topology, every_mechanism())
            results["memory model"] = losses_under_zero_3(topology, memory_model())
        if name == "pp":
            results["growing memory model"] = losses_in_a_pipeline(topology, growing_memory_model())
    return results


def flat(value, path=""):
    if isinstance(value, dict):
        return {k: v for key, entry in value.items() for k, v in flat(entry, f"{path}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, entry in enumerate(value) for k, v in flat(entry, f"{path}.{i}").items()}
    return {path: value}


def assert_same(found, expected):
    found, expected = flat(json.loads(found)), flat(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, float):
            # gains are differences of losses, so the bound is that of the losses
            assert found[path] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), path
        else:
            assert found[path] == value, path


@pytest.fixture(scope="module")
def world():
    return run_distributed(2, "tests.distributed.test_evaluation:all_layouts")


@pytest.fixture(scope="module")
def alone():
    return figures(make_stage("elastic_memory", torch.float32), None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_give_the_figures_of_one(world, alone, layout):
    assert world[0][layout] == world[1][layout], "the report is the same on both ranks, to the last bit"
    assert_same(world[0][layout], alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_write_the_texts_of_one(world, layout):
    expected = continued(make_stage("elastic_memory", torch.float32), None)
    assert len(expected[2][0]) <= 3
    for rank in world:
        assert rank[f"{layout}: texts"] == expected


def test_the_bound_does_not_depend_on_the_layout(world, alone):
    assert 0 < alone["bounded"]["tokens"] <= BOUND
    assert json.loads(world[0]["dp"])["bounded"]["tokens"] == alone["bounded"]["tokens"]


def test_zero_3_ranks_make_the_same_calls(world, alone):
    first, second = (rank["zero3"] for rank in world)
    assert first["calls"] == second["calls"] > 0
    assert not any(first["modes"])
    assert_same(first["figures"], alone)
    assert first["figures"] == second["figures"]
    (slow,) = Evaluator(make_stage("elastic_memory"), rows=1).losses(documents(50)).documents
    assert first["uneven"] == second["uneven"] == pytest.approx(slow.loss, rel=TOLERANCE), "one rank had only padding"


@pytest.mark.parametrize(("name", "model"), [("every mechanism", every_mechanism), ("memory model", memory_model)])
def test_every_mechanism_is_evaluated_under_zero_3(world, name, model):
    stage = build_stage(model(), PlainLinears())
    initialize_parameters(stage, 1)
    assert_same(world[0][name], losses_of(stage, None))


def test_rows_at_different_chunks_are_evaluated_in_a_pipeline(world):
    stage = build_stage(growing_memory_model(), PlainLinears())
    initialize_parameters(stage, 1)
    assert world[0]["growing memory model"] == world[1]["growing memory model"]
    assert_same(world[0]["growing memory model"], losses_of(stage, None))


def test_training_goes_on_after_an_evaluation_under_zero_3(world):
    first, second = (rank["zero3"]["losses"] for rank in world)
    assert first[1] == second[1]
    assert first[3] == second[3]
    assert first[2] + second[2] < first[0] + second[0], "the second step on the same batch starts lower"
