"""What a stream reads on from after a step that was skipped: nothing of a document that had ended by then."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megamem.data.batch import Batch
from megamem.memory.base import Chunk, map_state, state_tensors
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.train_chunk import chunk_places
from megamem.pipeline.window import select_states
from tests.contract.case import CHUNK
from tests.contract.cases import ALL_CASES

CPU = torch.device("cpu")
CASES = {case.kind: case for case in reversed(ALL_CASES)}
CARRYING = sorted(set(CASES) - {"local_attention", "masked_mixer"})


def tokens(stage, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(stage.config.vocab_size, (CHUNK, 2), generator=generator)


def after_a_skipped_step(stage, first, inside):
    """Hidden of a chunk [tokens, 2, hidden] after one whose step was skipped, in which row 0 began a document.

    first: seed of the tokens before that; inside: the document began behind the chunk's first token.
    """
    begins = np.zeros((CHUNK, 2), np.bool_)
    begins[3 if inside else 0, 0] = True
    batch = Batch(
        tokens(stage, 10), tokens(stage, 10), np.array([[CHUNK if inside else 0, CHUNK]]), (0, 1), begins=begins
    )
    with torch.no_grad():
        _, old, _ = stage(tokens(stage, first), stage.initial_states(2, CPU, torch.float64), Chunk((0, 0)))
        (place,) = chunk_places(batch)
        _, new, _ = stage(batch.tokens, old, place)
        shared = {tensor.data_ptr() for tensor in state_tensors(old)}
        spoilt = map_state(lambda t: t * torch.nan if t.is_floating_point() and t.data_ptr() not in shared else t, new)
        engine = SimpleNamespace(stage=stage, topology=SimpleNamespace(device=CPU), dtype=torch.float64)
        before = TrainingEngine._without_ended(engine, old, batch)
        chosen = select_states(torch.tensor(False), spoilt, before)
        return stage(tokens(stage, 11), chosen, place.after(CHUNK))[0]


@pytest.mark.parametrize("inside", [False, True], ids=["border", "inside"])
@pytest.mark.parametrize("kind", CARRYING)
def test_a_document_that_began_in_it_reads_nothing_of_the_one_before(kind, inside):
    stage = build_stage(CASES[kind].model(layers=2, at=1, heads=4), PlainLinears())
    initialize_parameters(stage, 1)
    stage.double()
    one, other = (after_a_skipped_step(stage, seed, inside) for seed in (1, 2))
    assert one.isfinite().all()
    assert torch.equal(one[:, 0], other[:, 0])
    assert not torch.equal(one[:, 1], other[:, 1]), "the row that read on still remembers"
