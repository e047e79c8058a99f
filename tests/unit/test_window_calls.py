"""Which chunks of a window that is read layer by layer a mixer takes in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.model.layer import Layer
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears

SIZE, CHUNKS = 8, 4


def calls(mixer: dict[str, Any], places: Sequence[Chunk], ties_resets: bool = False) -> list[int]:
    """The tokens of each call of the mixer."""
    sizes = {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 32, "chunk_size": SIZE}
    stage = build_stage(parse_config(ModelConfig, {**sizes, "mixer": mixer}, "test"), PlainLinears())
    layer: Layer = stage.own_layers[0]  # type: ignore[attr-defined]
    read, found = layer.mixer.forward, []

    def forward(hidden: torch.Tensor, *rest: Any) -> Any:
        found.append(hidden.shape[0])
        return read(hidden, *rest)

    layer.mixer.forward = forward  # type: ignore[method-assign]
    state = layer.mixer.initial_state(2, torch.device("cpu"), torch.float32)
    layer.read_window(torch.zeros(len(places) * SIZE, 2, 16), state, places, ties_resets)
    return found


def places(*starts: int) -> list[Chunk]:
    """The chunks of a window, by where the second row's lie; the first row is one document."""
    return [Chunk((SIZE * (number + 1), start)) for number, start in enumerate(starts)]


ALL = [CHUNKS * SIZE]
EACH = CHUNKS * [SIZE]


@pytest.mark.parametrize(
    ("mixer", "starts", "expected"),
    [
        ("elastic_memory", (8, 16, 24, 32), ALL),
        ("full_attention", (0, 8, 16, 24), ALL),  # with its first chunk a document begins
        ("gated_delta_net", (8, 16, 0, 8), [2 * SIZE, 2 * SIZE]),
        ("full_attention", (8, 0, 0, 8), [SIZE, SIZE, 2 * SIZE]),
        ("transformer_xl", (8, 16, 24, 32), EACH),  # gradients stop at the cache
    ],
)
def test_a_call_takes_chunks_of_the_same_documents(mixer: str, starts: tuple[int, ...], expected: list[int]) -> None:
    kinds = {"gated_delta_net": {"kind": "delta_net", "decay": True}}
    assert calls(kinds.get(mixer, {"kind": mixer}), places(*starts)) == expected


def test_under_zero_3_ranks_make_as_many_calls_whatever_their_documents() -> None:
    assert calls({"kind": "elastic_memory"}, places(8, 16, 24, 32), ties_resets=True) == EACH


def test_a_document_that_begins_inside_a_chunk_has_calls_of_its_own() -> None:
    chunks = [Chunk((8, 8), borders=((), ())), Chunk((16, 16), borders=((), (3,))), Chunk((24, 5), borders=((), ())),
              Chunk((32, 13), borders=((), ()))]  # fmt: skip
    assert calls({"kind": "full_attention"}, chunks) == [SIZE, SIZE, 2 * SIZE]
