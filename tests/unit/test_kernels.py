"""Kernels of libraries: which are used, that wrong ones are not, and the layouts in which they are called.

The package's functions are stood in for by loops over the axes that its documentation gives them; on a CUDA device
`tests/gpu` tries the package itself.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.training import TrainingConfig
from megamem.doctor.checks import check_kernels
from megamem.memory.recurrent.head_norm import HeadNorm, gated_head_norm
from megamem.memory.recurrent.short_convolution import ShortConvolution
from megamem.memory.shared.block_attention import AttentionProjections
from megamem.model import kernels
from megamem.model.kernels import (
    GATE,
    HEAD_NORM,
    OPERATIONS,
    RECURRENCES,
    ROTATION,
    Operation,
    choose,
    use_library_kernels,
)
from megamem.model.mlp import SwiGLU, gated
from megamem.model.norm import RMSNorm, rms_norm
from megamem.model.stage import Stage, build_stage
from megamem.ops import fla
from megamem.ops.rotary import apply_rotary
from megamem.ops.short_convolution import short_convolution
from megamem.parallel.linears import PlainLinears
from megamem.planning.measured_part import Part, Share, kernels_of, measure_part, shown_kernels

CPU = torch.device("cpu")
MODEL = {
    "layers": 2, "hidden_size": 32, "heads": 2, "ffn_size": 48, "vocab_size": 64, "chunk_size": 16,
    "memory": [{"layers": [1], "mixer": "delta_net"}],
}  # fmt: skip


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, D], cos and sin [T, D / 2]: pairs of both halves, by the angle of their token in every row."""
    half = x.shape[-1] // 2
    assert cos.shape == sin.shape == (x.shape[1], half)
    tokens = []
    for t in range(x.shape[1]):
        first, second = x[:, t, :, :half], x[:, t, :, half:]
        tokens.append(torch.cat((first * cos[t] - second * sin[t], first * sin[t] + second * cos[t]), -1))
    return torch.stack(tokens, 1)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return x / (1 + (-x).exp()) * y


def rmsnorm_fn(
    x: Tensor, weight: Tensor, bias: None, z: Tensor | None, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """x, z [..., D]: each group of channels by itself, in the dtype of x."""
    assert norm_before_gate
    groups = [
        part / (part.square().mean(-1, keepdim=True) + eps).sqrt() for part in x.double().split(group_size, dim=-1)
    ]
    out = torch.cat(groups, -1) * weight.double()
    return (out if z is None else out * swiglu(z.double(), torch.ones_like(out))).to(x.dtype)


def causal_conv1d(x: Tensor, weight: Tensor, activation: str) -> tuple[Tensor, None]:
    """x [B, T, D], weight [D, W]: the last weight is the token's own, zeros come before the first token."""
    assert activation == "silu"
    exact, weights = x.double(), weight.double().unbind(1)
    tokens = []
    for t in range(x.shape[1]):
        z = sum(exact[:, t - back] * weights[-1 - back] for back in range(min(len(weights), t + 1)))
        tokens.append(z / (1 + (-z).exp()))
    return torch.stack(tokens, 1).to(x.dtype), None


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as it would be on a device that has its kernels, which this processor stands in for."""
    functions: dict[str, Any] = {"rotary": rotary_embedding, "activations": swiglu, "layernorm_gated": rmsnorm_fn}
    functions["convolution"] = causal_conv1d
    for name in ("fla", "fla.modules"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        module = ModuleType(f"fla.modules.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name if name == "fla" else None)
    monkeypatch.setattr(kernels, "DEVICE_TYPE", "cpu")
    choose.cache_clear()
    yield
    choose.cache_clear()


def stage_of() -> Stage:
    return build_stage(parse_config(ModelConfig, MODEL, "test"), PlainLinears())


def functions_of(stage: Stage) -> set[Any]:
    """What modules would compute with."""
    found: set[Any] = set()
    for module in stage.modules():
        if isinstance(module, SwiGLU):
            found.add(module.gated)
        elif isinstance(module, AttentionProjections):
            found.add(module.apply_rotary)
        elif isinstance(module, RMSNorm | HeadNorm | ShortConvolution):
            found.add(module.function)
    return found


PLAIN = {apply_rotary, gated, gated_head_norm, rms_norm, short_convolution}
OF_LIBRARIES = {fla.rotary, fla.gated, fla.gated_head_norm, rms_norm, fla.short_convolution}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_called_in_their_own_layout(operation: Operation, dtype: torch.dtype):
    """Results and gradients are those of torch's function, whatever axes the package's function loops over."""
    chosen = choose(operation, 16, CPU, dtype)
    assert chosen.function is operation.kernel, chosen.reason
    assert chosen.by == "flash-linear-attention of unknown version"


@pytest.mark.usefixtures("package")
def test_a_stage_uses_what_is_right():
    stage = stage_of()
    assert functions_of(stage) == PLAIN
    chosen = use_library_kernels(stage, CPU, torch.float32)
    assert {each.by for each in chosen} == {"flash-linear-attention of unknown version"}
    assert functions_of(stage) == OF_LIBRARIES


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("slip", ["result", "gradient", "nothing", "crash"])
def test_a_wrong_kernel_is_named_and_not_used(slip, monkeypatch, caplog):
    """Off by a hundredth, with a gradient of the wrong operand, not a number, or refused by its compiler."""

    def wrong(gate: Tensor, up: Tensor) -> Tensor:
        if slip == "crash":
            raise RuntimeError("no\nsuch instruction")
        right = gated(gate, up)
        return {"result": right * 1.01, "gradient": right + (up - up.detach()), "nothing": right * torch.nan}[slip]

    with caplog.at_level(logging.WARNING):
        chosen = choose(replace(GATE, kernel=wrong), 16, CPU, torch.float32)
        choose(replace(GATE, kernel=wrong), 16, CPU, torch.float32)
    assert chosen.function is gated
    assert chosen.by == "torch"
    (line,) = caplog.messages
    assert line.startswith("SwiGLU of width 16: torch's own instead of flash-linear-attention of unknown version (")
    assert ("RuntimeError: no such instruction" if slip == "crash" else "differs by") in line


def test_nothing_is_tried_where_nothing_is_to_be_had(monkeypatch, caplog):
    choose.cache_clear()
    assert (
        choose(ROTATION, 16, CPU, torch.float32).reason == "flash-linear-attention has kernels for CUDA devices alone"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    found = choose(HEAD_NORM, 16, torch.device("cuda"), torch.bfloat16)
    assert (found.function, found.reason) == (gated_head_norm, "flash-linear-attention is not installed")
    stage = stage_of()
    use_library_kernels(stage, CPU, torch.float32)
    assert functions_of(stage) == PLAIN
    assert not caplog.messages
    choose.cache_clear()


def test_the_doctor_names_who_computes_what():
    """On this machine's device, whatever it has."""
    choose.cache_clear()
    found = {finding.name: finding for finding in check_kernels()}
    tried = [operation.name for operation in (*OPERATIONS, *RECURRENCES)]
    assert list(found) == ["RMS norm", *tried, "attention", "deep memories", "cross-entropy"]
    for finding in found.values():
        assert finding.section == "kernels"
        assert torch.__version__ in finding.detail or "flash-linear-attention" in finding.detail
    if not torch.cuda.is_available():
        assert "model.deep_memory_kernel: triton" in found["deep memories"].detail


def test_the_planner_counts_what_a_run_would_use(monkeypatch):
    """Rotations of queries and keys and a gate less than with norms alone, where the package is installed."""
    run = {"batch_tokens": 1024, "steps": 1}
    auto, plain, compiled = (TrainingConfig(**run, **more) for more in ({}, {"kernels": "torch"}, {"compile": True}))
    for version, expected in ((None, "cuda"), ("0.6.0", "libraries")):
        monkeypatch.setattr(kernels.Library, "version", version)
        assert kernels_of(auto, "cuda") == expected
        assert kernels_of(plain, "cuda") == "cuda"
        assert kernels_of(compiled, "cuda") == "compiled"
        assert kernels_of(auto, "cpu") == "separate"
    assert "by flash-linear-attention 0.6.0, which is taken to pass" in shown_kernels("libraries", "torch")
    assert "; recurrences of matrix memories are kernels of flash-linear-attention" in shown_kernels("compiled", "fla")
    assert "recurrences" not in shown_kernels("compiled", "torch")
    model = parse_config(ModelConfig, MODEL, "test")
    for layer in (0, 1):
        separate, libraries, together = (
            measure_part(Part(model, torch.float32, range(layer, layer + 1), None, kind), 1, False, Share(2, 1))[0].work
            for kind in ("cuda", "libraries", "compiled")
        )
        assert len(libraries.forward.kinds) <= len(separate.forward.kinds) - 3
        assert len(libraries.backward.kinds) <= len(separate.backward.kinds) - 3
        assert len(together.forward.kinds) <= len(libraries.forward.kinds)
        assert libraries.forward.flops.sum() == separate.forward.flops.sum()


@pytest.mark.parametrize(("taps", "fewer"), [(4, True), (8, False)])
def test_the_planner_counts_the_convolutions_that_a_library_has(taps: int, fewer: bool):
    """Three of a layer, each at least two operations less, forward and back; longer ones are torch's."""

    def saved(convolution: int, way: str) -> int:
        """How many operations fewer a layer has by libraries."""
        mixer = {"kind": "delta_net", "convolution": convolution}
        model = parse_config(ModelConfig, {**MODEL, "memory": [{"layers": [1], "mixer": mixer}]}, "test")
        part = Part(model, torch.float32, range(1, 2), None)
        cuda, libraries = (
            measure_part(part._replace(kernels=kernels), 1, False, Share(1, 1))[0].work
            for kernels in ("cuda", "libraries")
        )
        return len(getattr(cuda, way).kinds) - len(getattr(libraries, way).kinds)

    for way in ("forward", "backward"):
        of_convolutions = saved(taps, way) - saved(1, way)
        assert of_convolutions >= 6 if fewer else of_convolutions == 0
