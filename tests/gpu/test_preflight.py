"""The preflight of a single device: its rates are those of the device, its software is told."""

import re

import pytest
import torch

from megamem.costs.devices import device_peak
from megamem.preflight import run
from megamem.preflight.findings import findings, healthy


def test_a_device_checks_itself(tmp_path, device, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    found = run.preflight(tmp_path / "runs", "cuda", 10, lambda record: None)
    assert healthy(findings(found))
    (facts,) = found.ranks
    assert facts.device == torch.cuda.get_device_name(0)
    assert facts.memory > 0
    assert all(re.fullmatch(r"\d+(\.\d+)+", facts.versions[name]) for name in ("cuda", "nccl", "driver"))
    for dtype in ("bf16", "fp32"):
        if peak := device_peak(facts.device, dtype):
            # large products reach more than a quarter of the peak; a clock above the data sheet's may pass it a little
            assert 0.25 < getattr(facts, dtype) / peak < 1.1, dtype
        else:
            pytest.skip(f"the peak of {facts.device} is not known")
