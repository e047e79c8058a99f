"""Kernels of libraries in the place of torch's own functions: which there are, and which of them a run uses.

torch runs its RMS norm as one kernel on CUDA by itself. Rotations, gates of MLPs, the short convolutions and gated
norms of recurrent memories are several kernels of torch's, and one of flash-linear-attention's. Such a kernel is used
where `training.kernels` is `auto`, the device is CUDA, its package is installed, and it is as exact as torch's function
on random operands of the run's width and dtype, forward and backward: that is tried once at the start. Otherwise
torch's function stays, with a line in the log if the package is there and its kernel is not right.

`training.compile` wins: it makes one kernel of each of these functions, of those that no library has, and of what
surrounds them inside a function, and a library's kernel would be a hole in what the compiler sees.

Liger-Kernel and Apex are not looked for. Liger's kernel of the gate writes gradients over the operands it has kept, and
its rotation writes over queries and keys, so that neither can stand for a function; its RMS norm and Apex's are what
torch's own has become.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.memory.recurrent.head_norm import HeadNorm, gated_head_norm
from megamem.memory.recurrent.matrix import MatrixMixer
from megamem.memory.recurrent.short_convolution import ShortConvolution
from megamem.memory.shared.block_attention import AttentionProjections
from megamem.model.mlp import SwiGLU, gated
from megamem.model.stage import Stage
from megamem.ops import fla
from megamem.ops.linear_recurrence.fla import fla_recurrence
from megamem.ops.linear_recurrence.torch import linear_recurrence
from megamem.ops.rotary import Rotation, apply_rotary, rotary_tables
from megamem.ops.short_convolution import short_convolution

_log = logging.getLogger(__name__)
Function = Callable[..., Any]
Operands = tuple[Any, ...]
DEVICE_TYPE = "cuda"
"""Of the devices that the libraries' kernels are for."""
TOKENS, BATCH, HEADS = 96, 2, 3
"""Of the random operands on which a kernel is tried; an odd number of heads and no power of two of tokens."""
TAPS = (2, 3, 4)
"""Tokens that a short convolution spans, of those that libraries' kernels are used for."""
UNITS = 4.0
"""What a kernel's results may differ from exact ones: units of its dtype's last place (`torch.finfo.eps`) at the
largest number of each result. torch's own functions, which round every step, stay within as many."""


@dataclass(frozen=True)
class Library:
    """A package with kernels."""

    package: str
    """Its name in the package index."""
    module: str
    """Its name in Python."""

    @property
    def version(self) -> str | None:
        """Its version, or None where it is not installed."""
        if importlib.util.find_spec(self.module) is None:
            return None
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "of unknown version"


FLA = Library("flash-linear-attention", "fla")


@dataclass(frozen=True)
class Operation:
    """A function of torch for which a library has a kernel."""

    name: str
    plain: Function
    """torch's way."""
    library: Library
    kernel: Function
    """The library's, called as the plain one."""
    operands: Callable[[int, torch.Generator, torch.dtype], Iterator[Operands]]
    """Random operands of a width, several sets of them, on the CPU."""
    learning: int
    """How many operands, the first ones, have a gradient: tables of angles have none."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """The dtypes of activations that the kernel is used for."""


def _of_rotation(width: int, generator: torch.Generator, dtype: torch.dtype) -> Iterator[Operands]:
    """Yield x [TOKENS, BATCH, HEADS, width], cos and sin (`apply_rotary`): rows at one place, or each at its own."""
    for rows in (1, BATCH):
        positions = torch.randint(4096, (TOKENS, rows), generator=generator)
        x = torch.randn(TOKENS, BATCH, HEADS, width, generator=generator, dtype=torch.float64)
        yield x.to(dtype), *rotary_tables(positions, width, Rotation(1e4), dtype)


def _of_gate(width: int, generator: torch.Generator, dtype: torch.dtype) -> Iterator[Operands]:
    """Yield gate and up, [TOKENS, BATCH, width] each."""
    gate, up = torch.randn(2, TOKENS, BATCH, width, generator=generator, dtype=torch.float64).to(dtype)
    yield gate, up


def _of_head_norm(width: int, generator: torch.Generator, dtype: torch.dtype) -> Iterator[Operands]:
    """Yield what `gated_head_norm` takes: [BATCH, HEADS, TOKENS, width] read in FP32, with a gate or without one."""
    for gates in (True, False):
        read = torch.randn(BATCH, HEADS, TOKENS, width, generator=generator)
        weight = 1 + 0.1 * torch.randn(HEADS * width, generator=generator)
        gate = torch.randn(TOKENS, BATCH, HEADS * width, generator=generator).to(dtype) if gates else None
        yield read, weight.to(dtype), gate, 1e-5, dtype


def _of_convolution(width: int, generator: torch.Generator, dtype: torch.dtype) -> Iterator[Operands]:
    """Yield tokens [taps - 1 + TOKENS, BATCH, HEADS, width] and weights [HEADS, width, taps] for each of `TAPS`."""
    for taps in TAPS:
        joined = torch.randn(taps - 1 + TOKENS, BATCH, HEADS, width, generator=generator, dtype=torch.float64)
        weight = torch.randn(HEADS, width, taps, generator=generator, dtype=torch.float64) / taps**0.5
        yield joined.to(dtype), weight.to(dtype)


ROTATION = Operation("rotary positions", apply_rotary, FLA, fla.rotary, _of_rotation, learning=1)
GATE = Operation("SwiGLU", gated, FLA, fla.gated, _of_gate, learning=2)
HEAD_NORM = Operation("gated head norm", gated_head_norm, FLA, fla.gated_head_norm, _of_head_norm, learning=3)
CONVOLUTION = Operation("short convolution", short_convolution, FLA, fla.short_convolution, _of_convolution, learning=2)
OPERATIONS = (ROTATION, GATE, HEAD_NORM, CONVOLUTION)


class RecurrenceSizes(NamedTuple):
    """The sizes on which a recurrence is tried. Kernels that are tuned by trying keep what was fastest for these."""

    columns: int | None = None
    """Width of values; None: that of keys."""
    heads: int = HEADS
    queries: int = 2
    """Query heads that share one of these."""
    tokens: int = TOKENS


@lru_cache(maxsize=16)
def recurrence(decay: bool, rate: bool, sizes: RecurrenceSizes) -> Operation:
    """Return the recurrence of matrix memories with or without a decay of each token and a rate of the delta rule."""

    def operands(width: int, generator: torch.Generator, dtype: torch.dtype) -> Iterator[Operands]:
        """Yield what `linear_recurrence` takes, keys and queries of length 1: without and with resets."""
        columns, heads, queries, tokens = sizes
        columns = columns or width

        def normal(*shape: int) -> Tensor:
            """Return random numbers [BATCH, heads, ...]."""
            return torch.randn(BATCH, heads, *shape, generator=generator, dtype=torch.float64)

        for resets in ((), ((tokens // 3,), ())):
            query, key = (F.normalize(x, dim=-1) for x in (normal(queries, tokens, width), normal(tokens, width)))
            value, state = normal(tokens, columns), normal(width, columns)
            fades = -F.softplus(normal(tokens) - 3).float() if decay else None
            gate = normal(tokens).sigmoid().float() if rate else None
            yield query.to(dtype), key.to(dtype), value.to(dtype), state.float(), fades, gate, resets

    name = "delta rule" if rate else "recurrence"
    name += " with decays" if decay else ""
    return Operation(name, linear_recurrence, FLA, fla_recurrence, operands, 6, (torch.bfloat16,))


RECURRENCES = tuple(recurrence(decay, rate, RecurrenceSizes()) for decay in (False, True) for rate in (False, True))
"""All recurrences, at small sizes."""


@dataclass(frozen=True)
class Choice:
    """What an operation is computed by."""

    function: Function
    by: str
    """`torch`, or a package and its version."""
    reason: str


@lru_cache(maxsize=64)
def choose(operation: Operation, width: int, device: torch.device, dtype: torch.dtype) -> Choice:
    """Return what computes an operation of a width on a device; the first time the library's kernel is tried there."""
    library = operation.library
    if device.type != DEVICE_TYPE:
        return Choice(operation.plain, "torch", f"{library.package} has kernels for CUDA devices alone")
    version = library.version
    if version is None:
        return Choice(operation.plain, "torch", f"{library.package} is not installed")
    if dtype not in operation.dtypes:
        names = ", ".join(str(each).removeprefix("torch.") for each in operation.dtypes)
        return Choice(operation.plain, "torch", f"{library.package} computes it in {names} alone")
    name = f"{library.package} {version}"
    try:
        failure = _failure(operation, width, device, dtype)
    except Exception as error:  # whatever a package's kernel, its compiler or its driver raises
        failure = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if failure is None:
        return Choice(operation.kernel, name, f"within {UNITS:g} units in the last place of exact results")
    _log.warning("%s of width %d: torch's own instead of %s (%s)", operation.name, width, name, failure)
    return Choice(operation.plain, "torch", f"{name}: {failure}")


def use_library_kernels(stage: Stage, device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """Let the stage use libraries' kernels wherever they are right, and return what was chosen, module by module.

    Args:
        stage: on any device; its functions are torch's own so far.
        device: where it will compute.
        dtype: of its activations.
    """
    chosen = []
    for module in stage.modules():
        found = _place(module)
        if found is not None:
            operation, attribute, width = found
            chosen.append(choose(operation, width, device, dtype))
            setattr(module, attribute, chosen[-1].function)
    return chosen


def use_library_recurrences(
    stage: Stage, device: torch.device, dtype: torch.dtype, agree: Callable[[bool], bool]
) -> list[Choice]:
    """Let the stage use a library's recurrences if those of all stages and ranks are right, and return what was found.

    They are tried at the run's own sizes, as they are tuned there to what is fastest for these.

    Args:
        stage, device, dtype: see `use_library_kernels`.
        agree: called once where the device may have such kernels; returns whether it was given True on all ranks.
    """
    if device.type != DEVICE_TYPE:
        return []
    mixers = [module for module in stage.modules() if isinstance(module, MatrixMixer)]
    found = []
    for mixer in mixers:
        sizes = RecurrenceSizes(mixer.columns, mixer.kv_heads, mixer.groups, stage.config.chunk_size)
        found.append(choose(recurrence(*mixer.gated, sizes), mixer.width, device, dtype))
    if agree(all(each.by != "torch" for each in found)):
        for mixer in mixers:
            mixer.use_library()
    return found


def _place(module: nn.Module) -> tuple[Operation, str, int] | None:
    """Return the operation that a module computes, the attribute that holds its function, and its width."""
    if isinstance(module, SwiGLU):
        return GATE, "gated", module.width
    if isinstance(module, AttentionProjections) and module.rotates:
        return ROTATION, "apply_rotary", module.width
    if isinstance(module, HeadNorm):
        return HEAD_NORM, "function", module.width
    if isinstance(module, ShortConvolution) and module.taps in TAPS:
        return CONVOLUTION, "function", module.width
    return None


def _failure(operation: Operation, width: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how results or gradients of a kernel differ from exact ones; None where it is by no more than `UNITS`."""
    generator = torch.Generator().manual_seed(0)
    for operands in operation.operands(width, generator, dtype):
        here = [each.to(device) if isinstance(each, Tensor) else each for each in operands]
        exact = [
            each.double() if isinstance(each, Tensor) else torch.float64 if isinstance(each, torch.dtype) else each
            for each in here
        ]
        found = _with_gradients(operation.kernel, here, operation.learning)
        wanted = _with_gradients(operation.plain, exact, operation.learning)
        for one, other in zip(found, wanted, strict=True):
            largest = float(other.abs().max())
            differs = float((one.double() - other).abs().max())
            bound = UNITS * torch.finfo(dtype).eps
            # not `>`: what is not a number is no kernel either
            if not differs <= bound * largest:
                return f"differs by {differs:.2g} from results up to {largest:.2g}"
            # numbers far below the largest must be right too
            share = float((one.double() - other).norm() / other.norm().clamp_min(1e-300))
            if not share <= bound:
                return f"differs by {share:.2g} of the length of all results"
    return None


def _with_gradients(function: Function, operands: Sequence[Any], learning: int) -> list[Tensor]:
    """Return a function's results [...] and the gradients of its first `learning` operands [...] that are tensors."""
    leaves = [each.detach() if isinstance(each, Tensor) else each for each in operands]
    learn = [each.requires_grad_() for each in leaves[:learning] if isinstance(each, Tensor)]
    out = function(*leaves)
    results = [out] if isinstance(out, Tensor) else list(out)
    # the same gradients for all who compute this
    weights = [
        torch.linspace(-1.0, 1.0, x.numel(), dtype=torch.float64, device=x.device).view(x.shape).to(x.dtype)
        for x in results
    ]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, learn, weights)]
