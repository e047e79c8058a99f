"""Law 4's experiment: chunks through pipelines of 1, 2 and 4 real processes, against one graph over each window."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from megamem.config.model import ModelConfig
from megamem.data.batch import Batch
from megamem.memory.base import LABEL_IGNORED, Chunk, States, detach
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.contract.cases import CASES, CHUNK, Case
from tests.contract.driver import CPU

LAYERS = 4
STAGES = [1, 2, 4]
WINDOWS = [1, 2, 4]
CHUNKS, ROWS, SEQUENCES = 4, 2, 2
SCALE = 0.01


def model_of(case: Case) -> ModelConfig:
    """Four layers of the mechanism, so that every stage has memory."""
    model = case.model(layers=LAYERS)
    return model.model_copy(update={"mixer": model.mixer_at(0), "memory": ()})


def built(case: Case, layers: range) -> Stage:
    """A stage in float64, with the same weights wherever it lies."""
    stage = build_stage(model_of(case), PlainLinears(), layers)
    initialize_parameters(stage, 1)
    return stage.to(torch.float64)


def batches() -> list[Batch]:
    """Micro-batches of random tokens; in the second, one row starts a new document at its third chunk."""
    made = []
    for sequence in range(SEQUENCES):
        generator = torch.Generator().manual_seed(sequence)
        tokens = torch.randint(32, (CHUNKS * CHUNK + 1, ROWS), generator=generator)
        labels = tokens[1:].clone()
        labels[3:9, 0] = LABEL_IGNORED
        starts = np.arange(0, CHUNKS * CHUNK, CHUNK)[:, None].repeat(ROWS, 1)
        if sequence:
            starts[2:, 1] -= 2 * CHUNK
        made.append(Batch(tokens[:-1], labels, starts, tuple(range(ROWS))))
    return made


def one_graph(case: Case, bptt_chunks: int) -> dict[str, Any]:
    """The reference: the whole model in one process, one autograd graph, cut where windows end."""
    stage = built(case, range(LAYERS))
    total, nats, ends = torch.zeros((), dtype=torch.float64), 0.0, []
    for batch in batches():
        states = stage.initial_states(ROWS, CPU, torch.float64)
        for c in range(CHUNKS):
            if c % bptt_chunks == 0:
                states = detach(states)
            part = slice(c * CHUNK, (c + 1) * CHUNK)
            hidden, states, auxiliary = stage(batch.tokens[part], states, Chunk(tuple(batch.starts[c].tolist())))
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
    from megamem.pipeline.schedule import peak_units, stage_order

    stages, index = topology.pp_size, topology.pp_rank
    stage = built(case, contiguous([LAYERS // stages] * stages)[index])
    executor = StageExecutor(stage, NextToken(stage.config), index, CHUNK, bptt_chunks)
    data = batches()
    states: dict[int, States] = {
        sequence: stage.initial_states(ROWS, CPU, torch.float64) for sequence in range(SEQUENCES)
    }
    nats, ends = executor.run(
        stage_order(index, stages, SEQUENCES, CHUNKS, bptt_chunks),
        data,
        states.__getitem__,
        torch.tensor(SCALE, dtype=torch.float64),
        Borders(topology, [stage.border_shape(CHUNK, ROWS)] * (SEQUENCES * CHUNKS), torch.float64, backward=True),
    )
    return {
        "nats": nats.item(),
        "grads": {name: parameter.grad for name, parameter in stage.named_parameters()},
        "states": [ends[sequence] for sequence in range(SEQUENCES)],
        "peak": executor.peak_units,
        "formula": peak_units(index, stages, SEQUENCES, CHUNKS, bptt_chunks),
    }


def world(payload: None) -> dict[str, Any]:
    """Body of one rank of a world of 4, laid out as pipelines of 1, 2 and 4 stages that share the work.

    The keys of the result are `stages/case id/bptt_chunks`.
    """
    from megamem.parallel.topology import Topology

    results = {}
    for stages in STAGES:
        topology = Topology.start(pp=stages, device="cpu")
        todo = list(itertools.product(CASES, WINDOWS))
        for case, bptt_chunks in todo[topology.dp_rank :: topology.dp_size]:
            results[f"{stages}/{case.id}/{bptt_chunks}"] = staged(case, bptt_chunks, topology)
    return results
