"""The Triton kernels of deep memories beside torch, and where they are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamem.errors import ConfigError
from megamem.ops.deep_memory import kept_networks, simplex_group_backward
from megamem.ops.deep_memory.group_backward import TORCH
from megamem.ops.deep_memory.kernels import (
    check_kernel,
    kept_passes_of,
    passes_of,
    selected_passes_of,
    simplex_passes_of,
)
from megamem.ops.deep_memory.selected_networks import pairs_of
from tests.unit.deep_memory_forms import FORMS, KEPT_FORMS, LAYERS, MEMORA_FORMS, KeptForm


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What Triton's interpreter finds, in a process of its own: see `triton_interpreter.py`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.triton_interpreter"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def differences(interpreted: dict[str, Any]) -> dict[str, float]:
    """The largest differences of results and gradients, by form."""
    found: dict[str, float] = interpreted["differences"]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
@pytest.mark.parametrize("name", [*(form.name for form in (*FORMS, *MEMORA_FORMS)), "programs that meet", *LAYERS])
def test_kernels_compute_what_torch_does(name: str, differences: dict[str, float]) -> None:
    """1e-11: float64, products summed in other orders, through some inner chunks and back."""
    assert differences[name] < 1e-11


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
@pytest.mark.parametrize("form", KEPT_FORMS, ids=[form.name for form in KEPT_FORMS])
def test_kept_networks_answer_as_in_torch(form: KeptForm, differences: dict[str, float]) -> None:
    """float64: sums of 40 units in other orders. float16: torch rounds z to 2^-11, the kernels do not."""
    assert differences[form.name] < (1e-14 if form.products == "float64" else 2**-9)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
@pytest.mark.parametrize("memory", ["titans", "memora", "kept"])
def test_plans_count_the_products_of_the_kernels(memory: str, interpreted: dict[str, Any]) -> None:
    """Exactly: the interpreter multiplies block by block, and all blocks are full."""
    computed, planned = interpreted["flops"][memory]
    assert computed == planned > 0


def test_pairs_stand_in_the_order_of_networks() -> None:
    """By hand: three rows, which read networks 2 and 0, none, and 2."""
    pairs = pairs_of(torch.tensor([[0.5, 0.0, -1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.3]])[None, None], 2)
    assert pairs.begins[0, 0].tolist() == [0, 1, 1, 3]
    rows_of = (pairs.order[0, 0] // 2).tolist()
    assert rows_of[:1] == [0]
    assert rows_of[1:3] == [0, 2]
    assert sorted(pairs.order[0, 0].tolist()) == list(range(6))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
@pytest.mark.parametrize(
    ("change", "by_torch"),
    [
        ({}, ""),
        ({"kernel": "torch"}, "write read kept group"),
        ({"matrices": 1}, "write read kept group"),
        ({"is_cuda": False}, "write read kept group"),
        ({"dtype": torch.float64}, "write read kept group"),
        ({"width": 192}, "write read kept group"),
        ({"inner_chunk": 128}, "read group"),
        ({"inner_chunk": 256}, "write read group"),
        ({"kept_width": 64}, "kept"),
        ({"heads": 2}, "group"),
    ],
)
def test_torch_computes_what_kernels_have_no_part_in(change: dict[str, Any], by_torch: str) -> None:
    """A stand-in for a tensor on a device, as none is here."""
    of = {"kernel": "triton", "matrices": 2, "is_cuda": True, "dtype": torch.float32, "width": 96, "inner_chunk": 64}
    of |= {"heads": 1, "kept_width": change.get("width", 96), **change}
    shape = (1, 1, of["heads"], 4, of["inner_chunk"], of["width"])
    query: Any = SimpleNamespace(is_cuda=of["is_cuda"], dtype=of["dtype"], shape=shape)
    kept = [torch.ones(1, 1, 1, 5, of["kept_width"])] * of["matrices"]
    passes = passes_of(of["kernel"], "tf32", of["inner_chunk"], query, of["matrices"])
    found = {
        "write": passes.write is TORCH.write and passes.through_writes is TORCH.through_writes,
        "read": passes.read is TORCH.read and passes.through_reads is TORCH.through_reads,
        "kept": kept_passes_of(of["kernel"], "tf32", query, kept) is kept_networks.TORCH,
        "group": simplex_passes_of(of["kernel"], "tf32", query, of["matrices"]) is simplex_group_backward.TORCH,
    }
    assert [name for name, torchs in found.items() if torchs] == by_torch.split()
    assert (selected_passes_of(of["kernel"], "tf32", query, kept) is None) == found["kept"]


def test_what_cannot_run_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernel("torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.deep_memory_kernel: triton is not installed"):
        check_kernel("triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.deep_memory_kernel: triton needs a CUDA device; choose torch"):
        check_kernel("triton")
