"""From shards to losses with exact resets: every document of a batch is predicted as if it were read alone."""

import itertools

import pytest
import torch
from data_helpers import feeder_of, make_shards

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.train_chunk import chunk_places

CHUNK, LENGTH, VOCABULARY = 16, 64, 300
MIXERS = {
    "attention": {"kind": "full_attention"},
    "recurrence": {"kind": "delta_net", "decay": True},
    "blocks": {"kind": "elastic_memory", "order": 4},
    "segments": {"kind": "memory_caching", "segment": 8, "memory": {"kind": "titans", "inner_chunk": 4}},
}


@pytest.fixture(scope="module")
def feeder(tmp_path_factory):
    """Documents of 1 to 40 words in rows of 64 tokens: several fit into a chunk, or one fills more than a row."""
    root = tmp_path_factory.mktemp("joined")
    make_shards(root, name="a", sizes=[3, 20, 8, 40, 1, 12, 5, 30, 9, 16] * 4)
    return feeder_of(root, rows=4, micro=4, chunk=CHUNK, sequence_length=LENGTH, documents="join", reset="exact")


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_a_document_is_predicted_as_if_read_alone(feeder, mixer):
    model = {"layers": 2, "hidden_size": 16, "heads": 2, "vocab_size": VOCABULARY, "chunk_size": CHUNK, "mixer": mixer}
    stage = build_stage(parse_config(ModelConfig, {**model, "init_std": 0.3}, "test"), PlainLinears())
    initialize_parameters(stage, 0)
    stage.double()
    found, inside = 0, 0
    for step in range(2):
        batch = feeder.batch(step)
        assert batch.begins is not None
        losses = read(stage, batch.tokens, batch.labels, chunk_places(batch))
        for row in range(batch.tokens.shape[1]):
            edges = [*batch.begins[:, row].nonzero()[0].tolist(), LENGTH]
            for begin, end in itertools.pairwise(edges):
                tokens, labels = batch.tokens[begin:end, row : row + 1], batch.labels[begin:end, row : row + 1]
                places = [Chunk((start,)) for start in range(0, end - begin, CHUNK)]
                alone = read(stage, tokens, labels, places)
                # float64: sums over other numbers of masked columns
                assert (losses[begin:end, row] - alone[:, 0]).abs().max() <= 1e-12
                found, inside = found + 1, inside + bool(begin % CHUNK)
    assert inside > found / 2, "most documents begin inside a chunk"


def read(stage, tokens, labels, places):
    """Losses [tokens, rows] of calls of a chunk each."""
    states, losses = stage.initial_states(tokens.shape[1], torch.device("cpu"), torch.float64), []
    with torch.no_grad():
        for number, place in enumerate(places):
            part = slice(number * CHUNK, (number + 1) * CHUNK)
            hidden, states, _ = stage(tokens[part], states, place)
            losses.append(stage.token_losses(hidden, labels[part]))
    return torch.cat(losses)
