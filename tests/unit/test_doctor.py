"""`megamem doctor`: the report, what makes it fail, and the self-test of two processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.doctor import checks as doctor
from megamem.doctor.checks import Finding
from megamem.parallel import self_test
from megamem.parallel.self_test import SelfTestError, run_self_test

COLLECTIVES = {"all-reduce", "broadcast", "all-gather", "reduce-scatter", "send/recv"}


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that start processes, answered at once."""
    monkeypatch.setattr(self_test, "run_self_test", lambda backend, timeout_s: dict.fromkeys(sorted(COLLECTIVES), 1.0))
    monkeypatch.setattr(doctor, "avoid_broken_amx", lambda: None)


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def report(as_json: bool = False) -> tuple[bool, str]:
    result = CliRunner().invoke(app, ["doctor", *(["--json"] if as_json else [])])
    return result.exit_code == 0, result.output


@pytest.mark.distributed
def test_two_processes_over_gloo() -> None:
    timings = run_self_test("gloo", timeout_s=120)
    assert set(timings) == COLLECTIVES
    # 1 MiB over loopback takes about a millisecond; a second would mean that something waited
    assert all(0 < milliseconds < 1000 for milliseconds in timings.values())


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(SelfTestError, match=r"rank [01] exited with 1: .*no_such_backend"):
        run_self_test("no_such_backend", timeout_s=60)


def test_a_rank_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = self_test._start

    def without_rank_1(rank: int, *arguments: Any) -> Any:
        if rank == 0:
            return original(rank, *arguments)
        return self_test.subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(self_test, "_start", without_rank_1)
    with pytest.raises(SelfTestError, match=r"no answer from rank 0, rank 1 within 1 s"):
        run_self_test("gloo", timeout_s=1)


def test_wrong_values_are_refused() -> None:
    assert self_test._measure(lambda: torch.ones(2), torch.ones(2)) >= 0
    with pytest.raises(SelfTestError, match="wrong values"):
        self_test._measure(lambda: torch.zeros(2), torch.ones(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_expected_values_tell_ranks_and_positions_apart(rank: int) -> None:
    """A collective that mixes up ranks, halves or the order of elements cannot leave the expected value."""
    expected = {name: value for name, (_, value) in self_test._collectives(rank, torch.device("cpu")).items()}
    other = {name: value for name, (_, value) in self_test._collectives(1 - rank, torch.device("cpu")).items()}
    assert not torch.equal(expected["send/recv"], other["send/recv"])
    assert not torch.equal(expected["reduce-scatter"], other["reduce-scatter"])
    assert all(not torch.equal(value, value.flip(0)) for value in expected.values())


@pytest.mark.usefixtures("instant")
def test_this_machine_is_healthy() -> None:
    healthy, text = report()
    assert healthy
    assert "megamem can work here" in text
    for word in ("torch", "deepspeed", "flash-attn", "GiB free", "all-reduce 1.00 ms"):
        assert word in text


@pytest.mark.usefixtures("instant")
def test_json() -> None:
    healthy, text = report(as_json=True)
    found = json.loads(text)
    assert healthy
    assert found["ok"] is True
    assert {"section", "name", "status", "detail"} == set(found["findings"][0])
    assert {finding["section"] for finding in found["findings"]} == {
        "versions", "devices", "kernels", "optional", "disk", "collectives",
    }  # fmt: skip


def test_every_required_package_is_checked() -> None:
    names = {finding.name for finding in doctor.check_versions()}
    lines = [Requirement(line) for line in importlib.metadata.requires("megamem") or []]
    # those of this interpreter, without any extra
    required = {line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})}
    assert names == required | {"python"}
    assert {"torch", "deepspeed", "megatron-core"} <= names


@pytest.mark.usefixtures("instant")
def test_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    healthy, text = report()
    assert not healthy
    assert "megamem cannot work here: versions/deepspeed" in text


def test_package_out_of_range_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.1")
    finding = named(doctor.check_versions(), "torch")
    assert finding.status == "warning"
    assert "0.1 is outside of the tested range" in finding.detail


def test_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.2")
    finding = named(doctor.check_versions(), "python")
    assert finding.status == "failed"
    assert finding.detail == "3.10.2 (needs >=3.11)"


def test_library_that_does_not_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("libfoo.so:\n cannot open")

    monkeypatch.setattr("megamem.parallel.libraries.prepare_libraries", broken)
    (finding,) = doctor.check_imports()
    assert finding.status == "failed"
    assert finding.detail.endswith("libfoo.so: cannot open")


@pytest.mark.usefixtures("instant")
def test_failed_self_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: str, timeout_s: float) -> dict[str, float]:
        raise SelfTestError("no answer from rank 1 within 120 s")

    monkeypatch.setattr(self_test, "run_self_test", fail)
    healthy, text = report()
    assert not healthy
    assert "collectives/gloo" in text
    assert "no answer from rank 1" in text


@pytest.mark.usefixtures("instant")
def test_nccl_is_tested_where_there_are_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [finding.name for finding in doctor.check_collectives()] == ["gloo", "nccl"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [finding.name for finding in doctor.check_collectives()] == ["gloo"]


def fake_device(name: str, major: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, total_memory=80 * 2**30, major=major, minor=0)


def test_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [fake_device("NVIDIA H100 80GB HBM3", 9), fake_device("Tesla V100-SXM2-32GB", 7)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    hopper, volta = doctor.check_cuda()
    assert hopper.status == "ok"
    assert hopper.detail == "NVIDIA H100 80GB HBM3, 80.0 GiB, compute capability 9.0, 990 TFLOP/s dense BF16"
    assert volta.status == "warning"
    assert "MFU is not reported" in volta.detail
    assert "no BF16" in volta.detail


def test_no_cuda_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = doctor.check_cuda()
    assert finding.status == "note"


@pytest.mark.parametrize(("broken", "status"), [(None, "ok"), ("AMX is announced but faults", "warning")])
def test_amx(monkeypatch: pytest.MonkeyPatch, broken: str | None, status: str) -> None:
    monkeypatch.setattr(doctor, "amx_announced", lambda: True)
    monkeypatch.setattr(doctor, "avoid_broken_amx", lambda: broken)
    assert named(doctor.check_cpu(), "cpu amx").status == status


def test_no_amx_says_nothing_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "amx_announced", lambda: False)
    assert {finding.name for finding in doctor.check_cpu()} == {"cpu", "cpu bf16"}


def test_absent_accelerators_cost_something_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    findings = doctor.check_accelerators()
    expected = {"flash-attn", "flash-linear-attention", "triton", "transformer-engine", "apex"}
    assert {finding.name for finding in findings} == expected
    assert all(finding.status == "note" and "without it:" in finding.detail for finding in findings)


def test_accelerators_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "apex":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    findings = doctor.check_accelerators()
    assert named(findings, "flash-attn").detail == "1.2.3"
    assert named(findings, "apex").detail == "installed, version unknown"
    assert doctor.healthy(findings)


@pytest.mark.parametrize(("free", "status"), [(1.0, "warning"), (50.0, "ok")])
def test_disk(monkeypatch: pytest.MonkeyPatch, free: float, status: str) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * 2**30))
    (finding,) = doctor.check_disk()
    assert finding.status == status
    assert f"{free:.1f} GiB free" in finding.detail
