"""Law 9's experiment: states are saved under one tensor-parallel size and read on under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from checkpoints.states import local_state, whole_state
from megamem.memory.base import state_tensors
from megamem.parallel.linears import Linears, PlainLinears
from tests.contract.cases import CASES, CHUNK, Case
from tests.contract.driver import CPU, Whole, inputs, make
from tests.contract.observe import HEADS, LANES, TP_SIZES

SAVED, TOKENS = 2 * CHUNK, 3 * CHUNK


def built(case: Case, linears: Linears) -> Whole:
    made = make(case, "stage", torch.float64, linears, heads=HEADS)
    assert isinstance(made, Whole)
    return made


def read(stage: Whole, states: list[Any], first: int, last: int) -> tuple[torch.Tensor, list[Any]]:
    """Outputs of the tokens first..last-1, chunk by chunk, and the states after them."""
    x = inputs(stage, TOKENS, len(LANES.begins))
    outputs = []
    with torch.no_grad():
        for begin in range(first, last, CHUNK):
            output, states, _ = stage(x[begin : begin + CHUNK], states, LANES.chunk(begin))
            outputs.append(output)
    return torch.cat(outputs), states


def straight(case: Case) -> torch.Tensor:
    """What one process without a break puts out after the place of saving."""
    stage = built(case, PlainLinears())
    fresh = stage.initial_states(len(LANES.begins), CPU, torch.float64)
    return read(stage, fresh, 0, TOKENS)[0][SAVED:]


def world(folder: str) -> dict[str, Any]:
    """Body of one rank of a world of 4. Results by `case id/size that saved/size that reads`."""
    from megamem.parallel.megatron import MegatronLinears
    from megamem.parallel.topology import Topology

    results: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for tp in TP_SIZES:
        topology = Topology.start(tp=tp, device="cpu")
        for case in CASES:
            stage = built(case, MegatronLinears(topology.tp_group))
            states = stage.initial_states(len(LANES.begins), CPU, torch.float64)
            _, states = read(stage, states, 0, SAVED)
            kept[f"{case.id}/{tp}"] = states
            tensors = {
                f"layers.{layer}.state.{name}": tensor.contiguous().clone()
                for layer, (mixer, state) in enumerate(zip(stage.mixers, states, strict=True))
                for name, tensor in whole_state(mixer.specs, state, topology.tp_group).items()
            }
            if topology.rank == 0:
                save_file(tensors, Path(folder) / f"{case.id}-{tp}.safetensors")
    dist.barrier()
    for tp in TP_SIZES:
        topology = Topology.start(tp=tp, device="cpu")
        for case in CASES:
            stage = built(case, MegatronLinears(topology.tp_group))
            for saved in TP_SIZES:
                states = loaded(stage, Path(folder) / f"{case.id}-{saved}.safetensors", tp, topology.tp_rank)
                output, _ = read(stage, states, SAVED, TOKENS)
                results[f"{case.id}/{saved}/{tp}"] = output
                if saved == tp:
                    own = zip(state_tensors(kept[f"{case.id}/{tp}"]), state_tensors(states), strict=True)
                    results[f"{case.id}/{tp}: same"] = all(torch.equal(a, b) for a, b in own)
    return results


def loaded(stage: Whole, path: Path, tp_size: int, tp_rank: int) -> list[Any]:
    """This rank's states from a file."""
    whole = load_file(path)
    return [
        local_state(
            mixer.specs,
            {name.removeprefix(f"layers.{layer}.state."): t for name, t in whole.items() if f"layers.{layer}." in name},
            tp_size,
            tp_rank,
        )
        for layer, mixer in enumerate(stage.mixers)
    ]
