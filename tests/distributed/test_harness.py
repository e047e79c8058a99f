"""The harness itself: results, failures, deaths and hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import ROOT, WorldError, run_distributed

pytestmark = pytest.mark.distributed


def sum_over_ranks(payload):
    dist.init_process_group("gloo")
    total = payload["value"] * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": total, "variable": os.environ.get("MEGAMEM_TEST")}


def fail_on_one_rank(payload):
    dist.init_process_group("gloo")
    if dist.get_rank() == payload:
        raise ValueError("the reason")
    dist.barrier()


def die_on_one_rank(payload):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def nothing(payload):
    return None


def hang_on_one_rank(payload):
    if os.environ["RANK"] == "1":
        time.sleep(600)


def write_process_ids(payload):
    folder, rank = Path(payload), os.environ["RANK"]
    for name, pid in (("supervisor", os.getppid()), (f"rank-{rank}", os.getpid())):
        # every rank writes the supervisor's: each by a name of its own until the file is whole
        part = folder / f".{name}-by-{rank}"
        part.write_text(str(pid))
        part.replace(folder / name)
    time.sleep(600)


def test_every_rank_returns_its_result():
    here = "tests.distributed.test_harness:sum_over_ranks"
    results = run_distributed(3, here, {"value": torch.ones(2)}, env={"MEGAMEM_TEST": "yes"})
    assert [r["rank"] for r in results] == [0, 1, 2]
    assert all(r["total"].tolist() == [6.0, 6.0] and r["variable"] == "yes" for r in results)


def test_a_failing_rank_is_named_with_its_traceback():
    with pytest.raises(WorldError, match=r"(?s)rank 1 of 2 failed.*fail_on_one_rank.*ValueError: the reason"):
        run_distributed(2, "tests.distributed.test_harness:fail_on_one_rank", 1)


def test_a_rank_that_is_killed_is_named():
    with pytest.raises(WorldError, match="rank 1 of 2 died of SIGKILL"):
        run_distributed(2, "tests.distributed.test_harness:die_on_one_rank")


@pytest.mark.alone
def test_a_stuck_rank_is_named_and_shows_where_it_stands():
    # the process that worlds are forked from imports what they need before the first one
    assert run_distributed(1, "tests.distributed.test_harness:nothing") == [None]
    begin = time.monotonic()
    with pytest.raises(WorldError, match=r"(?s)ranks \[1\] did not finish.*hang_on_one_rank"):
        run_distributed(2, "tests.distributed.test_harness:hang_on_one_rank", timeout_s=3)
    assert time.monotonic() - begin < 30


def test_a_function_that_does_not_exist_is_an_error_with_its_cause():
    with pytest.raises(WorldError, match=r"No module named 'tests\.no_such_module'"):
        run_distributed(2, "tests.no_such_module:function")


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


WORLD = (
    f"from tests.distributed.harness import run_distributed; run_distributed(2, '{__name__}:write_process_ids', FOLDER)"
)
JOB = "from tests.integration.ranks import Job; Job(Path(FOLDER) / 'job', 2, write_process_ids, FOLDER).results(600)"


@pytest.mark.parametrize(
    ("call", "killed"), [(WORLD, "caller"), (WORLD, "supervisor"), (JOB, "caller")], ids=["world", "supervisor", "job"]
)
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL], ids=lambda number: number.name
)
def test_no_rank_outlives_the_tests(call, killed, number, tmp_path):
    """Neither when pytest is ended by a signal, which runs no `finally`, nor when the process that forks is."""
    begin = f"from pathlib import Path; from {__name__} import write_process_ids; FOLDER = {str(tmp_path)!r}; "
    # these ranks need no more than torch
    begin += "from tests.processes import CONTEXT; CONTEXT.set_forkserver_preload(['torch']); "
    caller = subprocess.Popen([sys.executable, "-c", begin + call], cwd=ROOT, stderr=subprocess.DEVNULL)
    names = ["supervisor", "rank-0", "rank-1"]
    try:
        deadline = time.monotonic() + 300
        while not all((tmp_path / name).exists() for name in names):
            assert time.monotonic() < deadline
            assert caller.poll() is None
            time.sleep(0.05)
        pids = {name: int((tmp_path / name).read_text()) for name in names}
        os.kill(caller.pid if killed == "caller" else pids["supervisor"], number)
        caller.wait(60)
    finally:
        caller.kill()
        caller.wait()
    deadline = time.monotonic() + 20
    while not all(has_ended(pid) for pid in pids.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [name for name, pid in pids.items() if not has_ended(pid)] == []
