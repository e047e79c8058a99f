"""Law 4's experiment: chunks through pipelines of 1, 2 and 4 real processes, against one graph over each window."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from megamem.config.model import ModelConfig
from megamem.data.batch import Batch
from megamem.memory.base import LABEL_IGNORED, States, detach
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.train_chunk import MicroBatch, chunk_places
from tests.contract.case import CHUNK, Case
from tests.contract.cases import ARCHITECTURES, CASES
from tests.contract.driver import CPU
from tests.contract.paths import along_path

LAYERS = 4
STAGES = [1, 2, 4]
WINDOWS = [1, 2, 4]
CHUNKS, ROWS, SEQUENCES = 4, 2, 2
SCALE = 0.01


def model_of(case: Case) -> ModelConfig:
    """Four layers of the mechanism, so that every stage has memory."""
    model = case.model(layers=LAYERS)
    return model.model_copy(update={"mixer": model.mixer_at(0), "memory": ()})


def interleaved(case: Case) -> bool:
    """Whether a memory of the model goes from the last stage to the first."""
    model = model_of(case)
    return bool(model.architecture.state_specs(model))


def built(case: Case, layers: range) -> Stage:
    """A stage in float64, with the same weights wherever it lies."""
    stage = build_stage(model_of(case), PlainLinears(), layers)
    initialize_parameters(stage, 1)
    return along_path(stage.to(torch.float64))


def batches(case: Case, inside: bool = True) -> list[Batch]:
    """Micro-batches of random tokens; in the second, a row starts a new document at its third chunk.

    Three tokens later it starts another one, and so does the other row inside its second chunk, except where all rows
    of a call must be at the same place of their chunks, or documents are not to begin `inside` chunks.
    """
    inside = inside and not built(case, range(LAYERS)).one_grid
    made = []
    for sequence in range(SEQUENCES):
        generator = torch.Generator().manual_seed(sequence)
        tokens = torch.randint(32, (CHUNKS * CHUNK + 1, ROWS), generator=generator)
        labels = tokens[1:].clone()
        labels[3:9, 0] = LABEL_IGNORED
        starts = np.arange(0, CHUNKS * CHUNK, CHUNK)[:, None].repeat(ROWS, 1)
        begins = np.zeros((CHUNKS * CHUNK, ROWS), np.bool_)
        begins[0] = True
        if sequence:
            starts[2:, 1] -= 2 * CHUNK
            begins[2 * CHUNK, 1] = True
        if sequence and inside:
            starts[3:, 1] -= 3
            starts[2:, 0] -= CHUNK + 5
            begins[[2 * CHUNK + 3, CHUNK + 5], [1, 0]] = True
        made.append(Batch(tokens[:-1], labels, starts, tuple(range(ROWS)), begins if inside else None))
    return made


def one_graph(case: Case, bptt_chunks: int, inside: bool = True) -> dict[str, Any]:
    """The reference: the whole model in one process, one autograd graph, cut where windows end.

    inside: see `batches`.
    """
    stage = built(case, range(LAYERS))
    total, nats, ends = torch.zeros((), dtype=torch.float64), 0.0, []
    for batch in batches(case, inside):
        states = stage.initial_states(ROWS, CPU, torch.float64)
        for c in range(CHUNKS):
            if c % bptt_chunks == 0:
                states = detach(states)
            part = slice(c * CHUNK, (c + 1) * CHUNK)
            hidden, states, auxiliary = stage(batch.tokens[part], states, chunk_places(batch)[c])
            losses = stage.token_losses(hidden, batch.labels[part]).sum()
            nats += losses.item()
            total = total + losses + sum(value * CHUNK * ROWS for value in auxiliary.values())
        ends.append(detach(states))
    (total * SCALE).backward()
    return {"nats": nats, "grads": {n: p.grad for n, p in stage.named_parameters()}, "states": ends}


def staged(case: Case, bptt_chunks: int, topology: Any) -> dict[str, Any]:
    """This rank's stage of a pipeline over the same batches."""
    from megamem.pipeline.channels import Borders
    from megamem.pipeline.executor import StageExecutor
    from megamem.pipeline.placement import contiguous
    from megamem.pipeline.program import training_programs
    from megamem.pipeline.schedule import peak_units

    stages, index = topology.pp_size, topology.pp_rank
    stage = built(case, contiguous([LAYERS // stages] * stages)[index])
    executor = StageExecutor(stage, NextToken(stage.config), index, CHUNK, bptt_chunks)
    states: dict[int, States] = {
        sequence: stage.initial_states(ROWS, CPU, torch.float64) for sequence in range(SEQUENCES)
    }
    units = SEQUENCES * CHUNKS
    memories = executor.memory_shapes(ROWS, torch.float64)
    below, above = ([shape(CHUNK, ROWS)] * units for shape in (stage.border_shape, stage.shape_above))
    program = training_programs(stages, SEQUENCES, CHUNKS, bptt_chunks, interleaved(case), keep=True)[index]
    nats, ends = executor.run(
        [MicroBatch(batch, chunk_places(batch)) for batch in batches(case)],
        states.__getitem__,
        torch.tensor(SCALE, dtype=torch.float64),
        Borders(topology, program, below, above, torch.float64, memories),
    )
    return {
        "nats": nats[0].item(),
        "grads": {name: parameter.grad for name, parameter in stage.named_parameters()},
        "states": [ends[sequence] for sequence in range(SEQUENCES)],
        "peak": executor.peak_units,
        "formula": peak_units(index, stages, SEQUENCES, CHUNKS, bptt_chunks, interleaved(case)),
    }


def world(payload: None) -> dict[str, Any]:
    """Body of one rank of a world of 4, laid out as pipelines of 1, 2 and 4 stages that share the work.

    The keys of the result are `stages/case id/bptt_chunks`.
    """
    from megamem.parallel.topology import Topology

    results = {}
    for stages in STAGES:
        topology = Topology.start(pp=stages, device="cpu")
        todo = list(itertools.product([*CASES, *ARCHITECTURES], WINDOWS))
        for case, bptt_chunks in todo[topology.dp_rank :: topology.dp_size]:
            results[f"{stages}/{case.id}/{bptt_chunks}"] = staged(case, bptt_chunks, topology)
    return results
