"""Model configurations: bad ones are refused with a line that helps; good ones have the parameters they should."""

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from megamem.config.model import MIXERS, ModelConfig
from megamem.errors import ConfigError
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, info, initialize_parameters
from megamem.parallel.sequence import split_tokens

GOOD = {"layers": 2, "hidden_size": 16, "heads": 4, "chunk_size": 8, "vocab_size": 24, "ffn_size": 12}


def memory(mixer, layers=(1,)):
    return {"memory": [{"layers": list(layers), "mixer": mixer}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 18}, "hidden_size 18 is not divisible by heads 4; choose a multiple or give head_dim"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"hidden_size": 12}, "head_dim 3 is odd"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"kv_heads": 8}, "heads 4 is not a multiple of kv_heads 8"),
        ({"layers": 0}, "layers\n  Input should be greater than 0"),
        ({"chunk_size": -8}, "chunk_size\n  Input should be greater than 0"),
        ({"chunk_size": "many"}, "chunk_size\n  Input should be a valid integer"),
        ({"hiden_size": 16}, "hiden_size\n  Extra inputs are not permitted"),
        ({"attention_kernel": "fast"}, "'sdpa', 'flex', 'flash_attn' or 'eager'"),
        ({"mixer": {"kind": "local_attention", "block": 3}}, "block 3 does not divide model.chunk_size 8"),
        (memory({"kind": "elastic_memory", "block": 16}), "block 16 does not divide model.chunk_size 8"),
        (memory("elastic_memory", [2]), "memory.layers: 2 does not exist; layers go from 0 to 1"),
        (memory("elastic_memory", [-1]), "greater than or equal to 0"),
        (memory("elastic_memory", [1, 1]), "memory.layers: layer 1 has two mixers"),
        (memory({"kind": "elastic_memory", "orders": 4}), "orders\n  Extra inputs are not permitted"),
        (memory({"kind": "elastic_memory", "alpha": 1.0}), "alpha\n  Input should be less than 1"),
        (memory({"kind": "elastic_memory", "samples": 1}), "samples 1 with sampling exponential"),
        (memory({"block": 4}), "a mixer needs a `kind`"),
        ({"padded_vocab_size": 23}, "padded_vocab_size 23 is below vocab_size 24"),
        ({"positions": "learned"}, "max_positions None does not go with positions learned; learned positions need it"),
        ({"max_positions": 16}, "max_positions 16 does not go with positions rotary"),
        (
            {"positions": "learned", "max_positions": 12},
            "max_positions 12 is not a multiple of chunk_size 8: the table would begin again inside a chunk",
        ),
        ({"qk_norm": True, "mixer": "titans"}, "qk_norm: no layer has softmax attention"),
        ({"bias": "query_key_value", "mixer": "titans"}, "bias query_key_value: no layer has softmax attention"),
        ({"rope_scaling": {"factor": 2}, "mixer": "transformer_xl"}, "rope_scaling: no layer rotates queries and keys"),
        (
            {"rope_scaling": {"factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor 4.0 is not below high_freq_factor 4.0",
        ),
        (
            {"qk_norm": True, **memory({"kind": "memorizing_attention", "queue": 8, "normalize_keys": True})},
            "qk_norm does not go with normalize_keys",
        ),
        (
            {"qk_norm": True, **memory({"kind": "melodi", "form": "rising", "summaries": 2})},
            "qk_norm does not go with form rising",
        ),
        ({"rope_theta": 1}, "rope_theta\n  Input should be greater than 1"),
        (
            memory({"kind": "memory_caching", "memory": "full_attention"}),
            "memory full_attention is no memory that can be kept; valid: delta_net, dla, linear_attention, memora",
        ),
        (
            memory({"kind": "log_linear", "memory": "memora"}),
            "memory memora cannot be merged; valid: delta_net, dla, linear_attention, retnet, ssd, titans",
        ),
        (
            memory({"kind": "log_linear", "memory": "ssd", "closed": "fading"}),
            "closed\n  Input should be 'kept' or 'faded'",
        ),
        (
            memory({"kind": "log_linear", "memory": "ssd", "admissibility": "none"}),
            "admissibility\n  Input should be 'weak' or 'strong'",
        ),
        (
            memory({"kind": "memory_caching", "memory": {"kind": "titans", "inner_chunk": 8}, "segment": 3}),
            "segment 3 does not divide model.chunk_size 8",
        ),
        (
            memory({"kind": "memory_caching", "memory": {"kind": "titans", "inner_chunk": 8}, "segment": 4}),
            "segment 4 is no multiple of memory.inner_chunk 8",
        ),
        (memory({"kind": "titans", "inner_chunk": 3}), "inner_chunk 3 does not divide model.chunk_size 8"),
        (
            memory({"kind": "titans", "inner_chunk": 8, "start": "zero"}),
            "start zero does not go with network mlp, whose gradients would be zero for ever",
        ),
        (
            memory({"kind": "dla", "inner_chunk": 8, "network": "linear", "start": "zero"}),
            "start zero does not go with layer_norm true, which would divide by zero; use false",
        ),
        (
            memory({"kind": "memora", "inner_chunk": 8, "network": "linear", "start": "zero"}),
            "start zero is not for memora, whose rows would be alike for ever; use learned",
        ),
        (
            {"bias": True, "norm": "layer", **memory({"kind": "retnet", "inner_chunk": 8})},
            "bias true is not for retnet: recurrent memories have no biases; use false",
        ),
        (
            memory({"kind": "melodi", "long_memory": 2, "long_increment": 3}),
            "long_increment 3 is more than long_memory 2; at most as many fit",
        ),
        (
            memory({"kind": "memorizing_attention", "queue": 8, "retrieval": "topk", "top_k": 9}),
            "top_k 9 is more than the queue of 8 tokens; use retrieval dense",
        ),
        (
            memory({"kind": "memorizing_attention", "queue": 8, "top_k": 4}),
            "top_k 4 does not go with retrieval dense; topk needs it, dense sees all",
        ),
        (
            memory({"kind": "elastic_memory", "sampling": "uniform", "points": [0.5]}),
            "sampling uniform with 1 points: custom takes points, others none",
        ),
        (
            memory({"kind": "elastic_memory", "order": 9, "discretization": "forward"}),
            "order 9 must be at most 8 (block 8); or use zoh, backward or bilinear",
        ),
        (
            {"architecture": {"kind": "recurrent_memory", "form": "overwrite", "memory_tokens": 2}},
            "architecture.memory_tokens 2 does not go with form overwrite; use 1",
        ),
        (
            {"chunk_size": 1, "architecture": {"kind": "recurrent_memory", "form": "overwrite", "memory_tokens": 1}},
            "architecture.form overwrite leaves no token to read with chunk_size 1; use at least 2",
        ),
        (
            {"positions": "learned", "max_positions": 8, "architecture": "recurrent_memory"},
            "architecture recurrent_memory adds rows without a place; it needs rotary positions",
        ),
        (
            {"positions": "learned", "max_positions": 8, "architecture": {"kind": "memory_model", "slots": 2}},
            "architecture memory_model adds rows without a place; it needs rotary positions",
        ),
        (
            {"architecture": {"kind": "memory_model", "slots": 2, "memories_per_chunk": 3}},
            "architecture.memories_per_chunk 3 does not divide chunk_size 8",
        ),
        (
            {"architecture": {"kind": "memory_model", "slots": 2, "encoder": {"layers": GOOD["layers"]}}},
            f"architecture.encoder.layers {GOOD['layers']} leaves no layer of model.layers {GOOD['layers']} to the",
        ),
        (
            {
                "architecture": {
                    "kind": "memory_model",
                    "slots": 2,
                    "encoder": {"layers": 1, "hidden_size": 10, "heads": 3},
                }
            },
            "architecture.encoder: hidden_size 10 is not divisible by heads 3",
        ),
        (
            {
                "architecture": {"kind": "memory_model", "slots": 2, "encoder": {"layers": 1}},
                **memory("full_attention", [0]),
            },
            "memory.layers [0] are the encoder's; their mixers are those of architecture.encoder",
        ),
        (
            {"architecture": {"kind": "memory_model", "slots": 2, "compressed_size": 4}},
            "architecture.compressed_size: there is no architecture.encoder",
        ),
        (
            {
                "architecture": {
                    "kind": "memory_model",
                    "slots": 2,
                    "encoder": {"layers": 1, "mixer": {"kind": "masked_mixer", "map_size": 4}},
                },
            },
            "map_size 4 is less than model.chunk_size 8",
        ),
        (
            {
                "architecture": {"kind": "recurrent_memory", "memory_tokens": 1},
                **memory({"kind": "titans", "inner_chunk": 4}),
            },
            "does not divide model.chunk_size 10 (chunk_size 8 and 2 rows of architecture recurrent_memory)",
        ),
    ],
)
def test_bad_configurations_are_refused(change, message):
    with pytest.raises(ValueError) as caught:
        ModelConfig.model_validate({**GOOD, **change})
    assert message in str(caught.value)


def test_a_layer_with_two_mixers_is_refused_across_entries():
    entries = memory("elastic_memory")["memory"] + memory("full_attention", [0, 1])["memory"]
    with pytest.raises(ValueError, match="layer 1 has two mixers"):
        ModelConfig.model_validate({**GOOD, "memory": entries})


@pytest.mark.parametrize(
    ("kind", "near"),
    [("elastic_memroy", "elastic_memory"), ("local_atention", "local_attention"), ("full-attention", "full_attention")],
)
def test_an_unknown_mixer_names_the_nearest_one(kind, near):
    with pytest.raises(ValidationError, match=f"'{kind}' is no mixer; did you mean '{near}'"):
        ModelConfig.model_validate({**GOOD, "mixer": kind})


def test_a_mixer_like_no_other_lists_the_valid_ones():
    with pytest.raises(ConfigError, match="'xyz' is no mixer") as caught:
        MIXERS.find("xyz")
    assert "did you mean" not in str(caught.value)
    assert all(kind in str(caught.value) for kind in MIXERS.kinds())


def test_defaults_follow_from_the_sizes():
    model = ModelConfig.model_validate(
        {**GOOD, "ffn_size": None, "mixer": "full_attention", **memory("elastic_memory")}
    )
    assert (model.resolved_kv_heads, model.resolved_head_dim, model.resolved_ffn_size) == (4, 4, 64)
    assert [model.mixer_at(layer).kind for layer in range(2)] == ["full_attention", "elastic_memory"]
    assert model.mixer_at(1).sample_count == 512
    grouped = ModelConfig.model_validate({**GOOD, "kv_heads": 2, "head_dim": 6})
    assert (grouped.resolved_kv_heads, grouped.resolved_head_dim) == (2, 6)


def test_configurations_survive_a_round_trip_with_their_mixers_options():
    model = ModelConfig.model_validate({**GOOD, **memory({"kind": "elastic_memory", "order": 7, "block": 4})})
    assert ModelConfig.model_validate(model.model_dump()) == model
    assert ModelConfig.model_validate_json(model.model_dump_json()) == model
    assert model.model_dump()["memory"][0]["mixer"]["order"] == 7


def parameters(model):
    with torch.device("meta"):
        stage = build_stage(model, PlainLinears())
    return sum(parameter.numel() for parameter in stage.parameters())


def test_parameter_counts_by_hand():
    attention, mlp, norms = 4 * 16 * 16, 3 * 16 * 12, 2 * 16
    whole = 2 * 24 * 16 + 2 * (attention + mlp + norms) + 16
    assert parameters(ModelConfig.model_validate(GOOD)) == whole
    assert parameters(ModelConfig.model_validate({**GOOD, "tie_embeddings": True})) == whole - 24 * 16
    assert parameters(ModelConfig.model_validate({**GOOD, "kv_heads": 2})) == whole - 2 * 2 * 16 * 8
    # Elastic Memory and full attention add none
    assert (
        parameters(ModelConfig.model_validate({**GOOD, **memory("elastic_memory"), "mixer": "full_attention"})) == whole
    )


def test_a_760m_model_is_built_without_memory():
    size = {"layers": 24, "hidden_size": 1536, "heads": 16, "ffn_size": 4096, "chunk_size": 2048}
    model = ModelConfig.model_validate({**size, **memory({"kind": "elastic_memory"}, [8])})
    block = 4 * 1536 * 1536 + 3 * 1536 * 4096 + 2 * 1536
    assert parameters(model) == 2 * 32_000 * 1536 + 24 * block + 1536 == 777_856_512


class OneRank(PlainLinears):
    """Layers of the shapes one of several ranks has, without processes."""

    def __init__(self, tp_size, tp_rank):
        self.tp_size, self.tp_rank = tp_size, tp_rank

    def column(self, inputs, outputs, init, bias=False):
        return super().column(inputs, outputs // self.tp_size, init, bias)

    def row(self, inputs, outputs, init, bias=False):
        return super().row(inputs // self.tp_size, outputs, init, bias)

    def embedding(self, vocabulary, width, init):
        return super().embedding(vocabulary // self.tp_size, width, init)


def initialized(tp_size=1, tp_rank=0, seed=3):
    model = ModelConfig.model_validate({**GOOD, **memory("elastic_memory")})
    stage = build_stage(model, OneRank(tp_size, tp_rank))
    initialize_parameters(stage, seed, tp_size, tp_rank)
    return dict(stage.named_parameters())


@pytest.mark.parametrize("tp_size", [2, 4])
def test_weights_start_the_same_however_they_are_split(tp_size):
    whole = initialized()
    parts = [initialized(tp_size, rank) for rank in range(tp_size)]
    for name, parameter in whole.items():
        axis = info(parameter).shard_axis
        if axis is None:
            assert all(torch.equal(part[name], parameter) for part in parts), name
        else:
            assert torch.equal(torch.cat([part[name] for part in parts], axis), parameter), name


def test_weights_depend_on_seed_and_name_only():
    whole, other = initialized(), initialized(seed=4)
    assert not torch.equal(whole["layers.0.mixer.query.weight"], other["layers.0.mixer.query.weight"])
    assert not torch.equal(whole["layers.0.mixer.query.weight"], whole["layers.1.mixer.query.weight"])
    # one stage of a pipeline draws what the whole model draws
    model = ModelConfig.model_validate({**GOOD, **memory("elastic_memory")})
    stage = build_stage(model, PlainLinears(), range(1, 2))
    initialize_parameters(stage, 3)
    assert all(torch.equal(parameter, whole[name]) for name, parameter in stage.named_parameters())


def test_initial_scales_are_the_configured_ones():
    model = ModelConfig.model_validate({**GOOD, "hidden_size": 128, "ffn_size": 256, "init_std": 0.05})
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, 1)
    # a sample of n normal numbers has its standard deviation within 4 / sqrt(2n): 2.2 % for 128 x 128
    for name, std in [("query", 0.05), ("key", 0.05), ("value", 0.05), ("output", 0.05 / 2)]:
        weight = stage.own_layers[0].mixer.get_submodule(name).weight
        assert abs(weight.std().item() / std - 1) < 0.025, name
    assert torch.equal(stage.norm.weight, torch.ones(128))


def test_every_parameter_declares_how_it_is_split_and_if_it_decays():
    for name, parameter in initialized().items():
        assert info(parameter).decay == (parameter.ndim == 2), name
        assert parameter.tensor_model_parallel == (info(parameter).shard_axis is not None), name
    with pytest.raises(AttributeError):
        info(nn.Parameter(torch.zeros(1)))


def test_padding_that_ends_inside_a_call_is_refused_under_sequence_parallelism():
    linears = OneRank(1, 0)
    linears.sequence_parallel = True
    stage = build_stage(ModelConfig.model_validate(GOOD), linears)
    states = stage.initial_states(1, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="left padding that ends inside a call"):
        stage(torch.zeros(8, 1, dtype=torch.int64), states, Chunk((-3,)))


def test_tokens_that_ranks_cannot_share_are_refused():
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    assert split_tokens(torch.arange(6.0), group).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="5 tokens cannot be split over 2 ranks"):
        split_tokens(torch.zeros(5, 1), group)
