"""Law 9's experiment: states are saved by one layout of four ranks and read on under another, as a run does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoints.folder import folder_name
from checkpoints.resume import read_tensors
from checkpoints.saver import Saver
from checkpoints.states import Lanes
from checkpoints.storage import read_index
from megamem.config.checkpoint import CheckpointConfig
from megamem.memory.base import Chunk, States, state_tensors
from megamem.model.stage import Stage
from megamem.parallel.linears import Linears, PlainLinears
from tests.contract.case import CHUNK, Case
from tests.contract.cases import ARCHITECTURES, CASES
from tests.contract.driver import CPU, inputs, make
from tests.contract.observe import HEADS, LANES, TP_SIZES
from tests.saved_run import saved_run

WORLD = 4
SAVED, TOKENS = 3 * CHUNK, 4 * CHUNK
ROWS = WORLD * len(LANES.begins)
"""Rows of the whole batch, data-parallel ranks share them; every second one begins a document at its second chunk."""


def built(case: Case, linears: Linears) -> Stage:
    made = make(case, "stage", torch.float64, linears, heads=HEADS)
    assert isinstance(made, Stage)
    return made


def read(stage: Stage, states: States, rows: slice, first: int, last: int) -> tuple[torch.Tensor, States]:
    """Outputs of the tokens first..last-1 of some rows, chunk by chunk, and the states after them."""
    x = inputs(stage, TOKENS, ROWS)[:, rows]
    outputs = []
    with torch.no_grad():
        for begin in range(first, last, CHUNK):
            places = LANES.chunk(begin).starts * WORLD
            output, states, _ = stage(x[begin : begin + CHUNK], states, Chunk(places[rows]))
            outputs.append(output)
    return torch.cat(outputs), states


def straight(case: Case) -> torch.Tensor:
    """What one process without a break puts out after the place of saving, all rows."""
    stage = built(case, PlainLinears())
    return read(stage, stage.initial_states(ROWS, CPU, torch.float64), slice(0, ROWS), 0, TOKENS)[0][SAVED:]


def world(folder: str) -> dict[str, Any]:
    """Body of one rank of a world of 4. Results by `case id/size that saved/size that reads`, with the
    rank's first row.
    """
    from megamem.parallel.megatron import MegatronLinears
    from megamem.parallel.topology import Topology

    Topology.start(tp=1, device="cpu")
    group = dist.new_group(backend="gloo")
    results: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for reading in (False, True):
        for tp in TP_SIZES:
            topology = Topology.start(tp=tp, device="cpu")
            share = ROWS // topology.dp_size
            rows = slice(topology.dp_rank * share, (topology.dp_rank + 1) * share)
            for case in [*CASES, *ARCHITECTURES]:
                stage = built(case, MegatronLinears(topology.tp_group))
                lanes = Lanes(stage, topology, 1, share, torch.float64)
                if not reading:
                    fresh = stage.initial_states(share, CPU, torch.float64)
                    _, states = read(stage, fresh, rows, 0, SAVED)
                    saver = Saver(Path(folder) / f"{case.id}-{tp}", CheckpointConfig(), group)
                    saver.save(1, lanes.fragments({0: states}), saved_run(1), wait=True)
                    kept[f"{case.id}/{tp}"] = states
                    continue
                for saved in TP_SIZES:
                    path = Path(folder) / f"{case.id}-{saved}" / folder_name(1)
                    states = loaded(lanes, path, group)
                    output, _ = read(stage, states, rows, SAVED, TOKENS)
                    results[f"{case.id}/{saved}/{tp}"] = rows.start, output
                    if saved == tp:
                        own = zip(state_tensors(kept[f"{case.id}/{tp}"]), state_tensors(states), strict=True)
                        results[f"{case.id}/{tp}: same"] = all(torch.equal(a, b) for a, b in own)
    return results


def loaded(lanes: Lanes, path: Path, group: Any) -> States:
    """This rank's states from a checkpoint; fresh ones where the mechanism has none to save."""
    carried = lanes.empty(set(read_index(path)))
    tensors = lanes.fragments(carried)
    read_tensors(path, tensors, group)
    lanes.drop_padding(carried, tensors)
    return carried.get(0) or lanes.stage.initial_states(lanes.rows, CPU, lanes.dtype)
