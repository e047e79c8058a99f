"""Importing DeepSpeed and Megatron-Core without their noise and without compiling anything."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def quiet() -> Iterator[None]:
    """Silence imports of Megatron-Core and DeepSpeed, which warn of each accelerator they miss (`megamem doctor`)."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # says that nvcc is there and no device, where torch is built for CUDA
    extensions = logging.getLogger("torch.utils.cpp_extension")
    extensions.setLevel(logging.ERROR)
    with warnings.catch_warnings(), _compiling_later(), _without_wandb():
        warnings.simplefilter("ignore")
        yield
    extensions.setLevel(logging.NOTSET)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


@contextmanager
def _compiling_later() -> Iterator[None]:
    """Functions decorated with torch.compile meanwhile are compiled when they are first called.

    Megatron-Core decorates a dozen fused functions that nothing here calls; loading the compiler for them costs every
    process seconds.
    """
    compile_now = torch.compile

    def later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(later, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        compiled = functools.cache(lambda: compile_now(function, **options))
        return call

    torch.compile = later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


@contextmanager
def _without_wandb() -> Iterator[None]:
    """Let imports of wandb fail meanwhile.

    Megatron-Core imports it where it is installed, for an inference engine that nothing here uses; it would cost every
    process more than a second. Ours is imported by the rank that logs to it.
    """
    loaded = sys.modules.get("wandb")
    sys.modules["wandb"] = loaded  # type: ignore[assignment]  # None is Python's word for: there is no such module
    try:
        yield
    finally:
        if loaded is None:
            sys.modules.pop("wandb", None)


def _say_nothing(message: str, force: bool = False) -> None:
    """Take the place of DeepSpeed's `see_memory_usage`."""


def load_kernels_at_once() -> None:
    """Have CUDA load all kernels when it starts instead of each at its first use, unless the environment says which.

    What loads a kernel waits for the whole device. Call it before CUDA starts: `torch.cuda.is_available` starts it.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def prepare_libraries() -> None:
    """Import both once, quietly.

    On CPU, DeepSpeed would build a shared-memory extension with the C++ compiler at the start of each fresh
    machine's first job (most of a minute); only its inference all-reduce uses it, so it is declared unavailable.
    """
    # DeepSpeed calls some collectives by names that newer torch releases replace
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with quiet():
        import deepspeed
        import megatron.core.tensor_parallel

        assert megatron.core.tensor_parallel
        with suppress(ImportError):
            # every engine asks for this optimizer, which compiles at its import: two seconds where torch.compile loads
            import deepspeed.runtime.zero.muon.muon_optimizer
        import deepspeed.runtime.bf16_optimizer
    # prints the memory of the process a dozen times while a BF16 engine is built; log lines have what matters of it
    deepspeed.runtime.bf16_optimizer.see_memory_usage = _say_nothing
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
