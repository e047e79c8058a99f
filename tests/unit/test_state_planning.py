"""Bytes of states against sums done by hand."""

import itertools

import pytest
import torch

from megamem.config.model import ModelConfig
from megamem.costs.state_bytes import model_state_bytes, state_bytes
from megamem.errors import LayoutError
from megamem.memory.base import Chunk, Growing, TensorSpec, state_tensors
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

SIZES = {"batch": 3, "heads": 8, "kv_heads": 4, "hidden": 64, "chunk": 16, "open": 5}


def test_kinds_dtypes_and_shards_are_counted():
    specs = {
        "memory": TensorSpec(("batch", 10, "kv_heads"), "float32", shard="kv_heads"),
        "replicated": TensorSpec(("batch", "hidden"), "compute"),
        "counter": TensorSpec(("batch",), "int64"),
        "open": TensorSpec(("open", "batch", "kv_heads"), shard="kv_heads", kind="open"),
    }
    found = state_bytes(specs, SIZES, torch.bfloat16, tp_size=2)
    assert found == {"memory": 3 * 10 * 2 * 4 + 3 * 64 * 2 + 3 * 8, "open": 5 * 3 * 2 * 2}
    # float32 states are float64 where everything is
    assert state_bytes({"memory": specs["memory"]}, SIZES, torch.float64)["memory"] == 3 * 10 * 4 * 8


@pytest.mark.parametrize(("limit", "entries"), [(None, 7), (3, 3), (9, 7)])
def test_growing_lists_count_their_entries_up_to_the_limit(limit, entries):
    specs = {"past": Growing({"keys": TensorSpec(("chunk", "batch", "kv_heads"), shard="kv_heads")}, limit)}
    found = state_bytes(specs, SIZES, torch.bfloat16, tp_size=4, chunks_seen=7)
    assert found == {"memory": entries * 16 * 3 * 1 * 2, "open": 0}


MODEL = {
    "layers": 12,
    "hidden_size": 720,
    "heads": 8,
    "chunk_size": 2048,
    "memory": [{"layers": [8], "mixer": "elastic_memory"}],
}


def test_the_paper_s_elastic_memory_holds_0_78m_numbers_per_sequence():
    found = model_state_bytes(ModelConfig.model_validate(MODEL), 1, torch.bfloat16, context_tokens=32_768)
    # the paper's 777,600 numbers: order 540, keys and values, 720 channels; in FP32
    assert found == {"memory": 540 * 2 * 720 * 4, "open": 0}


def test_melodi_carries_its_vectors_at_every_layer_and_on_every_rank():
    model = ModelConfig.model_validate({**MODEL, "mixer": "melodi", "memory": []})
    # 45 vectors of 720 in BF16, 3 rows; whole on each of 2 ranks, as they are no heads
    found = model_state_bytes(model, 3, torch.bfloat16, 2, 2048 + 100)
    assert found["memory"] == 12 * 45 * 3 * 720 * 2
    # keys, values and what the heads put out, of half of the heads
    assert found["open"] == 12 * 3 * 100 * 3 * 360 * 2


def test_an_unfinished_chunk_is_open_in_every_layer():
    found = model_state_bytes(ModelConfig.model_validate(MODEL), 2, torch.bfloat16, 2, 2048 + 100)
    assert found["open"] == 12 * 2 * 100 * 2 * 360 * 2


ARCHITECTURES = [
    "decoder",
    {"kind": "recurrent_memory", "memory_tokens": 3},
    {"kind": "recurrent_memory", "memory_tokens": 1, "form": "overwrite"},
    {"kind": "memory_model", "encoder": {"layers": 1, "hidden_size": 12, "heads": 3}, "slots": 2},
    {"kind": "memory_model", "slots": 2},
]


@pytest.mark.parametrize(
    ("architecture", "mixer"),
    [
        *itertools.product(ARCHITECTURES, ["local_attention", "full_attention"]),
        ("decoder", {"kind": "melodi", "form": "rising", "summaries": 3, "memories": 2, "long_memory": 32}),
        ("decoder", {"kind": "lamemo", "memory_length": 5}),
        ("decoder", {"kind": "lamemo", "look_ahead": False}),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_states_at_every_place(architecture, mixer):
    """Inside a chunk layers have read the rows before its tokens, and not those behind them."""
    tree = {"layers": 2, "hidden_size": 16, "heads": 2, "vocab_size": 32, "chunk_size": 4, "mixer": mixer}
    model = ModelConfig.model_validate({**tree, "architecture": architecture})
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, 0)
    states = stage.initial_states(3, torch.device("cpu"), torch.float32)
    for place in range(10):
        planned = model_state_bytes(model, 3, torch.float32, context_tokens=place)
        held = sum(tensor.nbytes for state in states.values() for tensor in state_tensors(state))
        assert sum(planned.values()) == held, place
        assert (planned["open"] > 0) == (place % 4 > 0)
        with torch.no_grad():
            _, states, _ = stage(torch.zeros(1, 3, dtype=torch.int64), states, Chunk((place,) * 3))


def test_heads_that_ranks_cannot_share_are_refused():
    with pytest.raises(LayoutError, match="3 ranks cannot share 8 kv_heads"):
        model_state_bytes(ModelConfig.model_validate(MODEL), 1, torch.float32, tp_size=3)


def test_negative_contexts_are_refused():
    with pytest.raises(ValueError, match="-1"):
        model_state_bytes(ModelConfig.model_validate(MODEL), 1, torch.float32, context_tokens=-1)
