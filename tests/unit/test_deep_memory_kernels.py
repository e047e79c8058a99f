"""The Triton kernels of deep memories beside torch, and where they are refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from megamem.errors import ConfigError
from megamem.ops.deep_memory.group_backward import TORCH
from megamem.ops.deep_memory.kernels import check_kernel, passes_of
from tests.unit.deep_memory_forms import FORMS


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """The largest differences by form, of which Triton's interpreter is told in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.triton_interpreter"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
@pytest.mark.parametrize("name", [form.name for form in FORMS])
def test_kernels_compute_what_torch_does(name: str, differences: dict[str, float]) -> None:
    """1e-11: float64, products summed in other orders, through three inner chunks and back."""
    assert differences[name] < 1e-11


def test_kernels_compute_networks_of_float32_on_cuda_alone() -> None:
    """No such device is here: torch computes all others, also where Triton is chosen."""
    for kernel, matrices, dtype in (
        ("torch", 2, torch.float32),
        ("triton", 1, torch.float32),
        ("triton", 2, torch.float32),
    ):
        assert passes_of(kernel, "tf32", torch.ones(1, dtype=dtype), matrices) is TORCH


def test_what_cannot_run_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernel("torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.deep_memory_kernel: triton is not installed"):
        check_kernel("triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.deep_memory_kernel: triton needs a CUDA device; choose torch"):
        check_kernel("triton")
