"""Recurrent Memory Transformer, one document: every chunk is read again with all that came before it.

Chunk c of the layers' text is [memory_c + r, tokens, w] (read_write) or [memory_c, tokens but the last, memory_c]
(overwrite); memory_{c+1} is what the last norm makes of its last rows.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, rms_norm, swiglu


def run(settings, model, weights: dict[str, Tensor], ids: Tensor) -> Answer:
    """Hidden states after the last norm [tokens, hidden_size], and the memory after the last whole chunk.

    Before there is one the state holds zeros, whatever the first memory is.
    """
    count, size = settings.memory_tokens, model.chunk_size
    write_rows = count if settings.form == "read_write" else 0
    inside = model.model_copy(update={"chunk_size": count + size + write_rows})
    memory = torch.zeros(count, model.hidden_size, dtype=torch.float64)
    if settings.form == "overwrite":
        memory = memory + 1.0
    read_so_far: list[Tensor] = []
    outputs: list[Tensor] = []
    for begin in range(0, len(ids), size):
        tokens = torch.stack([weights["embedding.weight"][i] for i in ids[begin : begin + size].tolist()])
        whole = len(tokens) == size
        if settings.form == "read_write":
            rows = [memory + weights["memory_rows.read"], tokens]
            rows += [weights["memory_rows.write"]] if whole else []
        else:
            rows = [memory, torch.cat((tokens[:-1], memory)) if whole else tokens]
        read_so_far.append(torch.cat(rows))
        hidden = layers(inside, weights, torch.cat(read_so_far))[-len(read_so_far[-1]) :]
        outputs.append(hidden[count : count + len(tokens)])
        if whole:
            memory = hidden[-count:]
    kept = memory if len(ids) >= size else torch.zeros_like(memory)
    return Answer(torch.cat(outputs), {"memory_tokens": {"memory_tokens": kept[:, None]}})


def layers(model, weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """All layers and the last norm over hidden [rows, hidden_size]."""
    for layer in range(model.layers):
        mixer, prefix = model.mixer_at(layer), f"layers.{layer}."
        oracle = importlib.import_module(f"tests.contract.oracles.{mixer.kind}")
        own = {
            name.removeprefix(f"{prefix}mixer."): w for name, w in weights.items() if name.startswith(f"{prefix}mixer.")
        }
        normed = rms_norm(hidden, weights[f"{prefix}mixer_norm.weight"], model.norm_eps)
        hidden = hidden + oracle.run(mixer, model, own, normed).output
        hidden = hidden + swiglu(model, weights, prefix, hidden)
    return rms_norm(hidden, weights["norm.weight"], model.norm_eps)
