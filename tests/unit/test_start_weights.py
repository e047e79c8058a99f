"""Parts of models that start from weights files: which tensor goes where, what is computed then, every refusal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.weights import WeightsHeader, write_weights
from megamem.config.load import merge, parse_config, read_yaml
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError
from megamem.hf.importing import from_hf
from megamem.memory.base import Chunk
from megamem.model.stage import Stage, build_stage, meta_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.freezing import check_learns, check_stages_learn, freeze, group_count, learning_names
from megamem.pipeline.start_weights import check_start, new_parameters, open_weights, weight_sources
from megamem.training.description import describe_learning, describe_start
from tests.distributed.training_cases import AUTOENCODER, MEMORY_MODEL, MODEL
from tests.unit.importing_helpers import CHUNK as LLAMA_CHUNK
from tests.unit.importing_helpers import saved as pretrained

CHUNK, VOCABULARY = 8, 40
SHAPE = {
    "hidden_size": 16, "heads": 4, "ffn_size": 24, "vocab_size": VOCABULARY, "chunk_size": CHUNK, "init_std": 0.3,
}  # fmt: skip
ENCODER = {"layers": 2, "hidden_size": 12, "heads": 3, "ffn_size": 20}
NARROW = {**SHAPE, "layers": 2, "hidden_size": 12, "heads": 3, "ffn_size": 20}
"""A plain decoder in the shape of the encoder."""
WIDE = {**SHAPE, "layers": 3}
"""A plain decoder in the shape of the decoder."""


def memory_model(encoder: dict[str, Any] | None = ENCODER, decoder: int = 3, **changes: Any) -> dict[str, Any]:
    """A model section; `changes` are of the whole model, or of its architecture as `positions` and the like."""
    options = {name: changes.pop(name) for name in ("positions", "compressed_size") if name in changes}
    architecture = {"kind": "memory_model", "slots": 3, "encoder": encoder, **options}
    return {**SHAPE, "layers": (encoder or {"layers": 0})["layers"] + decoder, "architecture": architecture, **changes}


def run(model: dict[str, Any], files: Any, sections: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    objective = "autoencode" if model.get("architecture", {}).get("kind") == "autoencoder" else "next_token"
    tree = {
        "name": "case", "model": model,
        "data": {"sources": "none", "sequence_length": 4 * CHUNK, "documents": "drop"},
        "training": {"steps": 2, "batch_tokens": 4 * CHUNK, "objective": objective, "init_from": files},
        "parallel": {"device": "cpu"},
    }  # fmt: skip
    return parse_config(RunConfig, merge(merge(tree, sections or {}), {"training": training}), "file")


def saved(path: Path, model: dict[str, Any], seed: int = 0, tokenizer: str | None = None, new: tuple[str, ...] = ()):
    """Write the weights of a model drawn from `seed`, without those called `new`; return it in float64."""
    config = ModelConfig.model_validate(model)
    stage = build_stage(config, PlainLinears())
    initialize_parameters(stage, seed)
    with torch.no_grad():  # norms of a trained model are not ones
        for index, parameter in enumerate(stage.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * seed + index))
            parameter += 0.1 * noise
    weights = {name: p.detach() for name, p in stage.named_parameters() if name not in new}
    write_weights(weights, path, WeightsHeader.of_model(config, tokenizer, new))
    return stage.double()


def started(config: RunConfig, seed: int = 9) -> Stage:
    """A model in float64 that is drawn from `seed` and has what its start weights hold."""
    stage = build_stage(config.model, PlainLinears())
    initialize_parameters(stage, seed)
    files = {path: load_file(path) for path, _ in weight_sources(config).values()}
    weights = {own: files[path][name] for own, (path, name) in weight_sources(config).items()}
    found = stage.load_state_dict(weights, strict=False)
    assert set(found.missing_keys) == new_parameters(config)
    return stage.double()


def first_chunk(stage: Stage, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states [tokens, rows, width] of a first chunk, after the last norm."""
    states = stage.initial_states(ids.shape[1], torch.device("cpu"), torch.float64)
    return stage(ids, states, Chunk((0,) * ids.shape[1]))[0]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (CHUNK, 2), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "model",
    [
        memory_model(),
        memory_model(compressed_size=5, bias=True, norm="layer"),
        memory_model(None, tie_embeddings=True),
        memory_model(norm_position="post"),
        {**MODEL, **MEMORY_MODEL},
        {**MODEL, **AUTOENCODER},
        memory_model(mixer={"kind": "transformer_xl", "shared_biases": True}),
    ],
)
def test_every_parameter_is_of_one_part_or_a_bridge(model):
    config = ModelConfig.model_validate(model)
    parts = config.architecture.parts(config)
    encoder = 0 if config.architecture.encoder is None else config.architecture.encoder.layers
    for name, _ in meta_stage(config).named_parameters():
        owners = [key for key, part in parts.items() if part.plain_name(name)]
        bridge = ".writer.projections." in name or ".expansion." in name
        assert len(owners) == (0 if bridge else 1), name
        assert any(part.is_bridge(name) for part in parts.values()) == bridge
        number = re.match(r"layers\.(\d+)\.", name)
        first = name.startswith("encoder_embedding.") or (number and int(number[1]) < encoder)
        assert owners in ([], ["encoder" if first else "decoder"]), name


def test_a_plain_decoder_becomes_the_encoder(tmp_path, ids):
    """The memory of a chunk, before its projection, is the plain model's last hidden state of its last token."""
    plain = saved(tmp_path / "plain", NARROW)
    config = run(memory_model(), {"encoder": str(tmp_path / "plain")}, freeze="encoder")
    sources = weight_sources(config)
    assert sources["encoder_embedding.weight"] == (tmp_path / "plain", "embedding.weight")
    assert sources["layers.1.writer.norm.weight"] == (tmp_path / "plain", "norm.weight")
    assert sources["layers.1.mlp.up.weight"] == (tmp_path / "plain", "layers.1.mlp.up.weight")
    assert len(sources) == len(list(plain.parameters())) - 1, "all but the output head"
    stage = started(config)
    with torch.no_grad():
        encoded, _ = stage.through_fresh(stage.encoder_part, stage.embed_for_encoder(ids, Chunk((0, 0))), Chunk((0, 0)))
        memory = stage.layer(1).writer.norm(encoded)[-1]
        # the same sums in the same order, but for how attention is called
        assert (memory - first_chunk(plain, ids)[-1]).abs().max() < 1e-12


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_decoder_becomes_the_decoder(tmp_path, ids, tied):
    """With its slots left out, the first chunk is read as by the plain model."""
    plain = saved(tmp_path / "plain", {**WIDE, "tie_embeddings": tied})
    model = memory_model(positions="variable", tie_embeddings=tied)
    stage = started(run(model, {"decoder": str(tmp_path / "plain")}))
    with torch.no_grad():
        expected, found = (each.logits(first_chunk(each, ids)) for each in (plain, stage))
    # attention over the same rows, called in another way
    assert (found - expected).abs().max() < 1e-11


def test_tied_weights_become_an_output_head_of_its_own(tmp_path):
    saved(tmp_path / "tied", {**WIDE, "tie_embeddings": True})
    saved(tmp_path / "untied", WIDE)
    sources = weight_sources(run(memory_model(), {"decoder": str(tmp_path / "tied")}))
    assert sources["head.weight"] == sources["embedding.weight"] == (tmp_path / "tied", "embedding.weight")
    with pytest.raises(CheckpointError, match=r"untied: head\.weight is not in the model's decoder; .* set model\.tie"):
        weight_sources(run(memory_model(tie_embeddings=True), {"decoder": str(tmp_path / "untied")}))


def test_a_decoder_moves_behind_an_encoder_of_another_depth(tmp_path):
    saved(tmp_path / "m", memory_model({**ENCODER, "layers": 4, "hidden_size": 8, "heads": 2}))
    config = run(memory_model(), {"decoder": str(tmp_path / "m")})
    sources = weight_sources(config)
    assert sources["layers.2.mlp.up.weight"] == (tmp_path / "m", "layers.4.mlp.up.weight")
    assert sources["layers.4.mixer.query.weight"] == (tmp_path / "m", "layers.6.mixer.query.weight")
    assert sources["norm.weight"] == (tmp_path / "m", "norm.weight")
    encoder = [
        name for name in meta_stage(config.model).state_dict() if name.startswith(("encoder", "layers.0", "layers.1"))
    ]
    assert new_parameters(config) == set(encoder)


def test_an_encoder_is_taken_from_an_autoencoder(tmp_path):
    narrow = {"kind": "autoencoder", "encoder": ENCODER}
    saved(tmp_path / "auto", {**SHAPE, "layers": 4, "architecture": narrow})
    config = run(memory_model(), {"encoder": str(tmp_path / "auto")})
    assert all(own == name for own, (_, name) in weight_sources(config).items())
    assert {name for name in new_parameters(config) if name.startswith("layers.1.")} == {
        "layers.1.writer.projections.0.weight"
    }
    # and its decoder, which embeds no tokens, from a model that does
    saved(tmp_path / "plain", {**WIDE, "layers": 2, "tie_embeddings": True})
    sources = weight_sources(run({**SHAPE, "layers": 4, "architecture": narrow}, {"decoder": str(tmp_path / "plain")}))
    assert sources["head.weight"] == (tmp_path / "plain", "embedding.weight")
    assert sources["layers.2.mlp.up.weight"] == (tmp_path / "plain", "layers.0.mlp.up.weight")


def test_projections_come_with_both_parts_of_one_file(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        saved(path, memory_model(compressed_size=5))
    same = run(memory_model(compressed_size=5), {"encoder": str(one), "decoder": str(one)})
    assert new_parameters(same) == frozenset()
    assert weight_sources(same)["layers.1.writer.projections.2.weight"][0] == one
    projections = {f"layers.1.writer.projections.{index}.weight" for index in range(3)}
    assert (
        new_parameters(run(memory_model(compressed_size=5), {"encoder": str(one), "decoder": str(other)}))
        == projections
    )
    narrower = run(memory_model(compressed_size=4), {"encoder": str(one), "decoder": str(one)})
    assert new_parameters(narrower) == projections
    assert describe_start(narrower) == [
        f"weights: encoder {one}, decoder {one}; {12 * 4 + 4 * 12 + 12 * 16} parameters are new"
    ]
    assert describe_start(run(memory_model(), str(one))) == []


@pytest.mark.parametrize("tied", [False, True])
def test_an_imported_llama_becomes_the_decoder(tmp_path, tied):
    """Slots left out, the first chunk's logits are those that transformers' own model gives."""
    theirs = pretrained("llama", tmp_path / "hf", tie_word_embeddings=tied).double()
    from_hf(tmp_path / "hf", tmp_path / "llama", [f"chunk_size={LLAMA_CHUNK}"])
    section = read_yaml(tmp_path / "llama" / "model.yaml")["model"]
    architecture = {
        "kind": "memory_model",
        "slots": 2,
        "positions": "variable",
        "encoder": {"layers": 2, "hidden_size": 8, "heads": 2},
    }
    model = {**section, "layers": 2 + section["layers"], "architecture": architecture}
    data = {"data": {"sequence_length": 2 * LLAMA_CHUNK}, "training": {"batch_tokens": 2 * LLAMA_CHUNK}}
    config = run(model, {"decoder": str(tmp_path / "llama" / "weights.safetensors")}, sections=data)
    ids = torch.randint(96, (LLAMA_CHUNK, 2), generator=torch.Generator().manual_seed(1))
    stage = started(config)
    with torch.no_grad():
        found, expected = stage.logits(first_chunk(stage, ids))[..., :96], theirs(ids.T).logits.transpose(0, 1)
    # both rotate by tables that are computed in FP32
    assert (found - expected).abs().max() < 1e-5


def test_what_a_part_lists_as_new_stays_new(tmp_path):
    mixer = {"memory": [{"layers": [1], "mixer": "infini_attention"}]}
    saved(tmp_path / "f", {**WIDE, **mixer}, new=("layers.1.mixer.gate.logit",))
    model = memory_model(memory=[{"layers": [3], "mixer": "infini_attention"}])
    assert "layers.3.mixer.gate.logit" in new_parameters(run(model, {"decoder": str(tmp_path / "f")}))


REFUSED = {
    "width of an encoder": (
        memory_model(), "encoder", {**NARROW, "hidden_size": 24},
        "its encoder is 24 wide, the model's 12; set model.architecture.encoder.hidden_size to 24",
    ),
    "width of a decoder": (
        memory_model(), "decoder", {**WIDE, "hidden_size": 32},
        "its decoder is 32 wide, the model's 16; set model.hidden_size to 32",
    ),
    "layers of an encoder": (
        memory_model(), "encoder", {**NARROW, "layers": 3},
        "its encoder has 3 layers, the model's 2; set model.architecture.encoder.layers to 3",
    ),
    "layers of a decoder": (
        memory_model(), "decoder", {**WIDE, "layers": 5},
        "its decoder has 5 layers, the model's 3; set model.layers to 7",
    ),
    "layers of another memory model": (
        memory_model(), "encoder", memory_model({**ENCODER, "layers": 5}),
        "its encoder has 5 layers, the model's 2; set model.architecture.encoder.layers to 5",
    ),
    "vocabulary": (
        memory_model(), "decoder", {**WIDE, "vocab_size": 50},
        "its decoder has 50 rows of vocabulary, the model 40; the tokenizer must be the same "
        "(model.vocab_size, model.padded_vocab_size)",
    ),
    "no such part": (memory_model(), "encoder", memory_model(None), "has no encoder; it has decoder"),
    "another MLP": (
        memory_model(), "decoder", {**WIDE, "ffn_size": 32},
        "layers.0.mlp.down.weight has shape [16, 32], layers.2.mlp.down.weight has [16, 24]",
    ),
    "biases": (
        memory_model(), "decoder", {**WIDE, "bias": True},
        "layers.0.mixer.key.bias is not in the model's decoder; the file's model is another one",
    ),
    "no biases": (
        memory_model(bias=True), "encoder", NARROW,
        "layers.0.mixer.key.bias of the encoder is missing; the file's model is another one",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "part", "file", "reason"), REFUSED.values(), ids=REFUSED)
def test_files_that_do_not_fit_are_refused_in_one_line(tmp_path, model, part, file, reason):
    saved(tmp_path / "file", file)
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{tmp_path}/file: {reason}')}$"):
        check_start(run(model, {part: str(tmp_path / "file")}), None)


def test_parts_are_refused_where_there_are_none():
    with pytest.raises(
        ConfigError, match=r"init_from\.encoder: the model has no such part; architecture decoder has no"
    ):
        run(WIDE, {"encoder": "file"})
    with pytest.raises(ConfigError, match="the model has no such part; architecture memory_model has decoder"):
        run(memory_model(None), {"encoder": "file"})
    with pytest.raises(ConfigError, match=r"training\.freeze memory: the model has no such part"):
        run(memory_model(), "file", freeze="memory")
    for wrong in (5, {}, {"encoder": 5}):
        with pytest.raises(ConfigError, match=r"training\.init_from: expected a path, or paths by part as \{encoder:"):
            run(memory_model(), wrong)
    with pytest.raises(CheckpointError, match="none: not a readable safetensors file"):
        check_start(run(memory_model(), {"encoder": "none"}), None)


def test_tokenizers_must_be_one(tmp_path):
    a, b, unknown = tmp_path / "a", tmp_path / "b", tmp_path / "unknown"
    saved(a, NARROW, tokenizer="a" * 64)
    saved(b, WIDE, tokenizer="b" * 64)
    saved(unknown, WIDE)
    assert open_weights(a).tokenizer == "a" * 64
    assert open_weights(unknown).tokenizer is None
    check_start(run(memory_model(), {"encoder": str(a), "decoder": str(unknown)}), "a" * 64)
    said = f"b: these weights were trained with the tokenizer {'b' * 12}, that of {a} is {'a' * 12}; all must be of one"
    with pytest.raises(CheckpointError, match=said):
        check_start(run(memory_model(), {"encoder": str(a), "decoder": str(b)}), None)
    with pytest.raises(CheckpointError, match=rf"that of data\.tokenizer is {'c' * 12}; all must be of one tokenizer"):
        check_start(run(memory_model(), {"encoder": str(a)}), "c" * 64)
    with pytest.raises(CheckpointError, match=rf"b: these weights .* that of data\.tokenizer is {'c' * 12}"):
        check_start(run(WIDE, str(b)), "c" * 64)
    check_start(run(WIDE, str(b)), "b" * 64)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_part_is_frozen(tmp_path, part):
    saved(tmp_path / "file", memory_model())
    config = run(memory_model(), str(tmp_path / "file"), freeze=part)
    check_learns(config)
    names = set(meta_stage(config.model).state_dict())
    encoder = {name for name in names if name.startswith(("encoder_embedding.", "layers.0.", "layers.1."))}
    encoder.discard("layers.1.writer.projections.0.weight")
    decoder = {name for name in names if name.startswith(("embedding.", "head.", "norm.", "layers.2.", "layers.3."))}
    decoder |= {name for name in names if name.startswith("layers.4.")}
    assert names - learning_names(config) == (encoder if part == "encoder" else decoder)
    (line,) = describe_learning(config)
    assert re.fullmatch(rf"learning: [\d,]+ of [\d,]+ parameters \([\d.]+%\); the {part} is frozen", line)


def test_what_nothing_has_trained_is_not_frozen(tmp_path):
    for files in (None, {"decoder": "file"}):
        with pytest.raises(ConfigError, match="freeze encoder freezes weights that nothing has trained; name them in"):
            run(memory_model(), files, freeze="encoder")
    saved(tmp_path / "file", memory_model(), new=("encoder_embedding.weight",))
    said = (
        r"training\.freeze encoder freezes an encoder that nothing has trained: .*file does not hold encoder_embedding"
    )
    with pytest.raises(ConfigError, match=said):
        check_learns(run(memory_model(), str(tmp_path / "file"), freeze="encoder"))
    check_learns(run(memory_model(), str(tmp_path / "file"), freeze="decoder"))


def test_the_base_is_what_the_files_of_parts_hold(tmp_path):
    saved(tmp_path / "narrow", NARROW)
    saved(tmp_path / "wide", WIDE)
    files = {"encoder": str(tmp_path / "narrow"), "decoder": str(tmp_path / "wide")}
    config = run(memory_model(), files, freeze="base")
    assert learning_names(config) == {"layers.1.writer.projections.0.weight"}
    (line,) = describe_learning(config)
    assert line.startswith("learning: 192 new of ")
    # what is new learns at a rate of its own beside what is not: matrices, vectors, and new matrices
    faster = run(memory_model(), files, freeze="encoder")
    assert group_count(faster) == 2
    optimizer = faster.optimizer.model_copy(update={"new_parameters_lr": 1e-2})
    assert group_count(faster.model_copy(update={"optimizer": optimizer})) == 3


def test_a_stage_of_frozen_layers_alone_is_refused(tmp_path):
    saved(tmp_path / "file", memory_model({**ENCODER, "layers": 4}))
    config = run(memory_model({**ENCODER, "layers": 4}), str(tmp_path / "file"), freeze="encoder")
    check_stages_learn(config, [range(5), range(5, 7)])
    said = r"training\.freeze encoder: pipeline stage 1 \(layers 1-2\) has no parameters to train, .* use fewer stages"
    with pytest.raises(ConfigError, match=said):
        # the first stage has the decoder's embedding, but no vector
        check_stages_learn(config, [range(5), range(1, 3), range(3, 7)])


@pytest.mark.parametrize("width", [12, SHAPE["hidden_size"]])
def test_nothing_of_a_frozen_encoder_is_kept_for_a_backward_pass(tmp_path, ids, width):
    """Side by side or chunk by chunk: the graph begins behind it, at the projections if there are any."""
    model = memory_model({**ENCODER, "hidden_size": width, "heads": 2})
    saved(tmp_path / "file", model)
    config = run(model, str(tmp_path / "file"), freeze="encoder")
    stage = started(config)
    freeze(stage, learning_names(config))
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    places = [Chunk((0, 0)), Chunk((CHUNK, CHUNK))]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        side_by_side = stage.prepare(torch.cat((ids, ids)), places)
        alone, _ = stage.encode(stage.embed_for_encoder(ids, places[0]), places[0])
    projects = width != SHAPE["hidden_size"]
    assert [memory.requires_grad for memory in (side_by_side[0].prepared, alone)] == [projects] * 2
    # of both calls the memories that are projected: one of each row
    assert all(shape[-1] == 12 and shape[:-1].numel() in (2, 4) for shape in kept)
    assert len(kept) == (2 if projects else 0)
