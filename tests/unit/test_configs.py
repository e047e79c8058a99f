"""Every shipped configuration loads, builds without memory and has the size it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megamem.config.load import load_config, parse_config, read_yaml
from megamem.config.model import ModelConfig
from megamem.config.recipe import load_run
from megamem.config.run import RunConfig
from megamem.costs.parameters import parameter_counts
from megamem.memory.base import TensorSpec
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears
from tests.unit.shipped import SHIPPED, model_file, shipped

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODELS = sorted((CONFIGS / "models").glob("*/*.yaml"))
OTHER = {
    "books", "books_characters", "copy_smollm2", "demo", "infinity_former_gpt2", "infinity_former_smollm2", "pg19",
    "text8",
}  # fmt: skip
"""Recipes with a model of their own, for imported ones (`test_finetuning_configs.py`), or for another recipe's."""
IMPORTED = {"smollm2-135m-decoder"}
"""Models of imported weights, of a recipe of their own."""
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))
# embedding and head are 45 % of the 100M model; papers' labels count one, both or neither
TOLERANCE = 0.22


def load_model(path: Path) -> ModelConfig:
    tree = read_yaml(path)
    assert set(tree) == {"model"}, "a model file holds nothing but the model"
    return parse_config(ModelConfig, tree["model"], str(path))


def meta_counts(model: ModelConfig) -> dict[str, int]:
    """Parameters by part of the model as built, without memory for its weights."""
    with torch.device("meta"):
        stage = build_stage(model, PlainLinears())
    counts = dict.fromkeys(("embedding", "head", "attention", "mlp", "norms", "memory"), 0)
    for name, parameter in stage.named_parameters():
        assert parameter.is_meta
        assert parameter.dtype == torch.float32
        part = next(
            part
            for part, pattern in {
                "embedding": r"embedding\.",
                "head": r"head\.",
                "norms": r"(layers\.\d+\.\w+_)?norm\.|layers\.\d+\.mixer\.(mixers\.\d+\.)?(query|key)_norm\."
                r"|layers\.\d+\.(mixer\.(query|key|value|output)|mlp\.\w+)\.bias",
                "mlp": r"layers\.\d+\.mlp\.",
                "attention": r"layers\.\d+\.mixer\.(memory\.|mixers\.\d+\.)?"
                r"(query|key|value|output|gate(?!\.logit)|router|level_gates\.weight|rate\.weight|token_step\.weight|decay\.token\.weight|token_gates\.\w+\.weight)\.",
                "memory": r"layers\.\d+\.(mixer|writer)\.|memory_rows\.|side_rows\.|score_biases\.|encoder_embedding\.",
            }.items()
            if re.match(pattern, name)
        )
        counts[part] += parameter.numel()
    return counts


def assert_counts(model: ModelConfig) -> int:
    formula, built = parameter_counts(model), meta_counts(model)
    total = sum(built.values())
    assert {part: formula[part] for part in built} == built
    assert formula["total"] == total
    assert formula["non_embedding"] == total - built["embedding"] - built["head"]
    return total


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_has_the_size_of_its_label(path: Path) -> None:
    model = load_model(path)
    total = assert_counts(model)
    print(f"{path.stem}: {total:,} parameters")
    number, unit = re.fullmatch(r".*-([\d.]+)([mb])(?:-decoder)?", path.stem).groups()
    label = float(number) * {"m": 1e6, "b": 1e9}[unit]
    # labels leave out what a memory adds
    assert abs((total - parameter_counts(model)["memory"]) / label - 1) < TOLERANCE
    stated = re.search(r"([\d,.]+)M parameters", path.read_text())
    assert stated is not None
    assert float(stated.group(1).replace(",", "")) == pytest.approx(total / 1e6, abs=0.051)


@pytest.mark.parametrize("mixer", ["local_attention", "elastic_memory"])
def test_760m(mixer: str) -> None:
    """24 layers of 1,536 with 16 heads and 32K vocabulary: within 3 % of 760M, memory adding nothing."""
    tree = {"layers": 24, "hidden_size": 1536, "heads": 16, "vocab_size": 32_000, "chunk_size": 2048, "mixer": mixer}
    model = parse_config(ModelConfig, tree, "test")
    total = assert_counts(model)
    print(f"760M with {mixer}: {total:,} parameters")
    assert total == 777_856_512
    assert abs(total / 760e6 - 1) < 0.03
    for name in ("elastic-760m", "transformer-760m"):
        assert parameter_counts(load_model(model_file(name)))["total"] == total


@pytest.mark.parametrize("bias", [False, "query_key_value", True])
@pytest.mark.parametrize("qk_norm", [False, True, "projection"])
@pytest.mark.parametrize("tied", [False, True])
def test_formula_with_odd_shapes(tied: bool, qk_norm: bool | str, bias: bool | str) -> None:
    tree = {
        "layers": 3, "hidden_size": 96, "heads": 6, "kv_heads": 2, "head_dim": 10, "ffn_size": 130, "vocab_size": 77,
        "chunk_size": 8, "tie_embeddings": tied, "qk_norm": qk_norm, "bias": bias,
    }  # fmt: skip
    model = parse_config(ModelConfig, tree, "test")
    assert_counts(model)
    assert (parameter_counts(model)["head"] == 0) is tied


TITANS = {"kind": "titans", "inner_chunk": 8}


@pytest.mark.parametrize(
    ("mixer", "pairs"),
    [
        ("full_attention", 2), ({"kind": "melodi", "summaries": 2}, 2),
        ({"kind": "sequential", "mixers": [TITANS, "sliding_attention", "local_attention"]}, 3), (TITANS, 1),
    ],
)  # fmt: skip
def test_norms_of_queries_and_keys_are_counted(mixer: object, pairs: int) -> None:
    """A layer of the mixer beside one of local attention: two weights a pair, one for each channel of a head."""
    tree = {
        "layers": 2, "hidden_size": 32, "heads": 4, "vocab_size": 77, "chunk_size": 8,
        "memory": [{"layers": [0], "mixer": mixer}],
    }  # fmt: skip
    plain, normed = (parse_config(ModelConfig, {**tree, "qk_norm": qk_norm}, "test") for qk_norm in (False, True))
    assert assert_counts(normed) - assert_counts(plain) == pairs * 2 * 8


@pytest.mark.parametrize("kind", ["delta_net", "memory_caching", "log_linear"])
def test_recurrent_memories_have_no_biases_beside_attention(kind: str) -> None:
    of_segments = {"memory": "delta_net", "segment": 8}
    tree = {
        "layers": 2, "hidden_size": 32, "heads": 4, "vocab_size": 77, "chunk_size": 8, "bias": "query_key_value",
        "memory": [{"layers": [0], "mixer": {"kind": kind, **({} if kind == "delta_net" else of_segments)}}],
    }  # fmt: skip
    model = parse_config(ModelConfig, tree, "test")
    plain = parse_config(ModelConfig, {**tree, "bias": False}, "test")
    assert assert_counts(model) - assert_counts(plain) == 3 * 32


@pytest.mark.parametrize(("size", "memory"), [("100m", 777_600), ("200m", 1_166_400), ("400m", 1_555_200)])
def test_memory_of_the_paper(size: str, memory: int) -> None:
    """Table 4 of the Elastic Memory paper: 0.8M, 1.2M and 1.6M numbers of memory a row."""
    model = load_model(model_file(f"elastic-{size}"))
    found = 0
    sizes = {"batch": 1, "kv_heads": model.resolved_kv_heads}
    for layer in range(model.layers):
        for spec in model.mixer_at(layer).state_specs(model).values():
            if isinstance(spec, TensorSpec) and spec.kind == "memory":
                found += torch.Size(spec.sizes(sizes)).numel()
    assert found == memory
    assert found == model.resolved_head_dim**2 * model.heads * model.layers, (
        "the size of the paper's Infini-Transformer"
    )


@pytest.mark.parametrize(("size", "memory"), [("100m", 777_600), ("200m", 1_166_400), ("400m", 1_555_200)])
def test_melodi_has_the_memory_of_the_paper(size: str, memory: int) -> None:
    """Its Table 1 counts (N_mem + N_sum) d: the vectors that pass on, and the summary tokens."""
    model = load_model(model_file(f"melodi-{size}"))
    found = 0
    for layer in range(model.layers):
        mixer = model.mixer_at(layer)
        (spec,) = [spec for spec in mixer.state_specs(model).values() if spec.kind == "memory"]
        assert spec.shape == (mixer.summaries, "batch", "hidden")
        found += 2 * mixer.summaries * model.hidden_size
    assert found == memory
    # the rest of the model is the baseline's
    plain = parameter_counts(load_model(model_file(f"transformer-{size}")))
    assert {**parameter_counts(model), "memory": 0} == {
        **plain, "memory": 0, "total": plain["total"] + parameter_counts(model)["memory"],
        "non_embedding": plain["non_embedding"] + parameter_counts(model)["memory"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("summaries", "millions"), [(45, "1.5"), (90, "3.1"), (180, "6.4"), (360, "13.5"), (720, "30.1")]
)
def test_melodi_adds_the_parameters_of_the_paper(summaries: int, millions: str) -> None:
    """Its Table 3, from 1x to 16x memory."""
    model = load_model(model_file("melodi-100m"))
    mixer = model.mixer.model_copy(update={"summaries": summaries})
    added = model.layers * mixer.extra_parameters(model)
    assert added == 12 * (summaries * 720 + (2048 + summaries) * summaries)
    assert f"{added / 1e6:.1f}" == millions


def test_every_model_and_every_recipe_is_listed() -> None:
    listed = {name: run.model for name, run in SHIPPED.items()}
    assert {path.stem: path for path in MODELS if path.stem not in IMPORTED} == listed
    assert {run.recipe for run in SHIPPED.values()} == set(RECIPES) - {path for path in RECIPES if path.stem in OTHER}


@pytest.mark.parametrize("name", SHIPPED)
def test_recipe_with_model_loads(name: str) -> None:
    config = shipped(name)
    assert_counts(config.model)
    assert config.name == name
    assert config.model == load_model(model_file(name))
    # the batch can be split over one machine's devices
    for dp_size in (1, 2, 4, 8):
        config.accumulation_steps(dp_size)


def test_demo_loads() -> None:
    """It brings its model and runs on two processes with TP 2."""
    config = load_config(RunConfig, CONFIGS / "recipes" / "demo.yaml")
    assert_counts(config.model)
    assert config.name == "demo"
    config.accumulation_steps(1)


WORDS = [name for name, run in SHIPPED.items() if run.recipe.stem == "wikitext103"]


@pytest.mark.parametrize("name", WORDS)
def test_words_are_read_as_published(name: str) -> None:
    """The shapes and the training of infinity-former's comparison on WikiText-103."""
    config, plain = shipped(name), shipped("transformer-xl-150m").model
    model, data = config.model, config.data
    assert (model.layers, model.hidden_size, model.heads, model.ffn_size, model.chunk_size) == (16, 410, 10, 2100, 150)
    assert (config.global_rows, config.steps, config.optimizer.lr, model.dropout) == (40, 250_000, 2.5e-4, 0.1)
    assert (data.feeding, data.documents, data.reset, data.sequence_length) == ("streams", "join", "none", 150)
    assert model.model_copy(update={"mixer": plain.mixer}) == plain
    books = load_run(CONFIGS / "recipes" / "pg19.yaml", [], SHIPPED[name].model)
    changed = {"data": {"sources", "validation", "tokenizer"}}
    assert books.model_dump(exclude=changed) == config.model_dump(exclude=changed)


def test_the_standard_transformer_xl_has_its_published_size() -> None:
    assert round(parameter_counts(shipped("transformer-xl-150m").model)["total"] / 1e6) == 151


CHARACTERS = [name for name, run in SHIPPED.items() if run.recipe.stem == "enwik8"]


@pytest.mark.parametrize("name", CHARACTERS)
def test_characters_are_read_as_published(name: str) -> None:
    """The shapes and the training of LaMemo's appendix C on enwik8 and text8."""
    config, plain = shipped(name), shipped("transformer-xl-41m").model
    model, data = config.model, config.data
    assert (model.layers, model.hidden_size, model.heads, model.ffn_size, model.chunk_size) == (12, 512, 8, 2048, 512)
    assert (model.resolved_head_dim, model.mixer.memory_length, model.dropout, model.attention_dropout) == (
        64, 512, 0.1, 0.0,
    )  # fmt: skip
    assert (config.global_rows, config.steps, data.sequence_length) == (40, 100_000, 512)
    assert (data.feeding, data.documents, data.reset) == ("streams", "join", "none")
    optimizer = config.optimizer.model_dump()
    assert {key: optimizer[key] for key in ("lr", "betas", "eps", "weight_decay", "warmup_steps", "min_lr_ratio")} == {
        "lr": 2.5e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0, "min_lr_ratio": 0.0,
    }  # fmt: skip
    assert round(parameter_counts(model)["total"] / 1e6) == 41
    assert model.model_copy(update={"mixer": plain.mixer}) == plain
    letters = load_run(CONFIGS / "recipes" / "text8.yaml", ["model.vocab_size=29", f"name={name}"], SHIPPED[name].model)
    assert letters.model == model.model_copy(update={"vocab_size": 29})
    changed = {"data": {"sources", "validation", "tokenizer"}, "model": True}
    assert letters.model_dump(exclude=changed) == config.model_dump(exclude=changed)


def test_characters_of_books_load() -> None:
    config = load_config(RunConfig, CONFIGS / "recipes" / "books_characters.yaml")
    assert assert_counts(config.model) == 873_344
    assert config.name == "books_characters"
    assert config.model.mixer.memory_length == config.model.chunk_size == config.data.sequence_length
    config.accumulation_steps(1)


def test_words_have_the_batch_of_lamemo() -> None:
    """Its appendix C trains on WikiText-103 as the recipe does, on 64 rows."""
    config = shipped("lamemo-150m", "training.batch_tokens=9600")
    assert config.global_rows == 64
    assert config.model.mixer.memory_length == 150


TOKEN_MAPS = {"masked-mixer-46m": (16, 512), "masked-mixer-86m": (8, 1024)}


@pytest.mark.parametrize("name", TOKEN_MAPS)
def test_masked_mixers_are_read_as_published(name: str) -> None:
    """The shapes and the training of section S1.1 of "Language Model Memory and Memory Models for Language"."""
    config = shipped(name)
    model, optimizer = config.model, config.optimizer
    assert (model.layers, model.hidden_size) == TOKEN_MAPS[name]
    assert (model.mixer.form, model.mixer.kernel_width, model.mixer.map_size) == ("flat", 1, None)
    assert (model.norm, model.mlp, model.bias, model.resolved_ffn_size) == (
        "layer",
        "gelu",
        True,
        4 * model.hidden_size,
    )
    assert (model.chunk_size, config.data.sequence_length, config.global_rows, config.steps) == (512, 512, 128, 200_000)
    assert (optimizer.lr, optimizer.warmup(config.steps), optimizer.decay(config.steps)) == (5e-4, 500, 199_500)
    assert (optimizer.schedule, optimizer.decay_shape, optimizer.min_lr_ratio) == ("wsd", "linear", 0.0)


MEMORIES = {"memory-transformer-75m": (16, 256, 16, 512, "ones"), "memory-mixer-106m": (8, 512, 8, 1024, "zeros")}


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_models_have_the_published_shapes(name: str) -> None:
    """Figure 2 and Table 1 of the same paper: chunks of 256, four of them, one memory each."""
    model = shipped(name, "data.sequence_length=1024").model
    architecture, inside = model.architecture, model.layer_model(0)
    decoder = model.layers - architecture.encoder.layers
    shape = (architecture.encoder.layers, inside.hidden_size, decoder, model.hidden_size, architecture.fill)
    assert shape == MEMORIES[name]
    assert (model.chunk_size, architecture.slots, architecture.memories_per_chunk) == (256, 4, 1)
    assert architecture.positions == "fixed"


OTHERS = {*WORDS, *CHARACTERS, *TOKEN_MAPS, *MEMORIES}


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - OTHERS))
def test_training_is_the_published_one(name: str) -> None:
    """The papers' budgets and rates by size."""
    config, size = shipped(name), name.rpartition("-")[2]
    length, tokens, lr = {
        "760m": (4096, 30e9, 1.25e-3), "1.3b": (4096, 100e9, 7e-4),
    }.get(size, (32_768, 40e9, 2e-3))  # fmt: skip
    assert (config.data.sequence_length, config.training.tokens, config.optimizer.lr) == (length, tokens, lr)
    assert config.training.batch_tokens == 524_288
    assert config.optimizer.model_dump(include={"betas", "eps", "weight_decay", "grad_clip", "min_lr_ratio"}) == {
        "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1, "grad_clip": 1.0, "min_lr_ratio": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("size", ["100m", "200m", "400m", "760m", "1.3b"])
def test_baseline_differs_in_the_model_alone(size: str) -> None:
    elastic, plain = (
        shipped(f"{kind}-{size}").model_dump(exclude={"model", "name"}) for kind in ("elastic", "transformer")
    )
    elastic["data"].pop("documents")
    plain["data"].pop("documents")
    assert elastic == plain


@pytest.mark.parametrize(
    "path",
    MODELS + RECIPES,
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_every_value_is_commented(path: Path) -> None:
    """A value without a comment on its line is one nobody explained; section headers explain themselves."""
    bare = [
        line
        for line in path.read_text().splitlines()
        if re.search(r":\s+\S", line.split("#")[0]) and "#" not in line and not line.startswith("base:")
    ]
    assert not bare
