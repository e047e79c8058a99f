"""`megamem convert from-hf`: transformers' models that ours can be, and our own exports, as weights to start from.

OUT/model.yaml           the `model` section, for `base:` of a run's configuration
OUT/weights.safetensors  FP32 weights by global name, for training.init_from
OUT/tokenizer/           where the source has one
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints.weights import IMPORTED_MODEL, IMPORTED_TOKENIZER, IMPORTED_WEIGHTS, WeightsHeader, write_weights
from megamem.config.load import apply_overrides, parse_config
from megamem.config.model import LayerMixer, MixerConfig, ModelConfig
from megamem.config.yaml_text import to_yaml
from megamem.errors import ConversionError
from megamem.hf.folder import refuse_existing, whole_folder
from megamem.hf.names import LLAMA, OLMO2, PREFIX, QWEN2, QWEN3, SCALING, renamed
from megamem.hf.source import IMPORTED, Source, open_source
from megamem.model.stage import meta_stage
from megamem.pipeline.start_weights import ADDED, OF_MEMORY, attention_name, name_beside
from tokenization.importing import import_tokenizer
from tokenization.tokenizer import Tokenizer

CLOSED = -6.0
"""A memory's gate before its sigmoid, when it lets 0.25 % of the memory through."""
LLAMA_TYPES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "olmo2": OLMO2}
"""Architectures that are a Llama but for what `llama_section` says, with the names of their tensors."""
FORMS: dict[str, dict[str, Any]] = {
    "qwen2": {"bias": "query_key_value"},
    "qwen3": {"qk_norm": True},
    "olmo2": {"qk_norm": "projection", "norm_position": "output"},
}
"""What the model section of some of them has besides."""
KNOWN = ("gpt2", *LLAMA_TYPES, "megamem", IMPORTED)
WEIGHTS, MODEL, TOKENIZER = IMPORTED_WEIGHTS, IMPORTED_MODEL, IMPORTED_TOKENIZER


def from_hf(
    source: Path, out: Path, overrides: Sequence[str] = (), vocab_multiple: int = 128, eos: str | None = None
) -> dict[str, Any]:
    """Write `out`; it appears whole or not at all.

    Args:
        source: a folder of transformers' form with safetensors, a GGUF file, or what an import without memories wrote.
        overrides: of the model section, as `chunk_size=512` or `memory=[{layers: [8], mixer: elastic_memory}]`.
        vocab_multiple: embedding and head get so many rows more that this divides them.
        eos: the token that ends documents, where the source's tokenizer does not say.
    Returns: what was found. Raises: ConversionError, ConfigError naming file and field.
    """
    refuse_existing(out)
    opened, kind = known_source(source)
    section = source_section(opened, kind)
    ours = kind in ("megamem", IMPORTED)
    if section["vocab_size"] % vocab_multiple and not ours:
        section["padded_vocab_size"] = -(-section["vocab_size"] // vocab_multiple) * vocab_multiple
    tree: dict[str, Any] = apply_overrides({"model": section}, [f"model.{override}" for override in overrides])
    if not ours and tree["model"].get("adaptive"):
        raise ConversionError(f"{source}: model.adaptive does not go with a {kind}, whose embedding is one table")
    model = with_closed_gates(parse_config(ModelConfig, tree["model"], f"{source}: as a model section"))
    check_windows(opened, section, model, overrides)
    tokenizer = None
    with whole_folder(out) as partial:
        # before the weights, which take long to read
        if kind == IMPORTED and (source / TOKENIZER).is_dir():
            shutil.copytree(source / TOKENIZER, partial / TOKENIZER)
            tokenizer = Tokenizer.load(partial / TOKENIZER)
        with tempfile.TemporaryDirectory() as scratch:
            if (files := opened.tokenizer(Path(scratch))) is not None:
                tokenizer = import_tokenizer(files, partial / TOKENIZER, eos)
            if eos is not None and files is None:
                raise ConversionError(f"{source}: --eos {eos}: there is no tokenizer to import whose documents end so")
        words = None if tokenizer is None else tokenizer.vocab_size
        if words is not None and words > model.vocab_size:
            raise ConversionError(f"{source}: its tokenizer has {words:,} tokens, the model {model.vocab_size:,}")
        weights, new_parameters = collect(opened, kind, model)
        header = WeightsHeader.of_model(model, None if tokenizer is None else tokenizer.vocabulary_hash, new_parameters)
        write_weights(weights, partial / WEIGHTS, header)
        text = to_yaml({"model": model.model_dump(mode="json")})
        (partial / MODEL).write_text(f"# from {' '.join(str(source).split())}\n{text}", encoding="utf-8")
    return {
        "architecture": kind,
        "parameters": sum(value.numel() for value in weights.values()),
        "new_parameters": new_parameters,
        "tokenizer": words,
        "unused": sorted(opened.unused()),
    }


def known_source(path: Path) -> tuple[Source, str]:
    """Open a model in transformers' form; return it and its architecture. Raises ConversionError for unknown ones."""
    opened = open_source(path)
    kind = opened.config.get("model_type")
    if kind not in KNOWN:
        raise ConversionError(f"{path}: architecture {kind!r} is not known; known are {', '.join(KNOWN)}")
    if "quantization_config" in opened.config:
        raise ConversionError(f"{path}: quantised weights are not read; take the model's BF16 or FP32 form")
    return opened, kind


def collect(source: Source, kind: str, model: ModelConfig) -> tuple[dict[str, Tensor], list[str]]:
    """FP32 weights by our names, and the names of new parameters: those of added memories.

    Queries, keys and values of a memory beside the attention (`added_memory`) are new, but start as the attention's
    where they have its shape; for all others the source has nothing.

    Raises: ConversionError where a tensor of the backbone is missing or of another shape.
    """
    shapes = {name: tuple(p.shape) for name, p in meta_stage(model).named_parameters()}
    take = {"gpt2": gpt2_tensor, "megamem": own_tensor, IMPORTED: imported_tensor}.get(kind, llama_tensor)
    weights: dict[str, Tensor] = {}
    new_parameters = []
    for name, shape in shapes.items():
        value = take(source, name)
        counterpart = attention_name(name) if value is None else None
        if counterpart is not None:
            value = take(source, counterpart)
        if value is None and (beside := name_beside(name)) is not None:
            value = take(source, beside)  # the source has a memory here, the model has none
        new = value is None or (counterpart is not None and OF_MEMORY in name)
        if new:
            new_parameters.append(name)
        if value is None or (new and tuple(value.shape) != shape):
            continue
        if not value.is_floating_point() or value.element_size() < 2:
            raise ConversionError(f"{source.folder}: {name} is stored as {value.dtype}; quantised weights are not read")
        value = value.float()
        if name in ("embedding.weight", "head.weight") and value.shape[0] < shape[0]:
            if value.shape[0] < model.vocab_size:
                raise ConversionError(
                    f"{source.folder}: {name} has {value.shape[0]:,} rows, model.vocab_size is {model.vocab_size:,}; "
                    "rows that are never predicted are added by model.padded_vocab_size"
                )
            value = torch.cat((value, value.new_zeros(shape[0] - value.shape[0], *value.shape[1:])))
        if tuple(value.shape) != shape:
            raise ConversionError(f"{source.folder}: {name} would have shape {list(value.shape)}, not {list(shape)}")
        weights[name] = value.contiguous()
    _check_tied(source, kind, model, weights)
    theirs = {name for name, _ in meta_stage(source_model(source, kind)).named_parameters()}
    if lacking := [name for name in new_parameters if name in theirs or not ADDED.fullmatch(name)]:
        raise ConversionError(f"{source.folder}: holds nothing for {lacking[0]}")
    return weights, new_parameters


def _check_tied(source: Source, kind: str, model: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise ConversionError where the source's head is not its embedding, though its configuration says so.

    weights: by our names; of them the embedding counts, [padded vocabulary, hidden].
    """
    head = source.get("lm_head.weight") if kind in ("gpt2", *LLAMA_TYPES) and model.tie_embeddings else None
    embedding = weights.get("embedding.weight")
    if head is not None and embedding is not None and not torch.equal(head.float(), embedding[: len(head)]):
        said = (
            "tie_word_embeddings is true" if source.config.get("tie_word_embeddings", True) else "tie_embeddings=true"
        )
        raise ConversionError(
            f"{source.folder}: {said}, but lm_head.weight is not the embedding; the head would be lost: set it to false"
        )


def source_section(source: Source, kind: str) -> dict[str, Any]:
    """Return the model section of what the source holds. Raises ConversionError for what our model cannot be."""
    try:
        section = {"gpt2": gpt2_section, "megamem": own_section, IMPORTED: imported_section}.get(kind, llama_section)
        return section(source)
    except KeyError as error:
        raise ConversionError(f"{source.folder}: its configuration has no {error.args[0]}") from None


def source_model(source: Source, kind: str) -> ModelConfig:
    """Return the model that the source holds, before anything is added."""
    return parse_config(ModelConfig, source_section(source, kind), str(source.folder))


def with_closed_gates(model: ModelConfig) -> ModelConfig:
    """Return the model with every memory's gate closed at the start, unless its `gate_init` was given.

    Such a model computes what it did before the memories were added. Every gate between local attention and a memory
    takes its start value from a field called `gate_init`, that of a mixer within another mixer too. A memory whose
    output is added through a projection of its own needs no gate for that: its `output_init` becomes `zero`, and gates
    within such a memory stay as they are.
    """
    layers = [LayerMixer(layers=entry.layers, mixer=_closed(entry.mixer)) for entry in model.memory]
    return model.model_copy(update={"mixer": _closed(model.mixer), "memory": layers})


def _closed(mixer: MixerConfig) -> MixerConfig:
    """Return the mixer, and the mixers in its fields, closed where neither `gate_init` nor `output_init` was given."""
    changes: dict[str, object] = {}
    fields = type(mixer).model_fields
    if {"gate_init", "output_init"}.isdisjoint(mixer.model_fields_set):
        if "output_init" in fields:
            changes["output_init"] = "zero"
        elif "gate_init" in fields:
            changes["gate_init"] = CLOSED
    silent = "zero" in (changes.get("output_init"), getattr(mixer, "output_init", None))
    for name, value in mixer:
        if silent and name == "memory":
            continue
        if isinstance(value, MixerConfig):
            changes[name] = _closed(value)
        elif isinstance(value, list):
            changes[name] = [_closed(item) if isinstance(item, MixerConfig) else item for item in value]
    return mixer.model_copy(update=changes)


def _refuse(source: Source, expected: Mapping[str, Any]) -> None:
    """Raise ConversionError at the first setting of the configuration that our model does not know."""
    for name, value in expected.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if (found := source.config.get(name, allowed[0])) not in allowed:
            raise ConversionError(f"{source.folder}: {name} {found!r} is not supported; only {allowed[0]!r} is")


def llama_section(source: Source) -> dict[str, Any]:
    """Return the model section of a Llama, or of what differs from one in biases, norms or the reach of attention."""
    c = source.config
    rope = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or rope
    form = scaling.get("rope_type", scaling.get("type", "default"))
    if form not in ("default", "llama3"):
        raise ConversionError(f"{source.folder}: rope_type {form!r} is not supported; only 'default' and 'llama3' are")
    _refuse(source, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"})
    return {
        "layers": c["num_hidden_layers"],
        "hidden_size": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        **({"head_dim": c["head_dim"]} if c.get("head_dim") else {}),
        "ffn_size": c["intermediate_size"],
        "vocab_size": c["vocab_size"],
        "chunk_size": 512,
        **attention_reach(source),
        "tie_embeddings": c.get("tie_word_embeddings", False),
        **FORMS.get(c["model_type"], {}),
        "rope_theta": float(scaling.get("rope_theta") or c.get("rope_theta") or 10_000.0),
        **({"rope_scaling": {ours: scaling[theirs] for ours, theirs in SCALING.items()}} if form == "llama3" else {}),
        "norm_eps": c["rms_norm_eps"],
        "init_std": c.get("initializer_range", 0.02),
    }


def attention_reach(source: Source) -> dict[str, Any]:
    """Return the mixers of layers that read all tokens, or only those of a window, as transformers decides it."""
    c, layers = source.config, source.config["num_hidden_layers"]
    window, types = None, ["full_attention"] * layers
    if c["model_type"] == "mistral" and (window := c.get("sliding_window", 4096)):
        types = ["sliding_attention"] * layers
    elif c["model_type"] in ("qwen2", "qwen3") and c.get("use_sliding_window", False):
        window, first = c.get("sliding_window", 4096), c.get("max_window_layers", 28)
        # where a file does not say it, the layers from `first` on have the window
        full = min(first, layers) if window else layers
        types = c.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ConversionError(f"{source.folder}: layers of {unknown[0]!r} are not supported; only full or sliding ones")
    sliding = [layer for layer, form in enumerate(types) if form == "sliding_attention"]
    mixer = {"kind": "sliding_attention", "window": window}
    if len(sliding) == layers:
        return {"mixer": mixer}
    return {"mixer": "full_attention", **({"memory": [{"layers": sliding, "mixer": mixer}]} if sliding else {})}


def check_windows(source: Source, section: Mapping[str, Any], model: ModelConfig, overrides: Sequence[str]) -> None:
    """Raise ConversionError where `memory=` takes away the windows that some layers of the source attend within.

    section: of the source; overrides: with `mixer=` another reach of all layers is asked for.
    """
    given = section.get("memory") or []
    kinds = [entry["mixer"] if isinstance(entry["mixer"], str) else entry["mixer"]["kind"] for entry in given]
    sliding = [entry for entry, kind in zip(given, kinds, strict=True) if kind == "sliding_attention"]
    windows = {layer for entry in sliding for layer in entry["layers"]}
    named = {layer for entry in model.memory for layer in entry.layers}
    if (lost := sorted(windows - named)) and not any(override.startswith("mixer=") for override in overrides):
        raise ConversionError(
            f"{source.folder}: memory= replaces the windows of layers {', '.join(map(str, lost))}; list them in it "
            "too, or say with mixer= what they become"
        )


def llama_tensor(source: Source, name: str) -> Tensor | None:
    """Our tensor `name` from a Llama or one of its kind."""
    theirs = renamed(name, LLAMA_TYPES[source.config["model_type"]])
    return None if theirs is None else source.get(theirs)


def gpt2_section(source: Source) -> dict[str, Any]:
    """Return the model section of a GPT-2."""
    c = source.config
    _refuse(
        source,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "add_cross_attention": False,
        },
    )
    return {
        "layers": c["n_layer"],
        "hidden_size": c["n_embd"],
        "heads": c["n_head"],
        "ffn_size": c.get("n_inner") or 4 * c["n_embd"],
        "vocab_size": c["vocab_size"],
        # the largest up to 512 that divides the learned positions
        "chunk_size": max(size for size in range(1, 513) if c["n_positions"] % size == 0),
        "mixer": "full_attention",
        "norm": "layer",
        "mlp": "gelu",
        "bias": True,
        "positions": "learned",
        "max_positions": c["n_positions"],
        "tie_embeddings": True,
        "norm_eps": c["layer_norm_epsilon"],
        "init_std": c.get("initializer_range", 0.02),
    }


GPT2 = {
    "embedding.weight": "wte.weight",
    "positions": "wpe.weight",
    "norm": "ln_f",
    "mixer_norm": "ln_1",
    "mlp_norm": "ln_2",
    "mixer.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
"""Our name -> GPT-2's, without layer and .weight or .bias."""
JOINED = ("query", "key", "value")
"""GPT-2 keeps these side by side in attn.c_attn."""


def gpt2_tensor(source: Source, name: str) -> Tensor | None:
    """Our tensor `name` from a GPT-2, whose projections are stored transposed."""
    prefix = "transformer." if "transformer.wte.weight" in source.names else ""
    if name in GPT2:
        return source.get(prefix + GPT2[name])
    part, _, form = name.rpartition(".")
    if part in GPT2:
        return source.get(f"{prefix}{GPT2[part]}.{form}")
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", part)
    if found is None:
        return None
    layer, inner = found[1], found[2]
    if inner.removeprefix("mixer.") in JOINED:
        joined = source.get(f"{prefix}h.{layer}.attn.c_attn.{form}")
        value = None if joined is None else joined.chunk(3, -1)[JOINED.index(inner.removeprefix("mixer."))]
    elif inner in GPT2:
        value = source.get(f"{prefix}h.{layer}.{GPT2[inner]}.{form}")
    else:
        return None
    return value.T if value is not None and value.ndim == 2 else value


def own_section(source: Source) -> dict[str, Any]:
    """Return the model section of an export."""
    return _own(source, source.config["megamem"])


def own_tensor(source: Source, name: str) -> Tensor | None:
    """Our tensor `name` from an export."""
    return source.get(PREFIX + name)


def imported_section(source: Source) -> dict[str, Any]:
    """Return the model section of an import."""
    return _own(source, source.config["model"])


def _own(source: Source, section: object) -> dict[str, Any]:
    """Return a model section of our own. Raises ConversionError where it is none."""
    if not isinstance(section, dict):
        raise ConversionError(f"{source.folder}: its model section is {section!r}, no mapping of fields")
    # what files may leave out has the value of a new model
    return parse_config(ModelConfig, section, str(source.folder)).model_dump(mode="json")


def imported_tensor(source: Source, name: str) -> Tensor | None:
    """Our tensor `name` from an import."""
    return source.get(name)
