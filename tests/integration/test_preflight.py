"""The check before a run, on real processes: good ranks pass, bad ones are named."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from megamem.errors import MegamemError
from tests.integration.commands import finish, megamem
from tests.integration.ranks import Job, command

pytestmark = [pytest.mark.distributed, pytest.mark.alone]
WRONG = MegamemError.exit_code
LIMIT_S = 3
"""Of a pair; over loopback it takes milliseconds."""


def arguments(folder) -> tuple[str, ...]:
    return "preflight", "--device", "cpu", "--folder", str(folder), "--timeout", str(LIMIT_S), "--json"


def report(job: Job) -> dict:
    return json.loads(job.output(0, "out").splitlines()[-1])


def errors(found: dict) -> list[str]:
    return [finding["line"] for finding in found["findings"] if finding["level"] == "error"]


def test_local_processes(tmp_path):
    """As a user calls it. How fast the two are beside each other depends on the machine; all else must be right."""
    code, out, err = finish(megamem(*arguments(tmp_path / "runs"), "--processes", "2"))
    assert err == ""
    found = json.loads(out.splitlines()[-1])
    assert code == (0 if found["ok"] else WRONG)
    assert not [line for line in errors(found) if "matrix products run at" not in line]
    assert [facts["rank"] for facts in found["ranks"]] == [0, 1]
    # a processor without BF16 units and a busy machine reach 1e8
    assert all(facts["bf16"] > 1e7 and facts["fp32"] > 1e7 for facts in found["ranks"])
    (link,) = found["links"]
    assert (link["a"], link["b"], link["error"]) == (0, 1, None)
    # loopback: far above a megabyte a second, far below a second
    assert link["bandwidth"] > 1e6
    assert 0 < link["latency_s"] < 0.1
    # both read one clock, and the error of a reading is stated
    assert abs(link["clock_s"]) <= link["clock_error_s"] < 0.1
    assert len(found["reductions"]) == 3
    assert list((tmp_path / "runs").iterdir()) == [], "nothing is left behind"


def spoiled(*words: str) -> None:
    """On a rank: the check, with small products. Rank 1 has an older package, each product takes rank 2 a tenth of a
    second more, and these two never hear each other."""
    import torch

    from megamem.preflight import collect, links, run

    collect.SIZES["cpu"], collect.SECONDS = 64, 0.05
    versions, product, exchange = run.versions, torch.Tensor.__matmul__, links.exchange

    def slowed(left, right):
        time.sleep(0.1)
        return product(left, right)

    def deaf(rank, partner, device):
        if {rank, partner} == {1, 2}:
            time.sleep(600)
        return exchange(rank, partner, device)

    links.exchange = deaf
    if os.environ["RANK"] == "1":
        run.versions = lambda device: {**versions(device), "deepspeed": "0.19.3"}
    if os.environ["RANK"] == "2":
        torch.Tensor.__matmul__ = slowed
    command(*words)


def test_an_older_package_a_slow_rank_and_a_pair_that_hangs_are_named(tmp_path):
    begun = time.monotonic()
    with Job(tmp_path / "job", 3, spoiled, *arguments(tmp_path / "runs")) as job:
        assert job.codes(60) == [WRONG] * 3
        found = report(job)
    assert time.monotonic() - begun < LIMIT_S + 40, "the limit of one pair, and three processes on a busy machine"
    host, said = os.uname().nodename, errors(found)
    assert f"deepspeed is 0.19.3 on rank 1 ({host}), but {found['ranks'][0]['versions']['deepspeed']} on 2 of 3" in said
    for dtype in ("bf16", "fp32"):
        assert [line for line in said if line.startswith(f"rank 2 ({host}): {dtype} matrix products run at ")]
    assert f"rank 1 ({host}) and rank 2 ({host}): send/recv did not end within {LIMIT_S} s" in said
    assert "all-reduce was not measured, since not all pairs of ranks can talk" in said
    assert sorted((link["a"], link["b"]) for link in found["links"] if not link["error"]) == [(0, 1), (0, 2)]


def one_stops(*words: str) -> None:
    """On a rank: the check, in which rank 1 is stopped before it says what it found."""
    from megamem.preflight import run

    run.FACTS_S = 3.0
    if os.environ["RANK"] == "1":
        run.versions = lambda device: os.kill(os.getpid(), signal.SIGSTOP)
    command(*words)


def test_a_rank_that_falls_silent_is_named(tmp_path):
    with Job(tmp_path / "job", 2, one_stops, *arguments(tmp_path / "runs")) as job:
        job.processes[0].join(60)  # a launcher would end the other
        assert job.processes[0].exitcode == WRONG
        host = os.uname().nodename
        assert errors(report(job)) == [f"rank 1 ({host}): did not say what it found within 3 s"]


def broken(*words: str) -> None:
    """On a rank: the check, on a host with one device too few (rank 1) and one with an error in it (rank 2)."""
    import torch

    from megamem.preflight import collect, run

    collect.SIZES["cpu"], collect.SECONDS = 64, 0.05

    def product(*_):
        raise RuntimeError("CUDA error: uncorrectable ECC error\nencountered")

    if os.environ["RANK"] == "1":
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    if os.environ["RANK"] == "2":
        run.matmul_rate = product
    command(*words)


def test_devices_that_are_missing_or_broken_are_named(tmp_path):
    """By rank 0, whatever rank and host they belong to; and the others do not wait for them."""
    words = ("preflight", "--folder", str(tmp_path / "runs"), "--json")
    with Job(tmp_path / "job", 3, broken, *words) as job:
        assert job.codes(60) == [WRONG] * 3, job.output(1)
        found = report(job)
    host = os.uname().nodename
    assert errors(found) == [
        f"rank 1 ({host}): --device cuda: local rank 1 on a machine with 1 CUDA device(s); start at most one process "
        "per device, or use --device cpu",
        f"rank 2 ({host}): computing, or looking at device and host, fails: CUDA error: uncorrectable ECC error "
        "encountered",
    ]
    assert [facts["rank"] for facts in found["ranks"]] == [0]
    assert found["links"] == []
    assert list((tmp_path / "runs").iterdir()) == []
