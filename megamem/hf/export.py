"""`megamem convert to-hf`: a training checkpoint of any layout as a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedConfig

import megamem.hf  # noqa: F401  (registers the architecture with the Auto classes)
from checkpoints.folder import Checkpoint
from checkpoints.read import read_weights
from checkpoints.verify import verify
from checkpoints.whole import PORTABLE, whole_model
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.errors import ConversionError
from megamem.hf.card import model_card
from megamem.hf.configuration import MegamemConfig
from megamem.hf.folder import refuse_existing, whole_folder
from megamem.hf.names import LLAMA, PREFIX, SCALING, is_llama, renamed
from megamem.hf.tokenizer import export_tokenizer
from megamem.memory.base import DTYPES, Chunk
from megamem.model.stage import Stage
from megamem.pipeline.reader import ChunkReader
from megamem.tensor_files import write_tensors
from tokenization.tokenizer import Tokenizer

FACTS = "conversion.json"
PARITY_CHUNKS = 4


@dataclass(frozen=True)
class Parity:
    """How far the exported model is from the training model on the same tokens, both in the export's dtype."""

    tokens: int
    max_diff: float
    """Largest difference of two logits."""
    max_logit: float
    """Largest logit, for scale."""


def to_hf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str = "fp32",
    shard_bytes: int = 4 * 2**30,
    native: bool = True,
    tokenizer: Path | None = None,
    evaluate: Callable[[Stage], Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Write `out`; it appears whole or not at all.

    Args:
        checkpoint: complete; every file is hashed first.
        dtype: of the weights, `fp32` or `bf16`.
        shard_bytes: largest safetensors file.
        native: write models that are one as a `LlamaForCausalLM`, which needs no megamem.
        tokenizer: its folder; none is written if not given.
        evaluate: measures the model, for the card.
    Returns: what FACTS in the folder says. Raises: CheckpointError, ConversionError, ConfigError, DataError.
    """
    refuse_existing(out)
    verify(checkpoint)
    run = checkpoint.run()
    model = parse_config(ModelConfig, run["config"]["model"], f"{checkpoint.path}: model")
    model = model.model_copy(update=PORTABLE)  # users of the export need no kernel of the training
    words = None if tokenizer is None else Tokenizer.load(tokenizer)
    if words is not None and words.vocab_size > model.vocab_size:
        raise ConversionError(
            f"{tokenizer}: has {words.vocab_size:,} tokens, the model {model.vocab_size:,}; give the tokenizer it was "
            "trained with"
        )
    trained_with = run.get("vocabulary_sha256")
    if words is not None and trained_with not in (None, words.vocabulary_hash):
        raise ConversionError(
            f"{tokenizer}: is the tokenizer {words.vocabulary_hash[:12]}, the model was trained with "
            f"{trained_with[:12]}; give that one, or --no-tokenizer"
        )
    llama = native and is_llama(model)
    begun = [phase for phase in run.get("phases", []) if phase["first_step"] < run["step"]]
    length = max(part["sequence_length"] for part in (run, *begun))
    config = (
        llama_config(model, length)
        if llama
        else MegamemConfig(megamem=model.model_dump(mode="json"), max_position_embeddings=length)
    )
    ends = {} if words is None else {"bos_token_id": words.meta.bos_id, "eos_token_id": words.eos_id}
    with whole_folder(out) as partial:
        _write_config(partial, config, dtype, llama, ends)
        if words is not None and tokenizer is not None:
            export_tokenizer(tokenizer, words, partial)
        written = write_shards(partial, _named(checkpoint, model, DTYPES[dtype], llama), shard_bytes)
        stage = whole_model(checkpoint, model, DTYPES[dtype])
        facts = {
            "checkpoint": str(checkpoint.path),
            "step": run["step"],
            "tokens": run["tokens"],
            "architecture": "llama" if llama else MegamemConfig.model_type,
            "dtype": dtype,
            "parameters": written,
            "parity": asdict(parity(stage, partial, DTYPES[dtype])),
            "evaluation": {} if evaluate is None else dict(evaluate(stage)),
            "megamem": run["megamem"],
        }
        (partial / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(model_card(out.name, model, run, facts), encoding="utf-8")
    return facts


def rope_parameters(model: ModelConfig) -> dict[str, object]:
    """Return the model's rotary frequencies in transformers' words."""
    if model.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": model.rope_theta}
    scaling = model.rope_scaling.model_dump()
    return {"rope_type": "llama3", "rope_theta": model.rope_theta, **{SCALING[name]: scaling[name] for name in scaling}}


def llama_config(model: ModelConfig, trained_length: int) -> LlamaConfig:
    """Return the configuration under which transformers' Llama computes the same."""
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.resolved_ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.resolved_kv_heads,
        head_dim=model.resolved_head_dim,
        rms_norm_eps=model.norm_eps,
        rope_parameters=rope_parameters(model),
        tie_word_embeddings=model.tie_embeddings,
        initializer_range=model.init_std,
        attention_dropout=model.attention_dropout,
        max_position_embeddings=trained_length,
        bos_token_id=None,
        eos_token_id=None,
    )


def _write_config(folder: Path, config: PreTrainedConfig, dtype: str, llama: bool, ends: dict[str, Any]) -> None:
    config.architectures = ["LlamaForCausalLM" if llama else "MegamemForCausalLM"]
    config.dtype = DTYPES[dtype]
    for name, value in ends.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    GenerationConfig(**ends, pad_token_id=ends.get("eos_token_id")).save_pretrained(folder)


def _named(checkpoint: Checkpoint, model: ModelConfig, dtype: torch.dtype, llama: bool) -> Iterator[tuple[str, Tensor]]:
    """Weights one after the other, under the names of the export."""
    for name, value in read_weights(checkpoint):
        exported = renamed(name, LLAMA) if llama else PREFIX + name
        assert exported is not None, name
        yield exported, value.to(dtype)


def write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Write named tensors [...] to safetensors files of at most `shard_bytes` and their index; one file goes without.

    Returns the number of values written.

    No more than one file's tensors are in memory at a time.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    held = total = count = 0

    def flush() -> None:
        write_tensors(folder / f"part-{len(shards)}", pending, {"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and held + tensor.nbytes > shard_bytes:
            flush()
            held = 0
        pending[name] = tensor.contiguous()
        held, total, count = held + tensor.nbytes, total + tensor.nbytes, count + tensor.numel()
    flush()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return count
    places: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{index}").rename(folder / file)
        places |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return count


def parity(stage: Stage, folder: Path, dtype: torch.dtype) -> Parity:
    """Compare an export with the training model over some chunks of random tokens."""
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    size = stage.config.chunk_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(stage.config.vocab_size, (PARITY_CHUNKS * size, 1), generator=generator)
    largest = scale = 0.0
    with torch.no_grad():
        reader = ChunkReader(stage)
        groups = reader.begin(Chunk((0,)))
        cache = None
        for begin in range(0, len(tokens), size):
            part = tokens[begin : begin + size]
            hidden = reader.read(part, Chunk((begin,)), groups)
            assert hidden is not None
            ours = stage.logits(hidden)[:, 0, : stage.config.vocab_size]
            output = exported(part.T, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            if not bool(ours.isfinite().all() and output.logits.isfinite().all()):
                raise ConversionError(f"{folder}: logits of the training model or of the export are not finite")
            largest = max(largest, (ours - output.logits[0]).abs().max().item())
            scale = max(scale, ours.abs().max().item())
    return Parity(len(tokens), largest, scale)
