"""Bytes of memory states, from their declarations alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from megamem.config.model import ModelConfig
from megamem.errors import LayoutError
from megamem.memory.base import Growing, StateSpec, TensorSpec


def state_sizes(model: ModelConfig, component: str, rows: int, open_tokens: int = 0) -> dict[str, int]:
    """Return the named sizes in which the state of a component is declared, for `rows` rows, before any split."""
    of_layer = component.startswith("layers.")
    inside = model.layer_model(int(component.removeprefix("layers."))) if of_layer else model
    return {**inside.state_sizes, "batch": rows, "open": open_tokens}


def state_bytes(
    specs: StateSpec, sizes: Mapping[str, int], compute: torch.dtype, tp_size: int = 1, chunks_seen: int = 0
) -> dict[str, int]:
    """Return the bytes that one layer's state takes on one tensor-parallel rank.

    Args:
        specs: the declarations (`MixerConfig.state_specs`).
        sizes: the named sizes (`state_sizes`).
        compute: dtype of the activations.
        chunks_seen: finished chunks; growing lists hold one entry for each, up to their limit. Rows share one grid of
            chunks, as in training; left-padded rows may need one entry more.

    Returns: bytes by kind of tensor, `memory` and `open`.
    Raises: LayoutError if an axis that is split over ranks does not divide evenly.
    """
    total = {"memory": 0, "open": 0}
    for spec in specs.values():
        if isinstance(spec, TensorSpec):
            total[spec.kind] += _tensor_bytes(spec, sizes, compute, tp_size)
            continue
        entries = chunks_seen if spec.limit is None else min(chunks_seen, spec.limit)
        for part in spec.entry.values():
            total[part.kind] += entries * _tensor_bytes(part, sizes, compute, tp_size)
    return total


def model_state_bytes(
    model: ModelConfig, rows: int, compute: torch.dtype, tp_size: int = 1, context_tokens: int = 0
) -> dict[str, int]:
    """Return the bytes that the states of all layers take on one tensor-parallel rank after `context_tokens`.

    Exact at chunk borders. Inside a chunk `open` counts all of its tokens so far: exact for mixers that work on whole
    chunks, an upper bound for those whose blocks are shorter.

    Returns: bytes by kind of tensor, `memory` and `open`.
    Raises: LayoutError as `state_bytes`; ValueError for negative tokens.
    """
    if context_tokens < 0:
        raise ValueError(f"context_tokens must not be negative, got {context_tokens}")
    chunks, open_tokens = divmod(context_tokens, model.chunk_size)
    total = {"memory": 0, "open": 0}
    for name, specs in model.component_specs().items():
        # inside a chunk, layers have also read the rows that stand before its tokens
        before = _rows_before(model, name)
        sizes = state_sizes(model, name, rows, open_tokens + before if open_tokens else 0)
        for kind, count in state_bytes(specs, sizes, compute, tp_size, chunks).items():
            total[kind] += count
    return total


def _rows_before(model: ModelConfig, component: str) -> int:
    """Return how many rows in front of a chunk's tokens a component keeps something of until the chunk ends."""
    if not component.startswith("layers."):
        return 0
    side = model.side_rows_at(int(component.removeprefix("layers.")))
    return model.architecture.rows_before + (0 if side is None else side.before)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a rank's states in host memory, where it reads text without gradients, and of their copies."""

    held: int
    """What lies there once the text is read; part of what `state_bytes` counts."""
    to_device: int
    """Copied to the device by the text's last chunk, at most."""
    to_host: int
    """Copied to the host by each chunk."""
    for_token: int
    """Copied to the device by one more token, at most."""


def host_memory(model: ModelConfig, rows: int, compute: torch.dtype, tp_size: int = 1, chunks: int = 1) -> HostMemory:
    """Return what all layers of one tensor-parallel rank keep in host memory, for `rows` texts of so many chunks.

    Raises: LayoutError as `state_bytes`.
    """
    held = to_device = to_host = for_token = 0.0
    for component, specs in model.component_specs().items():
        sizes = state_sizes(model, component, rows)
        for spec in specs.values():
            if not isinstance(spec, Growing) or spec.host is None:
                continue
            entry = sum(_tensor_bytes(part, sizes, compute, tp_size) for part in spec.entry.values() if part.host)

            def copied(tokens: int, seen: int, entry: int = entry, spec: Growing = spec) -> float:
                """Return the bytes that a call of so many tokens reads, after so many finished chunks."""
                assert spec.host is not None
                entries = seen if spec.limit is None else min(seen, spec.limit)
                return entry * min(float(entries), tokens * spec.host.memories / spec.host.entry)

            held += entry * (chunks if spec.limit is None else min(chunks, spec.limit))
            to_device += copied(sizes["chunk"], chunks - 1)
            to_host += entry
            for_token += copied(1, chunks)
    return HostMemory(*(round(count) for count in (held, to_device, to_host, for_token)))


def stage_state_bytes(
    model: ModelConfig, layers: range, rows: int, compute: torch.dtype, tp_size: int = 1, chunks_seen: int = 0
) -> dict[str, int]:
    """Count the bytes of the states that the pipeline stage with `layers` holds on one tensor-parallel rank.

    The first stage also holds the memories that span the model, and what side rows are made of. Returns and raises as
    `state_bytes`.
    """
    return component_bytes(model, model.component_specs(layers), rows, compute, tp_size, chunks_seen)


def component_bytes(
    model: ModelConfig,
    specs: Mapping[str, StateSpec],
    rows: int,
    compute: torch.dtype,
    tp_size: int = 1,
    chunks_seen: int = 0,
) -> dict[str, int]:
    """Count the bytes of a model's states with such `specs`, by component. Returns and raises as `state_bytes`."""
    total = {"memory": 0, "open": 0}
    for name, declared in specs.items():
        sizes = state_sizes(model, name, rows)
        for kind, count in state_bytes(declared, sizes, compute, tp_size, chunks_seen).items():
            total[kind] += count
    return total


def split_state_bytes(
    model: ModelConfig, rows: int, compute: torch.dtype, tp_size: int = 1, chunks_seen: int = 0
) -> dict[str, int]:
    """Return the bytes of all layers' states on one tensor-parallel rank, by kind.

    Keys: `fixed`, tensors whose size does not change; `banks`, lists that grow with chunks.

    Raises: LayoutError as `state_bytes`.
    """
    total = {"fixed": 0, "banks": 0}
    for component, specs in model.component_specs().items():
        sizes = state_sizes(model, component, rows)
        for name, spec in specs.items():
            kind = "fixed" if isinstance(spec, TensorSpec) else "banks"
            total[kind] += sum(state_bytes({name: spec}, sizes, compute, tp_size, chunks_seen).values())
    return total


def _tensor_bytes(spec: TensorSpec, sizes: Mapping[str, int], compute: torch.dtype, tp_size: int) -> int:
    """Return the bytes of one tensor on one tensor-parallel rank. Raises LayoutError as `state_bytes`."""
    if spec.shard is not None and sizes[spec.shard] % tp_size:
        raise LayoutError(
            f"parallel.tp: {tp_size} ranks cannot share {sizes[spec.shard]} {spec.shard} of a state evenly"
        )
    return prod(spec.sizes(sizes, tp_size)) * spec.torch_dtype(compute).itemsize
