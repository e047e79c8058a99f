"""Pipelines of real processes under DeepSpeed: gradients, losses and weights against one process without it."""

import pytest

from megamem.pipeline.schedule import peak_units
from tests.distributed.harness import run_distributed
from tests.distributed.parity import ANYWHERE, assert_gradients, assert_losses_and_weights, case
from tests.distributed.training_cases import (
    AUTOENCODE,
    AUTOENCODER,
    CHUNK,
    COMBINED,
    DROPOUT,
    EVERY,
    GPT2,
    LAMEMO,
    LENGTH,
    MEMORY_MODEL,
    MUP,
    RECURRENT,
    ROWS,
    SHARED_BIASES,
    SIDE_ROWS,
    TIED_ADAPTIVE,
)

pytestmark = pytest.mark.distributed

LAYOUTS = {2: [(2, 1, 1)], 4: [(2, 2, 1), (2, 1, 2), (4, 1, 1)]}
"""World size -> (PP, TP, DP)."""


def staged(pp, tp, dp, bptt, accumulation, zero, **more):
    parallel = {"pp": pp, **more.pop("parallel", {})}
    return case(tp, zero, bptt, ROWS // dp // accumulation, parallel=parallel, **more)


QUICK = {2: [(1, 4), (4, 2)], 4: [(2, 2), (4, 1)]}
"""World size -> (window, micro-batches) of every run of the tests; the other pairs are slow tests."""


def grid(world, quick=True):
    """Windows of 1, 2 and all 4 chunks, 1, 2 and 4 micro-batches; ZeRO 0 and 1 in turn."""
    cells = [(layout, b, a) for layout in LAYOUTS[world] for b in (1, 2, 4) for a in (1, 2, 4)]
    return {
        f"pp{pp}-tp{tp}-dp{dp}-bptt{b}-micro-batches{a}-zero{i % 2}": staged(pp, tp, dp, b, a, i % 2)
        for i, ((pp, tp, dp), b, a) in enumerate(cells)
        if not quick or (b, a) in QUICK[world]
    }


WORLDS = {
    2: {
        **grid(2),
        "tied-zero1": staged(2, 1, 1, 4, 2, 1, model={"tie_embeddings": True}),
        "adaptive-tied": staged(2, 1, 1, 2, 2, 1, model=TIED_ADAPTIVE),
        "shared-biases": staged(2, 1, 1, 2, 2, 1, model=SHARED_BIASES),
        "gpt2": staged(2, 1, 1, 2, 2, 1, model=GPT2),
        "mup": staged(2, 1, 1, 2, 2, 1, model=MUP),
        "every-mechanism": staged(2, 1, 1, 2, 2, 0, model=EVERY),
        "documents-anywhere": staged(2, 1, 1, 2, 2, 1, model=EVERY, data=ANYWHERE),
        "recurrent-memory": staged(2, 1, 1, 4, 2, 1, model=RECURRENT),
        "lamemo": staged(2, 1, 1, 2, 2, 1, model=LAMEMO),
        "memory-model": staged(2, 1, 1, 4, 2, 1, model=MEMORY_MODEL),
        "autoencoder": staged(2, 1, 1, 4, 2, 1, model=AUTOENCODER, **AUTOENCODE),
        "dropout": staged(2, 1, 1, 2, 4, 1, model=DROPOUT),
        "recompute": staged(2, 1, 1, 2, 2, 1, training={"recompute": True}),
        "placed-by-hand": staged(2, 1, 1, 4, 2, 1, parallel={"placement": [3, 1]}),
        "placed-by-measurement": staged(2, 1, 1, 4, 2, 0, parallel={"placement": "measured"}),
    },
    4: {
        **grid(4),
        "sequence-parallel": staged(2, 2, 1, 4, 2, 1, parallel={"sequence_parallel": True}),
        "adaptive-tied-tp2-recurrent-memory": staged(
            2, 2, 1, 2, 2, 0, model={**TIED_ADAPTIVE, **RECURRENT}, parallel={"sequence_parallel": True}
        ),
        # the first of four stages has no u and v
        "shared-biases-pp4": staged(4, 1, 1, 2, 2, 0, model=SHARED_BIASES),
        "recurrent-memory-tp2": staged(2, 2, 1, 2, 4, 0, model=RECURRENT),
        # rows cross three borders; and lie with the tokens on both tensor-parallel ranks
        "lamemo-pp4": staged(4, 1, 1, 4, 2, 0, model=LAMEMO),
        "memory-model-pp4": staged(4, 1, 1, 2, 2, 0, model=MEMORY_MODEL),
        "combined-recurrent-memory": staged(2, 1, 2, 4, 1, 0, model=RECURRENT, **COMBINED),
        "memory-model-tp2-split": staged(2, 2, 1, 4, 2, 1, model=MEMORY_MODEL, parallel={"sequence_parallel": True}),
        # the encoder's last layer ends a stage, or has a stage for itself
        "autoencoder-pp4": staged(4, 1, 1, 2, 2, 0, model=AUTOENCODER, **AUTOENCODE),
        "side-rows-tp2-split": staged(2, 2, 1, 2, 4, 0, model=SIDE_ROWS, parallel={"sequence_parallel": True}),
        "recurrent-memory-too-few-micro-batches": staged(4, 1, 1, 4, 2, 1, model=RECURRENT),
    },
}
NAMES = [(world, name) for world, cases in WORLDS.items() for name in cases]
REST = {
    2: {
        "copy-memory-model": staged(
            2, 1, 1, 4, 2, 1, model=MEMORY_MODEL, training={"objective": "copy"}, data={"documents": "drop"}
        ),
        "dropout-recurrent-memory": staged(2, 1, 1, 4, 2, 1, model={**RECURRENT, "dropout": 0.2}),
        "combined-memory-model": staged(2, 1, 1, 4, 2, 1, model=MEMORY_MODEL, **COMBINED),
        "recompute-mixer": staged(2, 1, 1, 2, 2, 1, model=EVERY, training={"recompute": "mixer"}),
        "side-rows": staged(2, 1, 1, 4, 2, 1, model=SIDE_ROWS),
        "tied-zero0": staged(2, 1, 1, 2, 2, 0, model={"tie_embeddings": True}),
    },
    4: {
        "shared-biases-tp2": staged(2, 2, 1, 4, 2, 1, model=SHARED_BIASES),
        # each micro-batch is read twice, by rows that have numbers of their own
        "combined-dropout-dp2": staged(2, 1, 2, 2, 2, 1, model=DROPOUT, **COMBINED),
        "lamemo-tp2-split": staged(2, 2, 1, 1, 4, 1, model=LAMEMO, parallel={"sequence_parallel": True}),
        "autoencoder-tp2-split": staged(
            2,
            2,
            1,
            4,
            2,
            1,
            model=AUTOENCODER,
            parallel={"sequence_parallel": True, "placement": [1, 3]},
            **AUTOENCODE,
        ),
        "tied-dp2": staged(2, 1, 2, 2, 2, 1, model={"tie_embeddings": True}),
    },
}
"""Between those above; slow tests, as the rest of the grid."""
for size, cases in REST.items():
    cases |= {name: case for name, case in grid(size, quick=False).items() if name not in WORLDS[size]}


@pytest.fixture(scope="module")
def worlds():
    """Per world and case, what all ranks found, parameters of all stages in one."""
    return {size: run_cases(size, cases) for size, cases in WORLDS.items()}


def run_cases(size, cases):
    ranks = run_distributed(size, "tests.distributed.training_cases:train_cases", cases)
    return {name: merged([rank[name] for rank in ranks]) for name in cases}


@pytest.mark.slow
@pytest.mark.parametrize("size", REST)
def test_the_rest_of_the_grid(size):
    for name, found in run_cases(size, REST[size]).items():
        assert_gradients(REST[size][name], found)
        assert_losses_and_weights(REST[size][name], found)


def merged(ranks):
    whole = {**ranks[0], "peaks": [rank["peak_units"] for rank in ranks]}
    for part in ("gradients", "weights"):
        whole[part] = {name: value for rank in ranks if part in rank for name, value in rank[part].items()}
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks), "the loss is the same on all ranks"
    assert all(rank["grad_norm"] == ranks[0]["grad_norm"] for rank in ranks), "the norm is the same on all ranks"
    return whole


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_every_gradient_agrees(worlds, world, name):
    assert_gradients(WORLDS[world][name], worlds[world][name])


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_losses_and_weights_agree(worlds, world, name):
    assert_losses_and_weights(WORLDS[world][name], worlds[world][name])


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_live_units_are_those_of_the_formula(worlds, world, name):
    config, stages = WORLDS[world][name]["config"], WORLDS[world][name]["config"]["parallel"]["pp"]
    per_stage = world // stages
    sequences = ROWS // config["training"]["micro_batch_size"] // (per_stage // config["parallel"]["tp"])
    sequences *= 2 if "combined" in name else 1
    for rank, peak in enumerate(worlds[world][name]["peaks"]):
        sizes = sequences, LENGTH // CHUNK, config["training"]["bptt_chunks"]
        # a memory that goes from the last stage to the first
        kind = config.get("model", {}).get("architecture", {}).get("kind")
        assert peak == peak_units(rank // per_stage, stages, *sizes, interleaved=kind == "recurrent_memory")
