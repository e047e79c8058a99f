"""Layers' own losses in a training step: with and without a pipeline they weigh what one graph over the text says."""

import numpy as np
import pytest
import torch

from megamem.config.model import ModelConfig
from megamem.data.batch import IGNORED, Batch
from megamem.memory.base import detach
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.executor import StageExecutor
from megamem.pipeline.schedule import stage_order
from megamem.pipeline.train_chunk import MicroBatch, chunk_places
from megamem.pipeline.window import Window
from tests.unit.evaluation_helpers import CHUNK, CPU, VOCABULARY
from tests.unit.test_executor import ALONE, Borders

CHUNKS, ROWS, WINDOW = 4, 2, 2
SCALE, FACTOR = 0.01, 0.7
"""Factors of a step's losses and of one reading's."""
MIXERS = {
    "reconstruction": {"kind": "compressive_transformer", "compressed_length": 5, "reconstruction_weight": 0.5},
    "attention_divergence": {
        "kind": "infinity_former", "basis": 6, "widths": [0.1, 0.2], "samples": 5, "kl_weight": 0.1,
    },
}  # fmt: skip
"""Mechanisms by the loss that they add."""
TOLERANCE = 1e-12
"""float64: what is left is the order of sums."""


@pytest.fixture(params=MIXERS)
def name(request):
    return request.param


def stage_with(name):
    """A model of two such layers, large weights."""
    model = ModelConfig.model_validate(
        {
            "layers": 2, "hidden_size": 16, "heads": 4, "ffn_size": 32, "vocab_size": VOCABULARY, "chunk_size": CHUNK,
            "init_std": 0.3, "mixer": MIXERS[name],
        }
    )  # fmt: skip
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, 1)
    return stage.to(torch.float64)


def text():
    """A micro-batch in which most tokens have no label: auxiliary losses are means over tokens all the same."""
    tokens = torch.randint(VOCABULARY, (CHUNKS * CHUNK + 1, ROWS), generator=torch.Generator().manual_seed(3))
    labels = tokens[1:].clone()
    labels[: 3 * CHUNK] = IGNORED
    starts = np.arange(0, CHUNKS * CHUNK, CHUNK)[:, None].repeat(ROWS, 1)
    return Batch(tokens[:-1], labels, starts, tuple(range(ROWS)))


def gradients(stage):
    return {key: parameter.grad.clone() for key, parameter in stage.named_parameters() if parameter.grad is not None}


@pytest.fixture
def expected(name):
    """Sums of losses and gradients by one graph over each window: a term is a mean over its chunk's tokens and rows,
    so it counts as often as there are."""
    stage, batch = stage_with(name), text()
    states, total, sums = stage.initial_states(ROWS, CPU, torch.float64), 0.0, [0.0, 0.0]
    for c, chunk in enumerate(chunk_places(batch)):
        states = detach(states) if c % WINDOW == 0 else states
        part = slice(c * CHUNK, (c + 1) * CHUNK)
        hidden, states, auxiliary = stage(batch.tokens[part], states, chunk)
        parts = stage.token_losses(hidden, batch.labels[part]).sum(), auxiliary[name] * CHUNK * ROWS
        total = total + sum(parts)
        sums = [before + own.item() for before, own in zip(sums, parts, strict=True)]
    (FACTOR * SCALE * total).backward()
    assert sums[1] > 0.01, "a term that is next to nothing would hide its weight"
    return sums, gradients(stage)


def assert_same(found, expected):
    sums, grads = found
    assert sums == pytest.approx(expected[0], rel=TOLERANCE)
    assert grads.keys() == expected[1].keys()
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][key], rtol=0, atol=TOLERANCE, msg=key)


def test_in_windows(name, expected):
    stage, batch = stage_with(name), text()
    window, states, sums = Window(stage, NextToken(stage.config)), stage.initial_states(ROWS, CPU, torch.float64), 0.0
    places = chunk_places(batch)
    for first in range(0, CHUNKS, WINDOW):
        part = slice(first * CHUNK, (first + WINDOW) * CHUNK)
        loss, losses, states = window(
            batch.tokens[part], batch.labels[part], places[first : first + WINDOW], states,
            torch.tensor(FACTOR * SCALE, dtype=torch.float64),
        )  # fmt: skip
        loss.backward()
        sums = sums + losses
    assert_same((sums.tolist(), gradients(stage)), expected)


def test_in_a_pipeline(name, expected):
    stage, batch = stage_with(name), text()
    executor = StageExecutor(stage, NextToken(stage.config), 0, CHUNK, WINDOW)
    fresh = stage.initial_states(ROWS, CPU, torch.float64)
    sums, _ = executor.run(
        [MicroBatch(batch, chunk_places(batch), factor=FACTOR)],
        lambda _: fresh,
        torch.tensor(SCALE, dtype=torch.float64),
        Borders(ALONE, [*stage_order(0, 1, 1, CHUNKS, WINDOW)], [], [], torch.float64),
    )
    assert_same(([value / FACTOR for value in sums.tolist()], gradients(stage)), expected)
