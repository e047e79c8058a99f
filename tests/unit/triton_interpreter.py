"""The Triton kernels of deep memories on the CPU, beside torch: run by `test_deep_memory_kernels.py` as a process.

Triton decides when a kernel is defined whether it is compiled or interpreted, so that the interpreter is chosen before
anything imports Triton. It computes with NumPy, in float64 where the tensors are. Prints a JSON object: for each form
of a memory, and each form of reading kept ones, the largest difference of results and gradients, over the largest
number of the tensor.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    _implicit_cvt,
    _patch_lang,
    interpreter_builder,
)

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, state_tensors
from megamem.ops.deep_memory import kept_networks, shared_heads
from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.group import deep_memory_chunks
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses
from megamem.ops.deep_memory.network import InnerRates
from megamem.ops.deep_memory.selected_networks import selected_networks
from megamem.ops.deep_memory.simplex import ReadGroup, SimplexNetwork, read_group
from megamem.ops.deep_memory.simplex_group import read_group_by
from megamem.ops.deep_memory.triton import launch, launch_kept, meeting
from megamem.ops.deep_memory.triton.launch import passes
from megamem.ops.deep_memory.triton.launch_kept import kept_passes
from megamem.ops.deep_memory.triton.launch_selected import selected_passes
from megamem.ops.deep_memory.triton.launch_simplex import simplex_passes
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.planning import deep_memory_kernels, memora_kernels
from megamem.planning.ledger import Ledger
from tests.unit import test_deep_memory_groups as groups
from tests.unit.deep_memory_forms import FORMS, KEPT_FORMS, LAYERS, MEMORA_FORMS, Form, KeptForm, MemoraForm

# more inner units than a block has, and a last block that is not full; groups of two inner chunks and of one
groups.ROWS, groups.HEADS, groups.CHUNKS, groups.INNER = 1, 2, 3, 40
# Triton looks through the modules that a function uses at each call of it: once for each kernel is enough
_seen: set[str] = set()
_call, _run = InterpretedFunction.__call__, InterpretedFunction.run


def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What makes room for numbers, with NaN in the place of whatever is there: nobody may read what is not written."""

    def made(*given, **named):
        found = make(*given, **named)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    return made


torch.empty_like, torch.Tensor.new_empty = filled(torch.empty_like), filled(torch.Tensor.new_empty)


def call(self, *given, **named):
    """A function that a kernel uses."""
    known = self.fn.__module__ in _seen
    _seen.add(self.fn.__module__)
    return self.rewrite()(*given, **named) if known else _call(self, *given, **named)


def run(self, *given, **named):
    """A kernel."""
    _seen.clear()
    return _run(self, *given, **named)


InterpretedFunction.__call__, InterpretedFunction.run = call, run


KERNELS = "blocks", "meeting", "reads", "writes", "writes_backward"
"""The modules of the kernels of a group of inner chunks."""


class OfThread:
    """An attribute that each thread has for itself."""

    def __init__(self) -> None:
        self.local = threading.local()

    def __get__(self, owner: object, _: type) -> Any:
        return self.local.value

    def __set__(self, owner: object, value: Any) -> None:
        self.local.value = value


@contextmanager
def programs_at_a_time() -> Iterator[list[int]]:
    """Run the programs of a kernel as threads, which wait for each other; yields how many there were each time."""
    counts = []

    def call(executor: GridExecutor, *given, **named):
        """Run all programs, the last ones first."""
        scope, failed = _patch_lang(executor.fn), []
        names = inspect.getfullargspec(executor.fn).args
        given = inspect.getcallargs(executor.fn, *given, **{name: x for name, x in named.items() if name in names})
        given = {name: _implicit_cvt(x) for name, x in given.items()}
        # what a function needs of the interpreter is there: two threads must not see to it at a time
        _seen.update(f"{meeting.__package__}.{name}" for name in KERNELS)

        def program(at: int) -> None:
            interpreter_builder.set_grid_idx(at, 0, 0)
            try:
                executor.fn(**given)
            except BaseException as error:
                failed.append(error)
                raise

        (count,) = executor.grid
        interpreter_builder.set_grid_dim(count, 1, 1)
        threads = [threading.Thread(target=program, args=(at,), daemon=True) for at in reversed(range(count))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert not failed, failed
        assert not any(thread.is_alive() for thread in threads), "programs wait for ever"
        scope.restore()
        counts.append(count)

    before = GridExecutor.__call__, launch.programs_run_together
    InterpreterBuilder.grid_idx, GridExecutor.__call__ = OfThread(), call
    launch.programs_run_together = lambda _: True
    yield counts
    GridExecutor.__call__, launch.programs_run_together = before
    del InterpreterBuilder.grid_idx


def results(form: Form, by: GroupPasses) -> list[torch.Tensor]:
    """Answers, what has been added, the momentum, and the gradients of a weighted sum of them."""
    inputs = groups.drawn(2, form.decay, form.momentum, form.norm, start=True)
    norm = OutputNorm(inputs["norm"], 1e-3) if form.norm else None
    read, added, momentum = deep_memory_chunks(
        inputs["query"], inputs["key"], inputs["value"], groups.named(inputs, "start"), groups.named(inputs, "added"),
        groups.momenta(inputs), groups.rates(inputs), form.loss, form.residual, norm, 2, passes=by,
    )  # fmt: skip
    found = [read, *added, *(momentum or ())]
    generator = torch.Generator().manual_seed(2)
    total = sum((x * torch.randn(x.shape, dtype=x.dtype, generator=generator)).sum() for x in found)
    return [*found, *torch.autograd.grad(total, list(inputs.values()))]


def kept_results(form: KeptForm, kernels: bool) -> list[torch.Tensor]:
    """What kept networks answer, and the gradients of a weighted sum of that."""
    generator, exact = torch.Generator().manual_seed(1), getattr(torch, form.exact)
    rows, heads, groups, tokens, width, count = 1, 2, 2, 21, 5, 4

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    query, shares = normal(rows, heads, groups, tokens, width), normal(rows, heads, groups, tokens, count).to(exact)
    if form.selected:
        # two networks of each query, but for one network and three queries that are left out
        chosen = torch.zeros_like(shares, dtype=torch.bool).scatter(-1, shares.topk(2).indices, True)
        chosen[..., 1], chosen[..., :3, :] = False, False
        shares = shares.masked_fill(~chosen, 0.0)
    matrices = [normal(rows, heads, count, 40, width).to(exact) for _ in range(2)]
    given = [x.requires_grad_() for x in (query.to(getattr(torch, form.products)), shares, *matrices)]
    if form.selected and kernels:
        # one network in a list, the others in another one
        lists = [[x[:, :, part] for x in given[2:]] for part in (slice(1), slice(1, None))]
        answered = selected_networks(given[0], lists, given[1], 2, form.eps, selected_passes("ieee"))
    else:
        by = kept_passes("ieee") if kernels else kept_networks.TORCH
        answered = kept_networks.kept_networks(given[0], given[2:], given[1], form.eps, form.spans, passes=by)
    gradients = torch.autograd.grad((answered * normal(*answered.shape).to(exact)).sum(), given)
    # nothing goes to shares of networks that are not read
    of_shares = gradients[1].masked_fill(shares == 0.0, 0.0)
    return [answered.detach(), gradients[0], of_shares, *gradients[2:]]


def memora_results(form: MemoraForm, kernels: bool) -> list[torch.Tensor]:
    """Answers of Memora's networks, their logarithms, and the gradients of a weighted sum of them."""
    generator = torch.Generator().manual_seed(1)
    rows, heads, chunks, tokens, width, inner = 1, 2, 2, 4, 3, 40

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    query, key, value, rate = (normal(rows, heads, chunks, tokens, width) for _ in range(4))
    given = [query, torch.nn.functional.normalize(key, dim=-1), value, 0.3 * rate.sigmoid()]
    given += [normal(rows, heads, inner, width), normal(rows, heads, width, inner), 1 + 0.3 * normal(heads, width)]
    given += [torch.nn.functional.logsigmoid(2 + normal(rows, heads, chunks, tokens, width))]
    query, key, value, rate, up, down, gain, decay = (x.requires_grad_() for x in given)
    network = SimplexNetwork(form.scale, form.residual, OutputNorm(gain, 1e-3) if form.norm else None)
    read = read_group_by(simplex_passes("ieee")) if kernels else read_group
    found = read(network, query[:, :, :, None], key, value, rate, decay if form.decay else None, up, down)
    total = sum((x * normal(*x.shape)).sum() for x in found)
    leaves = [query, key, value, rate, up, down, *([gain] if form.norm else []), *([decay] if form.decay else [])]
    return [*found, *torch.autograd.grad(total, leaves)]


def flops_of(call: Callable[[], None]) -> float:
    """The FLOPs of all products that the kernels of a call compute in the interpreter."""
    found = 0.0
    dot = InterpreterBuilder.create_dot

    def counted(builder, a, b, *others):
        """Multiply, and count."""
        nonlocal found
        found += 2 * a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]
        return dot(builder, a, b, *others)

    InterpreterBuilder.create_dot = counted
    call()
    InterpreterBuilder.create_dot = dot
    return found


def flops_of_kernels() -> dict[str, tuple[float, float]]:
    """The FLOPs that the kernels of each kind of memory compute, all blocks full, and those that the planner says."""
    rows, heads, chunks, tokens, width, inner = 1, 1, 2, 16, 16, 64
    shared_heads.UNITS = launch_kept.UNITS = 32
    launch_kept.PROGRAM_ROWS = deep_memory_kernels.PROGRAM_ROWS = dict.fromkeys((2, 4, 8), 16)

    def normal(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def vectors() -> list[torch.Tensor]:
        return [normal(rows, heads, chunks, tokens, width) for _ in range(3)]

    def titans(by: GroupPasses) -> None:
        """All passes of a group of inner chunks."""
        gates = normal(rows, heads, chunks, tokens), *(-normal(rows, heads, chunks, tokens) for _ in range(2))
        query, key, value = vectors()
        added, momentum = ([normal(rows, heads, inner, width), normal(rows, heads, width, inner)] for _ in range(2))
        found, *_ = deep_memory_chunks(
            query[:, :, None], key, value, None, tuple(added), tuple(momentum), InnerRates(*gates), "l2", True, None,
            passes=by,
        )  # fmt: skip
        found.sum().backward()

    def memora(read: ReadGroup) -> None:
        """All passes of a group of Memora's inner chunks."""
        query, key, value = vectors()
        logs = normal(rows, heads, inner, width), normal(rows, heads, width, inner)
        found, *_ = read(SimplexNetwork(None), query[:, :, :, None], key, value, key, -value, *logs)
        found.sum().backward()

    def kept(by: kept_networks.KeptPasses) -> None:
        """Both passes of kept networks that all queries read."""
        query, shares = normal(rows, heads, 1, 3 * tokens, width), normal(rows, heads, 1, 3 * tokens, 2)
        matrices = [normal(rows, heads, 2, inner, width) for _ in range(2)]
        kept_networks.kept_networks(query, matrices, shares, None, passes=by).sum().backward()

    found = {}
    for call, kernels, plan in (
        (titans, passes("ieee"), deep_memory_kernels.planned_passes("ieee")),
        (memora, read_group_by(simplex_passes("ieee")), memora_kernels.planned_read_group("ieee")),
        (kept, kept_passes("ieee"), deep_memory_kernels.planned_kept_passes("ieee")),
    ):
        with Ledger() as ledger:
            call(plan)
        planned = sum(step.flops for step in ledger.operations if step.programs)
        found[call.__name__] = flops_of(partial(call, kernels)), planned
    return found


def layer_results(mixer: dict[str, Any], kernels: bool) -> list[torch.Tensor]:
    """What a layer of a memory makes of two chunks, its state, and the gradients of a weighted sum of them."""
    size = {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 32, "chunk_size": 16}
    model = ModelConfig.model_validate(size | {"mixer": mixer})
    layer = model.mixer_at(0).build(model, PlainLinears(), 0).double()
    initialize_parameters(layer, seed=1)
    memory = getattr(layer, "memory", layer)
    if kernels:
        memory.passes = lambda *_: passes("ieee")
        memory.kept_passes = lambda *_: kept_passes("ieee")
        memory.selected_passes = lambda *_: selected_passes("ieee")
        memory.read_group = lambda *_: read_group_by(simplex_passes("ieee"))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(32, 1, 16, dtype=torch.float64, generator=generator).requires_grad_()
    state, found = layer.initial_state(1, hidden.device, hidden.dtype), []
    for begin in (0, 16):
        read, state, _ = layer(hidden[begin : begin + 16], state, Chunk((begin,)))
        found.append(read)
    found += [x for x in state_tensors(state) if x.requires_grad and x.numel()]
    total = sum((x * torch.randn(x.shape, dtype=x.dtype, generator=generator)).sum() for x in found)
    return [
        *found,
        *torch.autograd.grad(total, [hidden, *layer.parameters()], allow_unused=True, materialize_grads=True),
    ]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of tensors, over the largest number of each."""
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True)]
    found = [(a - b).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in pairs]
    # `max` would pass over what is not a number
    return float(torch.stack([x.double() for x in found]).max())


def main() -> None:
    """Compare all forms."""
    worst = {}
    for number, form in enumerate(FORMS):
        # both blocks of inner units in one program, and one each in two
        shared_heads.MULTIPROCESSORS = groups.ROWS * groups.HEADS * (1 + number % 2)
        worst[form.name] = largest_difference(results(form, passes("ieee")), results(form, TORCH))
    # two of them once more, with programs that wait for each other
    shared_heads.MULTIPROCESSORS = 2 * groups.ROWS * groups.HEADS
    for form in (FORMS[1], FORMS[-1]):
        with programs_at_a_time() as counts:
            found = largest_difference(results(form, passes("ieee")), results(form, TORCH))
        assert shared_heads.MULTIPROCESSORS in counts, counts
        worst["programs that meet"] = max(found, worst.get("programs that meet", 0.0))
    # more rows and inner units than a block has
    launch_kept.PROGRAM_ROWS = dict.fromkeys((2, 4, 8), 16)
    launch_kept.UNITS = 16
    for form in KEPT_FORMS:
        worst[form.name] = largest_difference(kept_results(form, True), kept_results(form, False))
    for form in MEMORA_FORMS:
        worst[form.name] = largest_difference(memora_results(form, True), memora_results(form, False))
    for name, mixer in LAYERS.items():
        worst[name] = largest_difference(layer_results(mixer, True), layer_results(mixer, False))
    print(json.dumps({"differences": worst, "flops": flops_of_kernels()}))


if __name__ == "__main__":
    main()
