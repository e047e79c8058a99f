"""Memory model, one document: every chunk is encoded by itself, and read by the decoder behind the memories so far.

Chunk c of the decoder's text is [slots, tokens]; slot j holds the memories of the j-th of the newest chunks before c,
or what empty slots hold. With variable positions there are no empty slots, and every chunk is a text of its own.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, rms_norm, swiglu


def run(settings, model, weights: dict[str, Tensor], ids: Tensor) -> Answer:
    """Hidden states after the last norm [tokens, hidden_size], and the slots after the last whole chunk."""
    size, slots, count = model.chunk_size, settings.slots, settings.memories_per_chunk
    empty = torch.full((count, model.hidden_size), 1.0 if settings.fill == "ones" else 0.0, dtype=torch.float64)
    encoder_layers = settings.encoder.layers if settings.encoder else 0
    decoder = range(encoder_layers, model.layers)
    longer = model.model_copy(update={"chunk_size": slots * count + size})
    memories: list[Tensor] = []
    read_so_far: list[Tensor] = []
    outputs: list[Tensor] = []
    for number, begin in enumerate(range(0, len(ids), size)):
        part = ids[begin : begin + size].tolist()
        tokens = torch.stack([weights["embedding.weight"][i] for i in part])
        known = memories if settings.encoder else [empty] * min(number, slots)
        if settings.positions == "fixed":
            known = (known if settings.encoder else []) + [empty] * (slots - (len(known) if settings.encoder else 0))
            read_so_far.append(torch.cat((*known, tokens)))
        else:
            read_so_far = [torch.cat((*known, tokens))]
        hidden = torch.cat(read_so_far)
        for layer in decoder:
            hidden = one_layer(longer, longer.mixer_at(layer), weights, layer, hidden)
        outputs.append(normed(model, weights, "norm", hidden)[-len(tokens) :])
        if settings.encoder and len(part) == size:
            memories = [*memories, encoded(settings, model, weights, part)][-slots:]
    if not settings.encoder:
        return Answer(torch.cat(outputs), {})
    kept = torch.cat((*memories, *([torch.zeros_like(empty)] * (slots - len(memories)))))
    return Answer(torch.cat(outputs), {"memories": {"memories": kept[:, None]}})


def encoded(settings, model, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The memories of a chunk, [memories_per_chunk, hidden_size]."""
    inside = model.layer_model(0)
    hidden = torch.stack([weights["encoder_embedding.weight"][i] for i in ids])
    for layer in range(settings.encoder.layers):
        hidden = one_layer(inside, settings.encoder.mixer or model.mixer, weights, layer, hidden)
    prefix = f"layers.{settings.encoder.layers - 1}.writer."
    hidden = normed(inside, weights, f"{prefix}norm", hidden)
    part = len(ids) // settings.memories_per_chunk
    memories = [hidden[(i + 1) * part - 1] for i in range(settings.memories_per_chunk)]
    number = 0
    while f"{prefix}projections.{number}.weight" in weights:
        matrix, bias = (weights.get(f"{prefix}projections.{number}.{name}") for name in ("weight", "bias"))
        memories = [matrix @ memory + (0.0 if bias is None else bias) for memory in memories]
        number += 1
    return torch.stack(memories)


def one_layer(model, mixer, weights: dict[str, Tensor], layer: int, hidden: Tensor) -> Tensor:
    """One layer over hidden [rows, width], all of them from their text's start on."""
    prefix = f"layers.{layer}."
    oracle = importlib.import_module(f"tests.contract.oracles.{mixer.kind}")
    own = {name.removeprefix(f"{prefix}mixer."): w for name, w in weights.items() if name.startswith(f"{prefix}mixer.")}
    hidden = hidden + oracle.run(mixer, model, own, normed(model, weights, f"{prefix}mixer_norm", hidden)).output
    return hidden + swiglu(model, weights, prefix, hidden)


def normed(model, weights: dict[str, Tensor], name: str, hidden: Tensor) -> Tensor:
    """The norm called `name` over hidden [rows, width]."""
    return rms_norm(hidden, weights[f"{name}.weight"], model.norm_eps)
