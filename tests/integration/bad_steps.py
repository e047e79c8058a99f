"""What the tests of non-finite values run on each rank: steps of a small model, one of them spoilt on one rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megamem.config.run import RunConfig
from megamem.data.batch import Batch
from megamem.parallel.gather import gather_shards, whole_parameter
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.engine import build_engine
from tests.distributed.training_cases import CHUNK, LENGTH, local_batches, run_config

BAD_STEP, STEPS, GUILTY = 1, 3, 1
LR = 1e-2


class Spoiler:
    """Makes a value NaN or infinite on the guilty rank, in the backward passes of the chosen step."""

    def __init__(self, engine: TrainingEngine, guilty: bool, target: str, value: float) -> None:
        self.active, self.value = False, value
        self.guilty = guilty
        if target == "loss":
            stage = engine.stage
            losses = stage.token_losses
            stage.token_losses = lambda hidden, labels: self._spoil(losses(hidden, labels))
        elif target == "state":
            stage = engine.stage
            read_chunk = stage.read_chunk

            def spoilt(*arguments: Any) -> Any:
                hidden, states, auxiliary = read_chunk(*arguments)
                return hidden, {name: _map(state, self._spoil) for name, state in states.items()}, auxiliary

            stage.read_chunk = spoilt
        else:
            parameter = next(p for name, p in engine.parameters().items() if target in name)
            parameter.register_hook(self._spoil)

    def _spoil(self, tensor: Tensor) -> Tensor:
        if not (self.active and self.guilty) or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        spoilt = tensor.clone()
        spoilt.view(-1)[0] = self.value
        return spoilt


def _map(state: Any, function: Any) -> Any:
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: _map(value, function) for key, value in state.items()}
    return [_map(value, function) for value in state]


def tensors(state: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(state, lambda tensor: found.append(tensor.clone()) or tensor)
    return found


def snapshot(engine: TrainingEngine, topology: Topology) -> dict[str, Any]:
    """Whole weights, and this rank's masters, moments and step counts."""
    weights = {name: whole_parameter(p, topology.tp_group).clone() for name, p in engine.parameters().items()}
    own: list[Tensor] = [
        tensor.clone()
        for parameter, moments in engine.optimizer.state.items()
        for tensor in (parameter.detach(), *moments.values())
    ]
    states = [t for states in engine.carried.values() for state in states.values() for t in tensors(state)]
    model = [p.detach().clone() for p in engine.stage.parameters()]
    return {"weights": weights, "own": own, "states": states, "model": model}


def batches(config: RunConfig, topology: Topology, step: int) -> list[Batch]:
    """The step's micro-batches; in streams mode the documents read on from step to step."""
    found = local_batches(config, topology, step)
    if config.data.feeding != "streams":
        return found
    return [Batch(b.tokens, b.labels, b.starts + step * LENGTH, b.sample_ids) for b in found]


def spoilt_run(case: dict[str, Any], topology: Topology, config: RunConfig) -> dict[str, Any]:
    """A run whose BAD_STEP is spoilt on the guilty rank."""
    engine = build_engine(config, topology)
    spoiler = Spoiler(engine, topology.rank == GUILTY, case["target"], case["value"])
    snapshots, bad, norms = [], [], []
    for step in range(STEPS):
        spoiler.active = step == BAD_STEP
        result = engine.step(batches(config, topology, step), LR)
        snapshots.append(snapshot(engine, topology))
        bad.append(float(result.bad))
        norms.append(float(result.grad_norm))
    return {"snapshots": snapshots, "bad": bad, "norms": norms}


def clean_run(topology: Topology, config: RunConfig) -> dict[str, Any]:
    """The same run without the step that was spoilt."""
    engine = build_engine(config, topology)
    for step in range(STEPS):
        if step != BAD_STEP:
            engine.step(batches(config, topology, step), LR)
    return snapshot(engine, topology)


def cases(todo: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each case's verdicts on this rank, as plain data."""
    out = {}
    for name, case in todo.items():
        config = run_config(**case["config"])
        topology = Topology.start(config.parallel.tp, device="cpu", timeout_s=60)
        spoilt, clean = spoilt_run(case, topology, config), clean_run(topology, config)
        before, after = spoilt["snapshots"][BAD_STEP - 1], spoilt["snapshots"][BAD_STEP]
        end = spoilt["snapshots"][-1]
        checksum = torch.stack([w.double().sum() for w in end["weights"].values()])
        out[name] = {
            "bad": spoilt["bad"],
            "norms": [norm if math.isfinite(norm) else None for norm in spoilt["norms"]],
            "unchanged": {part: _equal(before[part], after[part]) for part in before},
            "moved later": not _equal(after["weights"], spoilt["snapshots"][BAD_STEP + 1]["weights"]),
            "as if the step had not been": {part: _equal(end[part], clean[part]) for part in end},
            "finite": all(bool(t.isfinite().all()) for t in [*end["weights"].values(), *end["states"]]),
            "states": len(end["states"]),
            "moments": len(end["own"]),
            "checksum": checksum.tolist(),
        }
        assert dist.is_initialized()
    return out


def spikes(todo: dict[str, dict[str, Any]], spike_step: int, steps: int) -> dict[str, Any]:
    """Each case's verdicts on this rank: one step's loss on the guilty rank is finite, and far too high."""
    out = {}
    for name, case in todo.items():
        config = run_config(**case["config"])
        topology = Topology.start(config.parallel.tp, device="cpu", timeout_s=60)
        engine = build_engine(config, topology)
        spoiler = Spoiler(engine, topology.rank == GUILTY, case["target"], case["value"])
        found, before, unchanged, counts = [], None, {}, []
        for step in range(steps):
            spoiler.active = step == spike_step
            result = engine.step(batches(config, topology, step), LR)
            found.append((float(result.spike), float(result.bad)))
            after = snapshot(engine, topology)
            if step == spike_step and before is not None:
                unchanged = {part: _equal(before[part], after[part]) for part in before}
            before = after
            counts.append(max(int(state["step"]) for state in engine.optimizer.state.values()))
        assert engine.spikes is not None
        out[name] = {
            "spikes": [spike for spike, _ in found],
            "bad": [bad for _, bad in found],
            "unchanged": unchanged,
            "updates": counts,
            "history": engine.spikes.history.tolist(),
        }
    return out


def ended_documents(exact: bool) -> dict[str, Any]:
    """A bad step in which the first row's document ends and the second one's goes on: what each row reads on with.

    exact: the next document begins inside a chunk; if not, at its border.
    """
    data = {"feeding": "streams", "documents": "join" if exact else "pad"}
    config = run_config(
        model={"layers": 1, "memory": [{"layers": [0], "mixer": {"kind": "elastic_memory", "order": 8, "block": 8}}]},
        data={**data, "reset": "exact"} if exact else data,
        training={"bptt_chunks": 2, "micro_batch_size": 2, "batch_tokens": 2 * LENGTH},
        parallel={"tp": 1, "zero_stage": 0},
    )
    topology = Topology.start(1, device="cpu", timeout_s=60)
    engine = build_engine(config, topology)
    spoiler = Spoiler(engine, True, "loss", math.nan)
    found = []
    for step in range(2):
        tokens = torch.randint(0, 64, (LENGTH, 2), generator=torch.Generator().manual_seed(step))
        starts = np.arange(step * LENGTH, (step + 1) * LENGTH, CHUNK)[:, None].repeat(2, 1)
        begins = np.zeros((LENGTH, 2), np.bool_)
        begins[0] = step == 0
        if step == BAD_STEP:
            first = CHUNK + 3 if exact else CHUNK
            begins[first, 0] = True
            starts[-(-first // CHUNK) :, 0] -= step * LENGTH + first
        spoiler.active = step == BAD_STEP
        result = engine.step([Batch(tokens, tokens, starts, (0, 1), begins if exact else None)], LR)
        (memory,) = (state["coefficients"] for state in engine.carried[0].values())
        found.append((float(result.bad), memory.clone()))
    (_, before), (bad, after) = found
    return {"bad": bad, "before": before.flatten(1).norm(dim=1).tolist(), "after": after, "kept": before}


def _equal(a: Any, b: Any) -> bool:
    a, b = (list(x.values()) if isinstance(x, dict) else x for x in (a, b))
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gathered() -> dict[str, list]:
    """`gather_shards` over the two ranks of a tensor-parallel group."""
    topology = Topology.start(2, device="cpu", timeout_s=60)
    whole = torch.arange(24.0).view(4, 6)
    out = {}
    for axis in (0, 1, None):
        local = whole if axis is None else whole.chunk(2, axis)[topology.tp_rank]
        out[str(axis)] = gather_shards(local, axis, topology.tp_group).tolist()
    return out
