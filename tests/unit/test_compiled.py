"""training.compile: same results, and compiled once per shape wherever the chunks lie in their documents."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.model.compiled import compile_pointwise, restore_pointwise
from megamem.model.norm import rms_norm
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import Stage, build_stage
from megamem.ops.rotary import apply_rotary
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.window import Window

CHUNKS, CHUNK, ROWS = 8, 16, 2
MODEL = {
    "layers": 3,
    "hidden_size": 32,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": 64,
    "chunk_size": CHUNK,
    "memory": [
        {"layers": [1], "mixer": {"kind": "elastic_memory", "order": 8}},
        {"layers": [2], "mixer": "full_attention"},
    ],
}


NETWORKS = {
    **MODEL,
    "memory": [],
    "layers": 2,
    "kv_heads": 4,
    # as many inner chunks in a chunk as are computed together
    "mixer": {"kind": "titans", "inner_chunk": 1},
}
"""Titans: convolutions, a norm of heads, and networks with decay and momentum."""


def make(model: dict[str, object] = MODEL) -> Stage:
    stage = build_stage(parse_config(ModelConfig, model, "test"), PlainLinears())
    initialize_parameters(stage, 0)
    return stage


def run(stage: Stage, first: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one window of 8 chunks; `first` is the document position of its first token."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(64, (2, CHUNKS * CHUNK, ROWS), generator=generator)
    places = [Chunk((first + start,) * ROWS) for start in range(0, CHUNKS * CHUNK, CHUNK)]
    states = stage.initial_states(ROWS, torch.device("cpu"), stage.norm.weight.dtype)
    stage.zero_grad()
    loss, _, _ = Window(stage, NextToken(stage.config))(tokens, labels, places, states, torch.tensor(1e-2))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in stage.named_parameters()}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("model", [MODEL, NETWORKS], ids=["attention", "titans"])
def test_compiled_parts_give_the_same_loss_and_gradients(model: dict[str, object]):
    """1e-9: in float64 rounding is all that may differ, some gradients being small sums of large terms."""
    stage = make(model).double()
    loss, grads = run(stage)
    compile_pointwise(stage, backend="aot_eager")
    compiled_loss, compiled_grads = run(stage)
    torch.testing.assert_close(compiled_loss, loss)
    for name, grad in grads.items():
        torch.testing.assert_close(compiled_grads[name], grad, rtol=1e-9, atol=1e-12)


def test_positions_and_layers_compile_nothing_anew():
    stage = make()
    counter = CompileCounterWithBackend("eager")
    compile_pointwise(stage, backend=counter)
    run(stage)
    # norm: hidden with and without a graph behind it; gate: one; rotation: queries and fewer key heads
    after_first = counter.frame_count
    assert 3 <= after_first <= 6
    run(stage, first=100 * CHUNK)
    assert counter.frame_count == after_first


def test_the_plain_functions_come_back():
    stage = make()
    compile_pointwise(stage, backend="eager")
    assert stage.norm.function is not rms_norm
    restore_pointwise(stage)
    assert stage.norm.function is rms_norm
    assert all(block.mixer.apply_rotary is apply_rotary for block in stage.own_layers)
