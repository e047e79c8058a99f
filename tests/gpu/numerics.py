"""Mixers and attention kernels on a device against the same computation in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megamem.memory.base import States, map_state, state_tensors
from megamem.model.stage import Stage
from megamem.ops.attention.softmax import Past, attention
from megamem.ops.deep_memory import kept_networks
from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.group import deep_memory_chunks
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses
from megamem.ops.deep_memory.network import InnerRates, Precision
from megamem.ops.deep_memory.selected_networks import selected_networks
from megamem.ops.deep_memory.simplex import SimplexNetwork, read_group
from megamem.ops.linear_recurrence.torch import linear_recurrence
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.contract.case import CHUNK, Case
from tests.contract.driver import LAYOUTS, Alone, Lanes, Subject, every, make

CPU = torch.device("cpu")
TOKENS = 4 * CHUNK


@dataclass(frozen=True)
class Observed:
    """What one run of a subject left, on the CPU in float64."""

    output: Tensor
    states: States
    grads: dict[str, Tensor]


def wide(case: Case) -> Alone:
    """The case's mixer with chunks of 128 and heads of 90 (no multiple of 8), weights that keep attention smooth."""
    tree = case.model(heads=2, head_dim=90).model_dump(mode="json") | {"chunk_size": 128, "init_std": 0.05}
    model = type(case.model()).model_validate(tree)
    alone = Alone(model.mixer_at(0).build(model, PlainLinears(), 0))
    initialize_parameters(alone, 1)
    return alone


def subjects(case: Case, subject: str, dtype: torch.dtype, device: torch.device) -> tuple[Subject, Subject, int]:
    """The subject on `device` in `dtype`, the same weights in float64 on the CPU, and its chunk's tokens."""
    made = wide(case) if subject == "wide" else make(case, subject, torch.float32)
    weights = {name: value.to(dtype) for name, value in made.state_dict().items()}
    exact = wide(case) if subject == "wide" else make(case, subject, torch.float32)
    exact.load_state_dict(weights)
    made.load_state_dict(weights)
    return made.to(device, dtype), exact.double(), 128 if subject == "wide" else CHUNK


def random_input(subject: Subject, tokens: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Ids, or hidden values that `dtype` holds exactly, in float64."""
    generator = torch.Generator().manual_seed(tokens)
    if isinstance(subject, Stage):
        return torch.randint(subject.config.vocab_size, (tokens, rows), generator=generator)
    hidden = torch.randn(tokens, rows, subject.mixer.sizes["hidden"], generator=generator)
    return hidden.to(dtype).double()


def observe(subject: Subject, x: Tensor, lanes: Lanes, cuts: range, device: torch.device) -> Observed:
    """All calls forward, one backward of a fixed functional of the output over real tokens."""
    dtype = next(subject.parameters()).dtype
    x = x.to(device) if isinstance(subject, Stage) else x.to(device, dtype).requires_grad_()
    states = subject.initial_states(x.shape[1], device, dtype)
    outputs = []
    for call in lanes.calls(x.shape[0], cuts):
        output, states, _ = subject(x[call], states, lanes.chunk(call.start))
        outputs.append(output)
    output = torch.cat(outputs)
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    probe = probe * lanes.real(x.shape[0])[..., None]
    (output.float() if dtype != torch.float64 else output).mul(probe.to(device, output.dtype)).sum().backward()
    grads = {name: p.grad for name, p in subject.named_parameters() if p.grad is not None}
    if x.is_floating_point():
        grads["input"] = x.grad
    output = output.detach().to(CPU, torch.float64) * lanes.real(x.shape[0])[..., None]
    return Observed(
        output,
        map_state(lambda t: t.detach().to(CPU, torch.float64), states),
        {name: grad.to(CPU, torch.float64) for name, grad in grads.items()},
    )


def error(ours: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact tensor."""
    assert ours.shape == exact.shape
    return ((ours - exact).norm() / exact.norm().clamp(min=1e-30)).item()


def mixer_errors(
    case: Case, subject: str, dtype: torch.dtype, device: torch.device, layout: str = "borders", step: int = 0
) -> dict[str, float]:
    """Worst relative error of output, states and gradients; calls of `step` tokens, 0 for whole chunks."""
    made, exact, chunk = subjects(case, subject, dtype, device)
    lanes = scaled(LAYOUTS[layout], chunk // CHUNK)
    tokens, cuts = 4 * chunk, every(step or chunk, 4 * chunk)
    x = random_input(made, tokens, len(lanes.begins), dtype)
    ours, theirs = (
        observe(made, x, lanes, cuts, device),
        observe(exact, x, lanes, every(chunk, tokens), CPU),
    )
    total = torch.stack([g.norm() for g in theirs.grads.values()]).norm()
    gradient = max(
        # a tensor whose gradient is small beside the rest is measured against its share of the whole
        ((ours.grads[n] - g).norm() / max(g.norm(), 0.1 * total / len(theirs.grads) ** 0.5)).item()
        for n, g in theirs.grads.items()
    )
    state = [
        error(a, b)
        for a, b in zip(state_tensors(ours.states), state_tensors(theirs.states), strict=True)
        if b.numel() and a.shape == b.shape and b.norm() > 0
    ]
    return {"output": error(ours.output, theirs.output), "state": max(state, default=0.0), "gradient": gradient}


def scaled(lanes: Lanes, factor: int) -> Lanes:
    """The same documents with chunks `factor` times as long."""
    return Lanes(tuple(tuple(begin * factor for begin in row) for row in lanes.begins))


def attention_errors(
    backend: str,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    pasts: tuple[int, ...],
    kv_heads: int = 4,
    width: int = 64,
    mask: str | None = None,
) -> dict[str, float]:
    """Relative errors of a kernel's output and input gradients against `eager` in float64 on the CPU.

    mask: None, `rows` (the second row sees no past) or `keys` (each past key is seen or not).
    """
    generator = torch.Generator().manual_seed(tokens + sum(pasts))

    def random(size: int, heads: int) -> Tensor:
        return torch.randn(size, 2, heads, width, generator=generator).to(dtype)

    inputs = [random(tokens, 4), random(tokens, kv_heads), random(tokens, kv_heads)]
    inputs += [random(size, kv_heads) for size in pasts for _ in range(2)]
    visible = {
        None: lambda size: None,
        "rows": lambda size: torch.tensor([True, False]),
        "keys": lambda size: torch.rand(size, 2, generator=generator) > 0.5,
    }[mask]
    seen = [visible(size) for size in pasts]
    target = torch.randn(tokens, 2, 4, width, generator=generator, dtype=torch.float64)

    def run(backend: str, where: torch.device, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.to(where, dtype, copy=True).requires_grad_() for x in inputs]
        query, key, value, *rest = leaves
        parts = [Past(rest[2 * i], rest[2 * i + 1], None if m is None else m.to(where)) for i, m in enumerate(seen)]
        out = attention(query, key, value, parts, backend)
        out.backward(target.to(where, dtype))
        return out.detach().to(CPU, torch.float64), [leaf.grad.to(CPU, torch.float64) for leaf in leaves]

    ours, our_grads = run(backend, device, dtype)
    exact, exact_grads = run("eager", CPU, torch.float64)
    return {
        "output": error(ours, exact),
        "gradient": max(error(a, b) for a, b in zip(our_grads, exact_grads, strict=True) if b.norm() > 0),
    }


def recurrence_errors(
    kernel: Callable[..., tuple[Tensor, Tensor]], gates: str, device: torch.device
) -> dict[str, float]:
    """Relative errors of a kernel of `linear_recurrence` with BF16 tokens against float64 on the CPU.

    gates: names of those there are, `decay` and `rate`.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, heads, groups, tokens, width = 2, 3, 2, 200, 64
    key = torch.nn.functional.normalize(normal(rows, heads, tokens, width), dim=-1)
    tokens_of = {"query": normal(rows, heads, groups, tokens, width), "key": key, "value": normal(*key.shape)}
    given = {name: x.bfloat16() for name, x in tokens_of.items()}
    given["state"] = normal(rows, heads, width, width)
    if "decay" in gates:
        given["log_decay"] = -0.1 * torch.rand(1, heads, tokens, generator=generator)
    if "rate" in gates:
        given["rate"] = torch.rand(rows, heads, tokens, generator=generator)
    weights = [torch.randn(*shape, generator=generator) for shape in (tokens_of["query"].shape, given["state"].shape)]

    def run(function: Callable[..., tuple[Tensor, Tensor]], where: torch.device, exact: bool) -> list[Tensor]:
        leaves = {n: x.to(where, torch.float64 if exact else x.dtype, copy=True) for n, x in given.items()}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        made = function(**leaves)
        loss = sum((x.double() * w.to(where).double()).sum() for x, w in zip(made, weights, strict=True))
        return [x.detach().to(CPU, torch.float64) for x in (*made, *torch.autograd.grad(loss, list(leaves.values())))]

    ours, theirs = run(kernel, device, False), run(linear_recurrence, CPU, True)
    found = [error(a, b) for a, b in zip(ours, theirs, strict=True)]
    return {"output": found[0], "state": found[1], "gradient": max(found[2:])}


def largest(errors: Iterable[float]) -> float:
    """The largest error, or NaN where one is no number, which `max` would pass over."""
    return float(torch.tensor(list(errors)).max())


def deep_memory_errors(
    passes: GroupPasses, device: torch.device, momentum: bool, tokens: int = 64, width: int = 96, rows: int = 2
) -> dict[str, float]:
    """Relative errors of deep memories that `passes` write and read, in float32, against float64 on the CPU.

    With all options, and two query heads; `momentum`: Titans with it and decay, else deep linear attention. With 2 rows
    several programs share a head, with 60 none do.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, chunks = 3, 5
    gate, shapes = (rows, heads, chunks, tokens), ((4 * width, width), (width, 4 * width))
    given = [normal(rows, heads, 2, chunks, tokens, width), torch.nn.functional.normalize(normal(*gate, width), dim=-1)]
    given += [normal(*gate, width), torch.full(gate, 0.5 / width), 1 + 0.3 * normal(heads, width)]
    given += [normal(heads, *shape) / shape[1] ** 0.5 for shape in shapes]
    given += [0.05 * normal(rows, heads, *shape) / shape[1] ** 0.5 for shape in shapes]
    if momentum:
        given += [0.05 * normal(rows, heads, *shape) / shape[1] ** 0.5 for shape in shapes]
        given += [torch.nn.functional.logsigmoid(first + normal(*gate)) for first in (4.6, 0.0)]

    def run(by: GroupPasses, where: torch.device, dtype: torch.dtype) -> list[list[Tensor]]:
        leaves = [x.to(where, dtype, copy=True).requires_grad_() for x in given]
        query, key, value, rate, gain, *rest = leaves
        gates = rest[6:]
        read, added, carried = deep_memory_chunks(
            query, key, value, tuple(rest[:2]), tuple(rest[2:4]), tuple(rest[4:6]) or None, InnerRates(rate, *gates),
            "l2" if momentum else "dot", True, OutputNorm(gain, 1e-5), passes=by,
        )  # fmt: skip
        parts = [[read], [*added, *(carried or ())]]
        parts.append(list(torch.autograd.grad(sum(x.square().sum() for part in parts for x in part), leaves)))
        return [[x.detach().to(CPU, torch.float64) for x in part] for part in parts]

    pairs = zip(run(passes, device, torch.float32), run(TORCH, CPU, torch.float64), strict=True)
    found = [largest(error(a, b) for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]
    return dict(zip(("output", "state", "gradient"), found, strict=True))


def kept_network_errors(
    precision: Precision, dtype: torch.dtype, selected: bool, width: int, device: torch.device
) -> dict[str, float]:
    """Relative errors of what kept networks answer by Triton to queries of a dtype, against torch's in float64.

    selected: whether each query reads two of them.
    """
    from megamem.ops.deep_memory.triton.launch_kept import kept_passes
    from megamem.ops.deep_memory.triton.launch_selected import selected_passes

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, heads, groups, tokens, count = 2, 3, 2, 300, 5
    query, shares = normal(rows, heads, groups, tokens, width), normal(rows, heads, groups, tokens, count).softmax(-1)
    if selected:
        shares = shares.masked_fill(shares < shares.topk(2).values[..., 1:], 0.0)
    inner = 4 * width
    given = [query.to(dtype).float(), shares]
    given += [normal(rows, heads, count, inner, width) / size**0.5 for size in (width, inner)]
    weigh = normal(rows, heads, groups, tokens, width)

    def run(kernels: bool, where: torch.device, exact: torch.dtype) -> list[list[Tensor]]:
        asked, share, *matrices = (x.to(where, exact, copy=True).requires_grad_() for x in given)
        asks = asked.to(dtype) if kernels else asked
        if kernels and selected:
            made = selected_networks(asks, [matrices], share, 2, 1e-5, selected_passes(precision))
        else:
            by = kept_passes(precision) if kernels else kept_networks.TORCH
            made = kept_networks.kept_networks(asks, matrices, share, 1e-5, passes=by)
        found = torch.autograd.grad((made * weigh.to(where, exact)).sum(), [asked, share, *matrices])
        of_share = found[1].masked_fill(share == 0.0, 0.0)
        parts = [[made], [found[0], of_share, *found[2:]]]
        return [[x.detach().to(CPU, torch.float64) for x in part] for part in parts]

    pairs = zip(run(True, device, torch.float32), run(False, CPU, torch.float64), strict=True)
    found = [largest(error(a, b) for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]
    return dict(zip(("output", "gradient"), found, strict=True))


def memora_errors(precision: Precision, decay: bool, tokens: int, width: int, device: torch.device) -> dict[str, float]:
    """Relative errors of Memora's networks by Triton, in float32, against torch's in float64."""
    from megamem.ops.deep_memory.simplex_group import read_group_by
    from megamem.ops.deep_memory.triton.launch_simplex import simplex_passes

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, heads, chunks = 2, 3, 5
    gate, inner = (rows, heads, chunks, tokens, width), 4 * width
    given = [normal(*gate), torch.nn.functional.normalize(normal(*gate), dim=-1), normal(*gate)]
    given += [
        0.5 / width * normal(*gate).sigmoid(),
        normal(rows, heads, inner, width),
        normal(rows, heads, width, inner),
    ]
    given += [1 + 0.3 * normal(heads, width), torch.nn.functional.logsigmoid(4.6 + normal(*gate))]

    def run(kernels: bool, where: torch.device, exact: torch.dtype) -> list[list[Tensor]]:
        leaves = [x.to(where, exact, copy=True).requires_grad_() for x in given[: 7 + decay]]
        query, key, value, rate, up, down, gain, *log_decay = leaves
        read = read_group_by(simplex_passes(precision)) if kernels else read_group
        network = SimplexNetwork(None, True, OutputNorm(gain, 1e-5))
        answered, *after = read(network, query[:, :, :, None], key, value, rate, *(log_decay or [None]), up, down)
        found = torch.autograd.grad(sum(x.square().sum() for x in (answered, *after)), leaves)
        return [[x.detach().to(CPU, torch.float64) for x in part] for part in ([answered], after, found)]

    pairs = zip(run(True, device, torch.float32), run(False, CPU, torch.float64), strict=True)
    found = [largest(error(a, b) for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]
    return dict(zip(("output", "state", "gradient"), found, strict=True))
