"""What is packed on a rented machine, and the rates that its devices reach, as far as a CPU can tell."""

import json
import os
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_rates, rented
from benchmarks.rented import INTERRUPTED, LATE, Step
from megamem.config.load import load_config
from megamem.planning.device_rates import Sizes, device_rates
from megamem.planning.machines import ACHIEVED, Machine, machine
from megamem.planning.roofline import MatmulRates, Rates

TINY = Sizes(32, (4, 8), (1, 2, 16, 8), torch.float32, (2, 2**10), 10)
H100 = {"name": "NVIDIA H100 80GB HBM3", "bytes": 85e9}


def python(name: str, code: str, **variables: str) -> Step:
    return Step(name, [sys.executable, "-c", code], variables)


def test_steps_are_run_whatever_becomes_of_others_and_packed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, results = tmp_path / "2x-h100", tmp_path / "benchmarks"
    folder.mkdir()
    results.mkdir()
    (results / "old.json").write_text("{}")
    since = (results / "old.json").stat().st_mtime + 1
    todo = [
        python("first", "import sys; print('to the terminal'); print('errors too', file=sys.stderr); sys.exit(3)"),
        python("second", "import os; print(os.environ['ASKED'])", ASKED="for this"),
    ]
    outcomes = rented.run_all(todo, folder, 60)
    (results / "gpu.json").write_text('{"cells": []}')
    (results / "device.yaml").write_text("name: x\n")
    for name in ("gpu.json", "device.yaml"):
        os.utime(results / name, (since + 1, since + 1))
    archive = rented.pack(folder, {"devices": [H100]}, outcomes, results, since)

    assert archive == tmp_path / "2x-h100.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    unpacked = tmp_path / "unpacked" / "2x-h100"
    assert sorted(path.name for path in unpacked.iterdir()) == [
        "device.yaml", "first.log", "gpu.json", "machine.json", "second.log",
    ]  # fmt: skip
    record = json.loads((unpacked / "machine.json").read_text())
    assert record["machine"] == {"devices": [H100]}
    assert [(step["name"], step["code"]) for step in record["steps"]] == [("first", 3), ("second", 0)]
    assert set((unpacked / "first.log").read_text().splitlines()) == {"to the terminal", "errors too"}
    assert (unpacked / "second.log").read_text() == "for this\n"
    assert "to the terminal" in capfd.readouterr().out


def test_a_late_step_is_ended_with_what_it_started_and_the_next_are_not_run(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    begun = time.monotonic()
    late, after = rented.run_all([python("late", child), python("after", "print('ran')")], tmp_path, 1.0)
    assert time.monotonic() - begun < 60
    assert (late.code, after.code, after.seconds) == (LATE, LATE, 0.0)
    assert (tmp_path / "after.log").read_text() == "not run: time was up\n"


def test_ctrl_c_ends_a_step_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", lambda *words, **more: interrupted() if words[0] == "started\n" else None)
    todo = [python("long", "import time; print('started', flush=True); time.sleep(600)"), python("after", "")]
    (only,) = rented.run_all(todo, tmp_path, 60)
    assert only.code == INTERRUPTED
    assert (tmp_path / "long.log").read_text() == "started\n"


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ([H100, H100], "2x-nvidia-h100-80gb-hbm3-20250131-1200"),
        ([H100, {"name": "A10"}], "1x-nvidia-h100-80gb-hbm3-and-1x-a10-20250131-1200"),
        ([], "no-device-20250131-1200"),
    ],
)
def test_archives_are_named_for_their_devices(devices: list[dict[str, object]], name: str) -> None:
    at = time.strptime("2025-01-31 12:00", "%Y-%m-%d %H:%M")
    assert rented.folder_name({"devices": devices}, at) == name


def test_this_machine_is_described() -> None:
    found = rented.machine()
    assert len(found["devices"]) == torch.cuda.device_count()
    assert found["versions"]["torch"] == torch.__version__
    assert found["processors"] > 0
    assert found["memory_bytes"] > 2**28
    json.dumps(found)


def test_what_is_run(tmp_path: Path) -> None:
    preflight, tests, benchmark = rented.steps(tmp_path)
    assert preflight.command[1:4] == ["-m", "megamem", "preflight"]
    assert (tests.command, benchmark.command) == (["make", "test-gpu"], ["make", "bench-gpu"])
    assert str(tmp_path / "tests.xml") in tests.variables["PYTEST_ADDOPTS"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rented.main(["--folder", str(tmp_path / "rented")]) == 2
    assert capsys.readouterr().out == "benchmarks.rented: needs a CUDA device and torch finds none; nothing run\n"
    assert not (tmp_path / "rented").exists()
    gpu_rates.main(["--output", str(tmp_path / "device.yaml")])
    said = "benchmarks.gpu_rates: needs a CUDA device and torch finds none; nothing measured\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("options", "said"), [(["--hours", "0"], "--hours 0: give more than 0"), ([], "can be written")]
)
def test_bad_options(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rented, "machine", lambda: {"devices": [H100]})
    (tmp_path / "file").touch()
    assert rented.main([*options, "--folder", str(tmp_path / "file")]) == 2
    assert said in capsys.readouterr().out


# rates


def test_rates_of_a_device() -> None:
    found = device_rates(torch.device("cpu"), TINY)
    assert min(*found.matmul.values(), found.attention, found.attention_backward, found.memory, found.launch) > 0
    assert found.functions is not None
    assert found.functions > 0
    assert found.kernel == 0.0
    assert not found.ahead, "the host computes itself"


def test_rates_are_written_as_plans_read_them(tmp_path: Path) -> None:
    matmul: MatmulRates = {"bf16": 7e14, "fp32": 5e13, "tf32": 1e14}
    rates = Rates(matmul=matmul, attention=4e14, attention_backward=3e14, memory=2.5e12, kernel=2e-6, launch=5e-6)
    found = gpu_rates.measured_machine("NVIDIA H100 80GB HBM3", 85e9, 2, rates, 3.6e11)
    gpu_rates.write_machine(found, tmp_path / "folder" / "device.yaml")
    read = machine(str(tmp_path / "folder" / "device.yaml"), 2)
    assert read == found == load_config(Machine, tmp_path / "folder" / "device.yaml")
    assert (read.reached, read.per_node, read.memory) == (rates, 2, 85e9)
    assert read.rate(2) == ACHIEVED * read.link == pytest.approx(3.6e11), "what was measured is what plans expect"
    known = machine("h100", 2)
    assert (read.reserve, read.network) == (known.reserve, known.network)
    alone = gpu_rates.measured_machine("NVIDIA H100 80GB HBM3", 85e9, 1, rates, None)
    assert alone.link == known.link, "one device has no link to measure"


def test_the_largest_all_reduce_of_a_preflight_counts() -> None:
    reductions = [{"bytes": 100, "seconds": 1, "bandwidth": 9.0}, {"bytes": 2000, "seconds": 1, "bandwidth": 5.0}]
    assert gpu_rates.all_reduce_rate("words\n" + json.dumps({"ok": True, "reductions": reductions}) + "\nmore") == 5.0
    assert gpu_rates.all_reduce_rate('{"ok": false, "reductions": []}') is None
    assert gpu_rates.all_reduce_rate("") is None
