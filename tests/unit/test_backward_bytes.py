"""Backward passes of recurrences move bytes in proportion to their tokens.

The gradient of a slice is zeros as long as what it was taken from: a recurrence that slices its inner chunks out of a
chunk moves their number times its length on the way back.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.planning.measured_part import Part, Share, measure_part

MIXERS: dict[str, dict[str, Any]] = {
    "linear attention": {"kind": "linear_attention"},
    "linear attention, normalized": {"kind": "linear_attention", "features": "elu", "normalizer": True},
    "RetNet": {"kind": "retnet"},
    "SSD": {"kind": "ssd"},
    "DeltaNet": {"kind": "delta_net"},
    "gated DeltaNet": {"kind": "delta_net", "decay": True},
    "DLA": {"kind": "dla"},
    "Titans": {"kind": "titans"},
    "Memora": {"kind": "memora"},
    "log-linear attention": {"kind": "log_linear", "memory": {"kind": "linear_attention"}, "segment": 256},
    "DLA + GRM": {"kind": "memory_caching", "memory": {"kind": "dla"}, "segment": 256},
}


BY_CHUNK: dict[str, dict[str, Any]] = {
    "full attention": {"kind": "full_attention"},
    "full attention, some chunks": {"kind": "full_attention", "max_chunks": 2},
    "local attention": {"kind": "local_attention"},
    "sliding attention": {"kind": "sliding_attention", "window": 64},
    "Elastic Memory": {"kind": "elastic_memory", "order": 16},
    "Transformer-XL": {"kind": "transformer_xl", "memory_length": 64},
    "Compressive Transformer": {"kind": "compressive_transformer", "memory_length": 64, "compressed_length": 32},
    "Memorizing Transformer": {"kind": "memorizing_attention", "queue": 128},
    "infinity-former": {"kind": "infinity_former", "basis": 16, "samples": 16},
    "Infini-attention": {"kind": "infini_attention"},
    "masked mixer": {"kind": "masked_mixer"},
}
"""Mixers that go from chunk to chunk, inside a call or, where gradients stop, in one for each."""


def bytes_moved(mixer: dict[str, Any], tokens: int, chunks: int = 1) -> float:
    """Bytes that the operations of a layer's backward pass read and write, for one call of chunks of so many tokens."""
    sizes = {"layers": 1, "hidden_size": 128, "heads": 2, "vocab_size": 64, "chunk_size": tokens}
    model = parse_config(ModelConfig, {**sizes, "mixer": mixer}, "test")
    (chunk,) = measure_part(Part(model, torch.float32, range(1), None, together=chunks), 1, False, Share(1, 1))
    return float(chunk.seen_backward.moved.sum())


@pytest.mark.parametrize("name", MIXERS)
def test_twice_the_tokens_move_twice_the_bytes(name: str) -> None:
    """Twice, and less by what is moved once for a chunk. With slices of 64 tokens it would be 3 to 4 times."""
    mixer = MIXERS[name]
    # kept segments are read by all later ones: their number is in proportion to the tokens, and so is each one's work
    allowed = 2.5 if mixer["kind"] in ("memory_caching", "log_linear") else 2.05
    once, twice = (bytes_moved(mixer, tokens) for tokens in (1024, 2048))
    assert 1.5 < twice / once < allowed


@pytest.mark.parametrize("name", BY_CHUNK)
def test_twice_the_chunks_of_a_call_move_twice_the_bytes(name: str) -> None:
    """Up to 31/15 times: the first chunk of a document has no memory. With plain slices of chunks it is 2.3 to 3."""
    once, twice = (bytes_moved(BY_CHUNK[name], 64, chunks) for chunks in (16, 32))
    assert 1.5 < twice / once < 2.1
