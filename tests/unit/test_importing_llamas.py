"""Pretrained models that are a Llama but for their positions, biases, norms or windows become ours."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.errors import ConversionError
from megamem.hf.export import llama_config
from megamem.hf.importing import WEIGHTS, from_hf
from megamem.hf.source import _scales_rotations
from megamem.model.stage import build_stage
from megamem.ops.rotary import RotaryScaling, Rotation, rotary_frequencies
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.unit.importing_helpers import CHUNK, LENGTH, LLAMA, imported, logits, randomized, theirs


@pytest.fixture
def ids():
    return torch.randint(96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


OTHERS = {
    "llama 3.1": (
        LlamaForCausalLM,
        {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        }},
        {"rope_scaling": {
            "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 24,
        }},
    ),
    "mistral": (MistralForCausalLM, {"sliding_window": None, "head_dim": 8}, {"memory": []}),
    "mistral, window": (
        MistralForCausalLM, {"sliding_window": 21, "head_dim": 8},
        {"mixer": {"kind": "sliding_attention", "window": 21}},
    ),
    "qwen2": (Qwen2ForCausalLM, {"tie_word_embeddings": True}, {"bias": "query_key_value"}),
    "qwen2, window": (
        Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
        {"memory": [{"layers": [1, 2], "mixer": {"kind": "sliding_attention", "window": 21}}]},
    ),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16}, {"qk_norm": True, "head_dim": 16}),
    "olmo2": (Olmo2ForCausalLM, {}, {"qk_norm": "projection", "norm_position": "output"}),
}  # fmt: skip
"""Architectures near a Llama: class, settings, and what the model section has for them."""


@pytest.mark.parametrize("name", OTHERS)
def test_models_near_a_llama(tmp_path, ids, name):
    architecture, changes, section = OTHERS[name]
    torch.manual_seed(0)
    model = architecture(architecture.config_class(**{**LLAMA, **changes})).eval()
    randomized(model).save_pretrained(tmp_path / "hf")
    facts = from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}"])
    stage = imported(tmp_path / "ours")
    assert facts["unused"] == facts["new_parameters"] == []
    written = stage.config.model_dump(mode="json")
    assert {key: written[key] for key in section} == section
    found = logits(stage, ids)[..., :96]
    torch.testing.assert_close(found, theirs(model, ids), rtol=1e-4, atol=1e-4)
    # what makes it other than a Llama matters
    plain = {
        "rope_scaling": None,
        "bias": False,
        "qk_norm": False,
        "norm_position": "pre",
        "memory": [],
        "mixer": "full_attention",
    }
    changed = parse_config(ModelConfig, {**written, **plain}, "test")
    if changed != stage.config:
        other = build_stage(changed, PlainLinears())
        initialize_parameters(other, 0)
        other.load_state_dict(load_file(tmp_path / "ours" / WEIGHTS), strict=False)
        assert not torch.allclose(logits(other, ids)[..., :96], found, atol=1e-2)


def test_a_memory_beside_the_attention_of_others(tmp_path, ids):
    """Qwen2's attention has biases, memories have none; OLMo 2 normalizes what layers add."""
    for name in ("qwen2", "olmo2"):
        architecture, changes, _ = OTHERS[name]
        folder = tmp_path / name
        randomized(architecture(architecture.config_class(**{**LLAMA, **changes}))).save_pretrained(folder)
        local = ["chunk_size=16", "mixer=local_attention"]
        memory = "memory=[{layers: [1], mixer: {kind: added_memory, memory: {kind: delta_net, convolution: 1}}}]"
        from_hf(folder, tmp_path / f"{name}-plain", local)
        facts = from_hf(folder, tmp_path / f"{name}-ours", [*local, memory])
        assert facts["new_parameters"]
        before, after = (logits(imported(tmp_path / f"{name}-{form}"), ids) for form in ("plain", "ours"))
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "mixer"),
    [
        ("llama", {"sliding_window": 21, "layer_types": ["sliding_attention"] * 3}, "full_attention"),
        ("olmo2", {"sliding_window": 21}, "full_attention"),
        ("qwen3", {"sliding_window": 21}, "full_attention"),
        ("mistral", {}, "sliding_attention"),
    ],
)
def test_windows_are_those_of_transformers(tmp_path, kind, changes, mixer):
    """Keys that an architecture does not read change nothing, and what a file leaves out is its default."""
    architecture = LlamaForCausalLM if kind == "llama" else OTHERS[kind][0]
    architecture(architecture.config_class(**LLAMA)).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for key in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
        config.pop(key, None)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **changes}))
    from_hf(tmp_path / "hf", tmp_path / "ours")
    found = imported(tmp_path / "ours").config
    assert found.mixer.kind == mixer
    assert not found.memory
    assert mixer == "full_attention" or found.mixer.window == 4096


def test_a_memory_does_not_take_windows_away(tmp_path):
    architecture, changes, _ = OTHERS["qwen2, window"]
    architecture(architecture.config_class(**{**LLAMA, **changes})).save_pretrained(tmp_path / "hf")
    memory = "memory=[{layers: [1], mixer: elastic_memory}]"
    with pytest.raises(ConversionError, match="memory= replaces the windows of layers 2; list them in it too"):
        from_hf(tmp_path / "hf", tmp_path / "ours", [memory])
    from_hf(tmp_path / "hf", tmp_path / "ours", ["mixer=local_attention", memory])
    from_hf(tmp_path / "hf", tmp_path / "plain")
    with pytest.raises(ConversionError, match="memory= replaces the windows of layers 2; list them in it too"):
        from_hf(tmp_path / "plain", tmp_path / "later", [memory])
    both = "memory=[{layers: [1], mixer: elastic_memory}, {layers: [2], mixer: {kind: sliding_attention, window: 21}}]"
    from_hf(tmp_path / "plain", tmp_path / "later", [both])


def test_a_base_of_rotations_stands_where_the_file_has_it(tmp_path):
    """transformers takes that of `rope_scaling` first."""
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    del written["rope_parameters"]
    scaling = {
        "rope_type": "llama3", "rope_theta": 700.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    }  # fmt: skip
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**written, "rope_scaling": scaling}))
    from_hf(tmp_path / "hf", tmp_path / "ours")
    assert imported(tmp_path / "ours").config.rope_theta == 700.0
    assert LlamaConfig.from_pretrained(tmp_path / "hf").rope_parameters["rope_theta"] == 700.0


@pytest.mark.parametrize("scaling", [None, "llama3"])
def test_published_files_have_their_settings_at_the_top(tmp_path, ids, scaling):
    """As Llama, Qwen and OLMo were published: `rope_theta` beside `rope_scaling`, none of it in `rope_parameters`."""
    torch.manual_seed(0)
    changes = {} if scaling is None else OTHERS["llama 3.1"][1]
    model = randomized(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes})).eval())
    model.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    written = json.loads(path.read_text())
    parameters = written.pop("rope_parameters")
    top = {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": None if scaling is None else parameters}
    path.write_text(json.dumps({**written, **top}))
    from_hf(tmp_path / "hf", tmp_path / "ours", [f"chunk_size={CHUNK}"])
    found = logits(imported(tmp_path / "ours"), ids)[..., :96]
    torch.testing.assert_close(found, theirs(model, ids), rtol=1e-4, atol=1e-4)


def test_layers_of_another_reach_are_refused(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**LLAMA, use_sliding_window=True, sliding_window=21)).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "layer_types": ["chunked_attention"] * 3}))
    with pytest.raises(ConversionError, match="layers of 'chunked_attention' are not supported"):
        from_hf(tmp_path / "hf", tmp_path / "ours")


def test_slower_rotations_are_exported(tmp_path):
    architecture, changes, _ = OTHERS["llama 3.1"]
    architecture(architecture.config_class(**{**LLAMA, **changes})).save_pretrained(tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "ours")
    model = imported(tmp_path / "ours").config
    assert llama_config(model, LENGTH).rope_parameters == changes["rope_parameters"]


def test_turns_of_slower_rotations():
    """By hand: in 64 tokens a frequency of 8 turns stays, one of half a turn is a quarter, one of 2.5 is between."""
    scaling = RotaryScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
    for turns, share in ((8.0, 1.0), (0.5, 0.25), (2.5, 0.5 + 0.5 / 4)):
        # the second of two frequencies is 1 / theta
        theta = (2 * math.pi * turns / 64) ** -2
        plain, slowed = (rotary_frequencies(4, Rotation(theta, each))[1] for each in (None, scaling))
        assert float(plain) == pytest.approx(2 * math.pi * turns / 64)
        assert float(slowed / plain) == pytest.approx(share)


@pytest.mark.parametrize(
    ("tensors", "scaling", "scaled"),
    [((), None, False), ((), "none", False), ((), "yarn", True), (("rope_freqs.weight",), None, True)],
)
def test_scaled_rotations_of_a_gguf_file_are_seen(tensors, scaling, scaled):
    """llama.cpp writes Llama 3.1's as a tensor and others as a field; transformers passes over both."""
    fields = {} if scaling is None else {"qwen2.rope.scaling.type": SimpleNamespace(contents=lambda: scaling)}
    reader = SimpleNamespace(fields=fields, tensors=[SimpleNamespace(name=name) for name in ("output", *tensors)])
    assert _scales_rotations(reader) is scaled
