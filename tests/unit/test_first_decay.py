"""Gradients through a thousand tokens of a deep memory that fades as its gates start."""

import pytest
import torch

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters

CHUNKS, SIZE = 4, 256


def gradient_norm(mixer: dict[str, object]) -> float:
    """Of all parameters together, of the mean loss of 1,024 random tokens, through every chunk's state."""
    tree = {
        "layers": 2, "hidden_size": 64, "heads": 2, "vocab_size": 512, "chunk_size": SIZE, "init_std": 0.1,
        "mixer": mixer,
    }  # fmt: skip
    stage = build_stage(parse_config(ModelConfig, tree, "test"), PlainLinears())
    initialize_parameters(stage, seed=0)
    tokens = torch.randint(512, (CHUNKS * SIZE + 1, 1), generator=torch.Generator().manual_seed(0))
    states, loss = stage.initial_states(1, torch.device("cpu"), torch.float32), torch.zeros(())
    for start in range(0, CHUNKS * SIZE, SIZE):
        hidden, states, _ = stage.read_chunk(tokens[start : start + SIZE], states, Chunk((start,)))
        loss = loss + stage.token_losses(hidden, tokens[start + 1 : start + SIZE + 1]).sum()
    (loss / (CHUNKS * SIZE)).backward()
    found = [parameter.grad.norm() for parameter in stage.parameters() if parameter.grad is not None]
    return float(torch.stack(found).norm())


@pytest.mark.parametrize("kind", ["titans", "memora"])
def test_fading_does_not_make_gradients_grow(kind: str) -> None:
    """At most twice those of the same memory that does not fade: 2.4 and 2.1 with Titans, 3.4 and 2.7 with Memora.

    Fading by a hundredth per token makes them 500,000 with Titans and infinite with Memora.
    """
    mixer = {"kind": kind, "inner_chunk": 16}
    assert gradient_norm(mixer) < 2 * gradient_norm({**mixer, "decay": False})
