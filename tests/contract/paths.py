"""How layers compute while laws run: by torch's operations, or along the path that MEGAMEM_PATH names.

    compiled   what lies between matrix products compiled by torch's inductor, as `training.compile` has it
    triton     deep memories by their kernels in Triton, which its interpreter runs on the CPU, in float64

A law that holds along a path says that the path computes the mechanism itself, for every document and in calls of any
length. `docs/contract.md` says which laws have run along which.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from torch import nn

PATH = os.environ.get("MEGAMEM_PATH", "torch")
PATHS = ("torch", "compiled", "triton")
if PATH not in PATHS:
    raise SystemExit(f"MEGAMEM_PATH: {PATH!r} is none of {', '.join(PATHS)}")
MODEL_FIELDS = {"deep_memory_kernel": "triton"} if PATH == "triton" else {}
"""What a case's model gets for it."""
PATIENCE = {"torch": 1, "compiled": 20, "triton": 60}[PATH]
"""How many times as long worlds of processes may take: compilers and the interpreter need minutes for a case."""
CALLS = {"compiled": 0, "triton": 0}
"""How often something was computed along a path: laws that never took it say nothing of it."""
M = TypeVar("M", bound=nn.Module)


def along_path(module: M) -> M:
    """Let a mixer or a model compute along the path; returns it."""
    if PATH == "compiled":
        _compile(module)
    return module


def _compile(module: nn.Module) -> None:
    import torch
    import torch._functorch.config

    from megamem.model.compiled import use_pointwise

    # a function that was compiled too often would run as it is, unseen
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # laws go back through one graph several times
    torch._functorch.config.donated_buffer = False

    def changed(function: Any) -> Any:
        compiled = torch.compile(function)

        def call(*given: Any, **named: Any) -> Any:
            CALLS["compiled"] += 1
            return compiled(*given, **named)

        return call

    use_pointwise(module, changed)  # type: ignore[arg-type]


def _interpret() -> None:
    """Let kernels take the CPU's tensors, and float64."""
    # Triton decides when a kernel is defined whether it is interpreted
    os.environ["TRITON_INTERPRET"] = "1"
    from megamem.ops.deep_memory import kernels

    def computes(kernel: str, x: Any, matrices: int) -> bool:
        found = kernel == "triton" and matrices == 2 and x.shape[-1] <= kernels.WIDEST
        CALLS["triton"] += found
        return found

    kernels._computes = computes


if PATH == "triton":
    _interpret()
