"""The same model and data under every layout: gradients, losses and weights against one process without DeepSpeed."""

import pytest

from tests.contract.case import PROJECTION_NORM
from tests.distributed.harness import run_distributed
from tests.distributed.parity import ANYWHERE, SOME, STEPS, assert_gradients, assert_losses_and_weights, case
from tests.distributed.training_cases import (
    ADAPTIVE,
    COMBINED,
    DLA,
    DROPOUT,
    EVERY,
    GPT2,
    LAMEMO,
    MEMORY_MODEL,
    MUP,
    RECURRENT,
    SHARED_BIASES,
    SIDE_ROWS,
    layers_of,
)

pytestmark = pytest.mark.distributed

PROJECTED = ["local_attention", "melodi", "compressive_transformer", "infinity_former"]
"""Mixers that make queries and keys of other rows than the call's tokens, of which sequence parallelism has a share."""

BY_LAYER = {"window_order": "layers"}
"""Compared, as all layouts are, with a process that reads chunk by chunk."""

# world size -> name -> case; windows of 1, 2 and all 4 chunks, 1 to 4 micro-batches, every ZeRO stage. Three layouts
# take all steps: one process, weights split in both ways, weights gathered; those between them do so in `REST`
WORLDS = {
    1: {
        "tp1-zero0": case(1, 0, micro=8, steps=STEPS),
    },
    2: {
        "tp2-zero0": case(2, 0, micro=8, steps=SOME),
        "tp2-sequence-parallel": case(2, 1, bptt=2, micro=4, parallel={"sequence_parallel": True}),
        "tp2-documents-anywhere": case(
            2, 1, bptt=2, micro=8, model=EVERY, parallel={"sequence_parallel": True}, data=ANYWHERE
        ),
        "dp2-zero2-documents-anywhere": case(1, 2, micro=4, steps=SOME, data=ANYWHERE),
        "tp2-mup-tied": case(2, 1, micro=8, model={**MUP, "tie_embeddings": True, "qk_norm": True}),
        # squares of all heads are summed over ranks
        "tp2-projection-norm": case(
            2, 1, micro=8, model={**PROJECTION_NORM, **layers_of(PROJECTED)}, parallel={"sequence_parallel": True}
        ),
        "dp2-zero3-dropout": case(1, 3, micro=1, model=DROPOUT),
        "tp2-adaptive-sequence-parallel": case(
            2, 1, micro=8, model=ADAPTIVE, parallel={"sequence_parallel": True}, training={"recompute": True}
        ),
        # a rank reads one row at a time, so that some of its chunks have no word of a cluster
        "dp2-zero3-adaptive": case(1, 3, micro=1, model=ADAPTIVE),
        "tp2-layer-by-layer": case(
            2, 1, bptt=2, micro=8, model=EVERY, parallel={"sequence_parallel": True}, training=BY_LAYER
        ),
        "dp2-zero3-layer-by-layer": case(1, 3, micro=1, training=BY_LAYER),
        "dp2-zero1": case(1, 1, micro=4, steps=SOME),
        "dp2-zero2": case(1, 2, micro=4, steps=SOME),
        "dp2-zero3": case(1, 3, micro=4, steps=STEPS),
        # the document that begins inside row 2 is all that its rank reads then
        "dp2-zero3-one-row": case(1, 3, micro=1, model=EVERY),
        # how many levels there are to read depends on where each rank's documents have got to
        "dp2-zero3-log-linear": case(
            1,
            3,
            micro=1,
            model={"memory": [], "layers": 2, "mixer": {"kind": "log_linear", "memory": DLA, "segment": 2}},
        ),
        "dp2-zero3-memory-model": case(1, 3, bptt=2, micro=1, model=MEMORY_MODEL),
        "tp2-zero1-memory-model": case(2, 1, bptt=4, micro=4, model=MEMORY_MODEL, parallel={"sequence_parallel": True}),
        "tp2-zero2-recurrent-memory": case(
            2, 2, bptt=2, micro=4, model=RECURRENT, parallel={"sequence_parallel": True}
        ),
    },
    4: {
        "tp2-dp2-zero1": case(2, 1, micro=4, steps=STEPS),
        "tp2-dp2-zero3": case(2, 3, bptt=1, micro=4),
    },
}
REST = {
    1: {
        "tp1-zero1-bptt2": case(1, 1, bptt=2, micro=2),
        "tp1-zero3-bptt1": case(1, 3, bptt=1, micro=4),
    },
    2: {
        "tp2-zero0-all-steps": case(2, 0, micro=8, steps=STEPS),
        "dp2-zero1-all-steps": case(1, 1, micro=4, steps=STEPS),
        "dp2-zero2-all-steps": case(1, 2, micro=4, steps=STEPS),
        "tp2-recompute": case(2, 2, bptt=2, micro=4, training={"recompute": True}),
        "tp2-gpt2-sequence-parallel": case(
            2, 1, micro=8, model={**GPT2, "qk_norm": True}, parallel={"sequence_parallel": True}
        ),
        "tp2-dropout-recompute": case(
            2, 1, bptt=2, micro=4, model=DROPOUT, parallel={"sequence_parallel": True}, training={"recompute": True}
        ),
        # a memory of the whole model, which the document that begins inside row 2 leaves behind
        "dp2-zero3-recurrent-memory": case(1, 3, micro=1, model=RECURRENT),
        "dp2-zero2-combined-memory-model": case(1, 2, bptt=2, micro=2, model=MEMORY_MODEL, **COMBINED),
        "tp2-combined-dropout": case(2, 1, micro=4, model=DROPOUT, **COMBINED),
        "tp2-zero1-bptt1": case(2, 1, bptt=1, micro=2),
        "tp2-every-mechanism": case(2, 1, bptt=2, micro=8, model=EVERY, parallel={"sequence_parallel": True}),
        "dp2-zero3-recompute": case(1, 3, micro=4, training={"recompute": True}, data={"documents": "drop"}),
        "tp2-recompute-mixer": case(
            2, 1, bptt=2, micro=8, model=EVERY, parallel={"sequence_parallel": True}, training={"recompute": "mixer"}
        ),
        "dp2-zero3-recompute-mixer": case(1, 3, micro=4, training={"recompute": "mixer"}, data={"documents": "drop"}),
        "tp2-recompute-mlp": case(2, 1, bptt=2, micro=4, model=DROPOUT, training={"recompute": "mlp"}),
        "dp2-zero3-shared-biases": case(1, 3, micro=4, model=SHARED_BIASES),
        "dp2-zero3-side-rows": case(1, 3, micro=1, model=SIDE_ROWS),
        "dp2-zero3-lamemo": case(1, 3, micro=1, model=LAMEMO),
        "tp2-tied": case(2, 2, bptt=2, micro=2, model={"tie_embeddings": True}),
        "tp2-gpt2": case(2, 1, bptt=2, micro=4, model=GPT2),
        "dp2-zero0": case(1, 0, bptt=2, micro=2),
    },
    4: {
        "tp2-dp2-zero3-mup": case(2, 3, micro=4, model=MUP),
        "tp2-dp2-zero0": case(2, 0, bptt=2, micro=4),
        "tp2-dp2-zero2": case(2, 2, micro=2),
        "tp2-dp2-zero3-sequence-parallel": case(2, 3, bptt=2, parallel={"sequence_parallel": True}),
        "tp2-dp2-zero3-every-mechanism": case(2, 3, micro=4, model=EVERY),
    },
}
"""Layouts between those above; slow tests."""
NAMES = [(world, name) for world, cases in WORLDS.items() for name in cases]


def run_cases(world, cases):
    function = "tests.distributed.training_cases:train_cases"
    return run_distributed(world, function, cases)[0]


@pytest.fixture(scope="module")
def worlds():
    return {world: run_cases(world, cases) for world, cases in WORLDS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world", REST)
def test_the_rest_of_the_layouts(world):
    found = run_cases(world, REST[world])
    for name, layout in REST[world].items():
        assert_gradients(layout, found[name])
        assert_losses_and_weights(layout, found[name])


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_every_gradient_agrees(worlds, world, name):
    assert_gradients(WORLDS[world][name], worlds[world][name])


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_losses_and_weights_agree(worlds, world, name):
    assert_losses_and_weights(WORLDS[world][name], worlds[world][name])
