"""Keeping oneDNN off an AMX that faults."""

import subprocess
from types import SimpleNamespace

import pytest

from megamem import hardware


@pytest.fixture
def probes(monkeypatch):
    """AMX is announced and nothing is known of it; collects the probes, which end with `result.returncode`."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("MEGAMEM_AMX_WORKS", raising=False)
    monkeypatch.setattr(hardware, "amx_announced", lambda: True)
    result = SimpleNamespace(returncode=0, calls=0)

    def run(command, **_):
        result.calls += 1
        return result

    monkeypatch.setattr(subprocess, "run", run)
    # so that the changes of the environment are undone
    monkeypatch.setattr(hardware.os, "environ", dict(hardware.os.environ))
    return result


def test_without_amx_nothing_is_tried(probes, monkeypatch):
    monkeypatch.setattr(hardware, "amx_announced", lambda: False)
    assert hardware.avoid_broken_amx() is None
    assert probes.calls == 0


@pytest.mark.parametrize("code", [0, 1])
def test_an_amx_that_works_is_used_and_tried_once(probes, code):
    """A probe that ends by itself says nothing against AMX, whatever else went wrong."""
    probes.returncode = code
    assert hardware.avoid_broken_amx() is None
    assert hardware.avoid_broken_amx() is None
    assert probes.calls == 1
    assert "ONEDNN_MAX_CPU_ISA" not in hardware.os.environ


def test_an_amx_that_faults_is_avoided_here_and_in_children(probes):
    probes.returncode = -4  # SIGILL
    line = hardware.avoid_broken_amx()
    assert "AMX is announced but faults" in line
    assert hardware.os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert hardware.avoid_broken_amx() is None
    assert probes.calls == 1


def test_a_choice_of_the_user_stays(probes):
    hardware.os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    assert hardware.avoid_broken_amx() is None
    assert (probes.calls, hardware.os.environ["ONEDNN_MAX_CPU_ISA"]) == (0, "AVX2")
