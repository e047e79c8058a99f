"""Law 3's experiment: the same on one process with plain layers and on every rank of a world with parallel ones."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from megamem.memory.base import LABEL_IGNORED, detach
from megamem.model.stage import Stage, add_losses
from megamem.parallel.linears import Linears, PlainLinears, info
from megamem.parallel.sequence import split_tokens
from tests.contract.case import CHUNK, Case
from tests.contract.cases import ARCHITECTURES, CASES
from tests.contract.driver import CPU, Lanes, every, inputs, make

TOKENS = 4 * CHUNK
HEADS = 8
"""So many that even two queries per key leave a key head for each of 4 ranks."""
LANES = Lanes(((0,), (0, CHUNK)))
"""The second row starts a new document at the second chunk."""


def own(x: Tensor, linears: Linears) -> Tensor:
    """This rank's tokens of a replicated tensor."""
    return split_tokens(x, linears.group) if linears.sequence_parallel else x


def observe(case: Case, subject: str, linears: Linears) -> dict[str, Any]:
    """Chunks forward through the state, one backward over all of them.

    Returns local parts: `output` per call, `grads` of a float64 functional of the output and `loss_grads` of the
    token losses (whole models), by parameter name with the declared shard axis; `losses`, `auxiliary` losses by name,
    `states`, `input_grad`.
    """
    made = make(case, subject, torch.float64, linears, heads=HEADS)
    x = inputs(made, TOKENS, len(LANES.begins))
    if isinstance(made, Stage):
        labels = torch.cat((x[1:], torch.full_like(x[:1], LABEL_IGNORED)))
    else:
        x.requires_grad_()
    states = made.initial_states(len(LANES.begins), CPU, torch.float64)
    generator = torch.Generator().manual_seed(5)
    outputs, losses, auxiliary, functional = [], [], {}, torch.zeros((), dtype=torch.float64)
    for call in LANES.calls(TOKENS, every(CHUNK, TOKENS)):
        part = x[call] if isinstance(made, Stage) else own(x[call], linears)
        output, states, extra = made(part, states, LANES.chunk(call.start))
        width = output.shape[-1]
        probe = torch.randn(CHUNK, len(LANES.begins), width, dtype=torch.float64, generator=generator)
        functional = functional + (output * own(probe, linears)).sum() + sum(extra.values())
        auxiliary = add_losses(auxiliary, extra)
        outputs.append(output.detach())
        if isinstance(made, Stage):
            losses.append(made.token_losses(output, labels[call]))
    parameters = dict(made.named_parameters())
    result = {
        "outputs": outputs,
        "states": detach(states),
        "auxiliary": {name: value.detach() for name, value in auxiliary.items()},
        "grads": gradients(functional, parameters),
    }
    if losses:
        result["losses"] = torch.cat(losses).detach()
        result["loss_grads"] = gradients(torch.cat(losses).sum(), parameters)
    else:
        result["input_grad"] = torch.autograd.grad(functional, x)[0]
    return result


def gradients(scalar: Tensor, parameters: dict[str, Tensor]) -> dict[str, tuple[Tensor, int | None]]:
    """Gradient and shard axis by name; parameters that take no part are left out."""
    grads = torch.autograd.grad(scalar, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {
        name: (grad, info(parameter).shard_axis)
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
        if grad is not None
    }


def plain(case: Case, subject: str) -> dict[str, Any]:
    """The reference: one process, torch's own layers."""
    return observe(case, subject, PlainLinears())


TP_SIZES = [1, 2, 4]


def world(payload: None) -> dict[str, Any]:
    """Body of one rank of a world of 4, which is laid out as TP 1 x DP 4, TP 2 x DP 2 and TP 4 in turn.

    Data-parallel replicas share the work: each takes some of the observations. The keys of the result are
    `tp/case id/subject/mode`, mode being `whole` or, with sequence parallelism, `split`.
    """
    from megamem.parallel.megatron import MegatronLinears
    from megamem.parallel.topology import Topology

    results = {}
    for tp in TP_SIZES:
        topology = Topology.start(tp=tp, device="cpu")
        modes = {"whole": False, "split": True} if tp > 1 else {"whole": False}
        subjects = [(case, subject) for case in [*CASES, *ARCHITECTURES] for subject in case.subjects]
        todo = [(*pair, mode) for pair, mode in itertools.product(subjects, modes) if splits(pair[0], tp, modes[mode])]
        for case, subject, mode in todo[topology.dp_rank :: topology.dp_size]:
            linears = MegatronLinears(topology.tp_group, modes[mode])
            results[f"{tp}/{case.id}/{subject}/{mode}"] = observe(case, subject, linears)
    return results


def splits(case: Case, tp: int, split: bool) -> bool:
    """Whether the rows that layers read of a chunk can be split over the ranks, where they are to be."""
    return not split or case.model().rows_per_chunk % tp == 0


def joined(parts: list[Tensor], axis: int | None) -> Tensor:
    """A tensor from the ranks' parts; replicated ones must be the same everywhere."""
    if axis is None:
        assert all(torch.equal(part, parts[0]) for part in parts[1:]), "a replicated tensor differs between ranks"
        return parts[0]
    return torch.cat(parts, axis)
