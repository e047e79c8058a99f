"""Every refusal of `training.freeze` in one line, and what a run says of what learns."""

import pytest
from safetensors.torch import save_file

from checkpoints.resume import check_weights
from checkpoints.weights import WeightsHeader, write_weights
from megamem.config.load import merge, parse_config
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError
from megamem.model.stage import meta_stage
from megamem.pipeline import freezing, start_weights
from megamem.pipeline.freezing import check_learns, check_stages_learn
from megamem.pipeline.start_weights import new_parameters
from megamem.training.checks import check_run
from megamem.training.description import describe_learning
from tests.unit.data_helpers import make_shards

CHUNK = 16


def config(**sections):
    tree = {
        "name": "case",
        "model": {"layers": 4, "hidden_size": 24, "heads": 2, "vocab_size": 300, "chunk_size": CHUNK},
        "data": {"sources": "none", "sequence_length": 2 * CHUNK},
        "training": {"steps": 2, "batch_tokens": 2 * CHUNK, "freeze": "base", "init_from": "start.safetensors"},
        "parallel": {"device": "cpu"},
    }
    return parse_config(RunConfig, merge(tree, sections), "file")


def test_a_base_is_needed():
    with pytest.raises(ConfigError, match="training: freeze base needs init_from: weights to keep"):
        config(training={"init_from": None})
    assert config().training.freeze == "base"
    with pytest.raises(ConfigError, match=r"training\.freeze"):
        config(training={"freeze": "memory"})


def test_new_parameters_are_needed(tmp_path):
    path = tmp_path / "start.safetensors"
    write_weights({}, path)
    begun = config(
        model={"memory": [{"layers": [1], "mixer": "infini_attention"}]},
        training={"init_from": str(path)},
        data={"sources": [str(make_shards(tmp_path))]},
    )
    said = r"training\.freeze base: .*start\.safetensors lists no new parameters, so nothing would learn"
    with pytest.raises(ConfigError, match=said):
        check_learns(begun)
    with pytest.raises(ConfigError, match=said):
        check_run(begun, 1)
    save_file({}, path, metadata={"new_parameters": '["layers.1.mixer.gate.logit"]'})
    assert new_parameters(begun) == {"layers.1.mixer.gate.logit"}
    check_learns(begun)
    with pytest.raises(
        ConfigError, match=r"lists the new parameter layers\.1\.mixer\.gate\.logit, which the model has"
    ):
        check_learns(config(training={"init_from": str(path)}))


def test_each_stage_needs_something_to_learn(tmp_path):
    path = tmp_path / "start.safetensors"
    begun = config(
        model={"memory": [{"layers": [1, 2], "mixer": {"kind": "infini_attention"}}]}, training={"init_from": str(path)}
    )
    names = [name for name, _ in meta_stage(begun.model).named_parameters()]
    new = [name for name in names if "gate.logit" in name]
    write_weights({}, path, WeightsHeader(new))
    check_stages_learn(begun, [range(2), range(2, 4)])
    said = r"training\.freeze base: pipeline stage 1 \(layers 3-3\) has no new parameters to train, .* \(parallel\.pp\)"
    with pytest.raises(ConfigError, match=said):
        check_stages_learn(begun, [range(3), range(3, 4)])
    # one group of matrices and one of vectors, where the first stage has a vector alone
    write_weights({}, path, WeightsHeader([*new, "head.weight"]))
    with pytest.raises(ConfigError, match=r"stage 0 \(layers 0-1\) has 1 new parameters to train, .* into 2"):
        check_stages_learn(begun, [range(2), range(2, 4)])


def test_a_run_cannot_go_on_with_others_learning(tmp_path):
    class Saved:
        path = tmp_path / "step-00000001"

    saved = {"config": {"training": {"init_from": "start.safetensors"}}}
    with pytest.raises(CheckpointError, match=r"step-00000001: training\.freeze was None and is base; a run cannot"):
        check_weights(config(), Saved(), saved)
    check_weights(config(training={"freeze": None}), Saved(), saved)


def test_what_learns_is_said(tmp_path):
    path = tmp_path / "start.safetensors"
    learning = config(
        model={"memory": [{"layers": [1], "mixer": "infini_attention"}]}, training={"init_from": str(path)}
    )
    sizes = {name: parameter.numel() for name, parameter in meta_stage(learning.model).named_parameters()}
    name = "layers.1.mixer.gate.logit"
    total = sum(sizes.values())
    write_weights({}, path, WeightsHeader([name]))
    assert describe_learning(learning) == [
        f"learning: {sizes[name]} new of {total:,} parameters ({sizes[name] / total:.2%}); the others are frozen"
    ]
    assert describe_learning(config(training={"freeze": None})) == []


def test_the_whole_model_is_built_once(monkeypatch, tmp_path):
    """For all that looks at its parameters before a run starts."""
    built = []
    monkeypatch.setattr(start_weights, "meta_stage", lambda model: built.append(model) or meta_stage(model))
    path = tmp_path / "start.safetensors"
    begun = config(
        model={"hidden_size": 28, "memory": [{"layers": [1, 2], "mixer": "infini_attention"}]},
        training={"init_from": str(path)},
    )
    names = [name for name, _ in meta_stage(begun.model).named_parameters() if "gate.logit" in name]
    write_weights({}, path, WeightsHeader(names))
    assert new_parameters(begun) == set(names)
    assert describe_learning(begun)
    assert freezing.group_count(begun) == freezing.group_count(begun) == 1
    assert freezing.learning_of(begun).total == 2 * begun.model.heads
    assert len(built) == 1
    everything = config(model=begun.model.model_dump(), training={"init_from": None, "freeze": None})
    assert freezing.group_count(everything) == 2
