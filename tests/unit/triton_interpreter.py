"""The Triton kernels of deep memories on the CPU, beside torch: run by `test_deep_memory_kernels.py` as a process.

Triton decides when a kernel is defined whether it is compiled or interpreted, so that the interpreter is chosen before
anything imports Triton. It computes with NumPy, in float64 where the tensors are. Prints a JSON object: for each form
of a memory, and each form of reading kept ones, the largest difference of results and gradients, over the largest
number of the tensor.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.interpreter import InterpretedFunction

from megamem.ops.deep_memory import kept_networks
from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.group import deep_memory_chunks
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses
from megamem.ops.deep_memory.selected_networks import selected_networks
from megamem.ops.deep_memory.triton import launch_kept
from megamem.ops.deep_memory.triton.launch import passes
from megamem.ops.deep_memory.triton.launch_kept import kept_passes
from megamem.ops.deep_memory.triton.launch_selected import selected_passes
from tests.unit import test_deep_memory_groups as groups
from tests.unit.deep_memory_forms import FORMS, KEPT_FORMS, Form, KeptForm

# more inner units than a block has, and a last block that is not full; groups of two inner chunks and of one
groups.ROWS, groups.HEADS, groups.CHUNKS, groups.INNER = 1, 2, 3, 40
# Triton looks through the modules that a function uses at each call of it: once for each kernel is enough
_seen: set[str] = set()
_call, _run = InterpretedFunction.__call__, InterpretedFunction.run


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
        answered = selected_networks(given[0], given[2:], given[1], 2, form.eps, selected_passes("ieee"))
    else:
        by = kept_passes("ieee") if kernels else kept_networks.TORCH
        answered = kept_networks.kept_networks(given[0], given[2:], given[1], form.eps, form.spans, passes=by)
    gradients = torch.autograd.grad((answered * normal(*answered.shape).to(exact)).sum(), given)
    # nothing goes to shares of networks that are not read
    of_shares = gradients[1].masked_fill(shares == 0.0, 0.0)
    return [answered.detach(), gradients[0], of_shares, *gradients[2:]]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of tensors, over the largest number of each."""
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """Compare all forms."""
    worst = {form.name: largest_difference(results(form, passes("ieee")), results(form, TORCH)) for form in FORMS}
    # more rows and inner units than a block has
    launch_kept.ROWS = launch_kept.UNITS = 16
    for form in KEPT_FORMS:
        worst[form.name] = largest_difference(kept_results(form, True), kept_results(form, False))
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
