"""The Triton kernels of deep memories on the CPU, beside torch: run by `test_deep_memory_kernels.py` as a process.

Triton decides when a kernel is defined whether it is compiled or interpreted, so that the interpreter is chosen before
anything imports Triton. It computes with NumPy, in float64 where the tensors are. Prints a JSON object: for each form
the largest difference of results and gradients, over the largest number of the tensor.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime.interpreter import InterpretedFunction

from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.group import deep_memory_chunks
from megamem.ops.deep_memory.group_backward import TORCH, GroupPasses
from megamem.ops.deep_memory.triton.launch import passes
from tests.unit import test_deep_memory_groups as groups
from tests.unit.deep_memory_forms import FORMS, Form

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


def main() -> None:
    """Compare all forms."""
    kernels, worst = passes("ieee"), {}
    for form in FORMS:
        pairs = zip(results(form, kernels), results(form, TORCH), strict=True)
        worst[form.name] = max(
            float(((ours - theirs).abs().max() / theirs.abs().max()).detach()) for ours, theirs in pairs
        )
        print(form, worst[form.name], file=sys.stderr)
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
