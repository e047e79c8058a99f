"""A teacher's predictions learned under ZeRO 1 to 3 and in either window order: gradients of one naive process."""

import pytest
import torch
import torch.nn.functional as F

from checkpoints.weights import WeightsHeader, write_weights
from megamem.memory.base import LABEL_IGNORED, detach
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.distillation import teacher_model
from megamem.pipeline.train_chunk import chunk_places
from tests.distributed.harness import run_distributed
from tests.distributed.parity import assert_gradients_are
from tests.distributed.training_cases import CHUNK, LENGTH, ROWS, VOCABULARY, run_config, step_batch

pytestmark = pytest.mark.distributed

WEIGHT, BPTT = 0.7, 2
MEMORY = {"kind": "added_memory", "memory": {"kind": "elastic_memory", "order": 8, "samples": 8}}
MODEL = {"layers": 2, "memory": [], "mixer": MEMORY, "padded_vocab_size": VOCABULARY + 8, "init_std": 0.1}
LAYOUTS = {
    "zero1": ({"zero_stage": 1}, {"micro_batch_size": 4}),
    "zero2-layers": ({"zero_stage": 2}, {"micro_batch_size": 2, "window_order": "layers"}),
    "zero3": ({"zero_stage": 3}, {"micro_batch_size": 1}),
}


def built(model, seed):
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, seed)
    return stage


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The file of a teacher's weights."""
    plain = run_config(model=MODEL)
    distill = run_config(model=MODEL, training={"distill": {"teacher": "x"}}).training.distill
    model = teacher_model(distill.mixer, plain.model)
    path = tmp_path_factory.mktemp("teacher") / "weights.safetensors"
    weights = {name: value.detach() for name, value in built(model, 7).named_parameters()}
    write_weights(weights, path, WeightsHeader.of_model(model, None))
    return path, model


@pytest.fixture(scope="module")
def world(teacher):
    cases = {
        name: {
            "config": {
                "model": MODEL,
                "parallel": parallel,
                "training": {
                    "bptt_chunks": BPTT, "distill": {"teacher": str(teacher[0]), "weight": WEIGHT}, **training
                },
            },
            "steps": 2,
            "lr": 1e-3,
        }
        for name, (parallel, training) in LAYOUTS.items()
    }  # fmt: skip
    return run_distributed(2, "tests.distributed.training_cases:train_cases", cases)


@pytest.fixture(scope="module")
def expected(teacher):
    """Gradients of the first step: whole logits of both models, one graph per window."""
    config = run_config(model=MODEL)
    student, known, batch = built(config.model, config.training.seed), built(teacher[1], 7), step_batch(0, "pack")
    places, predicted = chunk_places(batch, None), (batch.labels != LABEL_IGNORED).sum()
    states, theirs = (model.initial_states(ROWS, torch.device("cpu"), torch.float32) for model in (student, known))
    for c in range(LENGTH // CHUNK):
        part = slice(c * CHUNK, (c + 1) * CHUNK)
        if c % BPTT == 0:
            states, total = detach(states), torch.zeros(())
        labels = batch.labels[part]
        hidden, states, _ = student(batch.tokens[part], states, places[c])
        with torch.no_grad():
            taught, theirs, _ = known(batch.tokens[part], theirs, places[c])
            wanted = known.logits(taught)[..., :VOCABULARY].softmax(-1)
        logits = student.logits(hidden)[..., :VOCABULARY]
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        divergence = (wanted * (wanted.log() - logits.log_softmax(-1))).sum(-1)
        total = total + WEIGHT * divergence[labels != LABEL_IGNORED].sum()
        if c % BPTT == BPTT - 1:
            (total / predicted).backward()
    return {name: parameter.grad for name, parameter in student.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_process(world, expected, layout):
    assert_gradients_are(expected, world[0][layout])


def test_layouts_go_on_alike(world):
    """Losses of two steps; the divergence is none of them, so that they compare with runs without a teacher."""
    first, *others = (world[0][layout]["losses"] for layout in LAYOUTS)
    for losses in others:
        assert losses == pytest.approx(first, abs=1e-5)
