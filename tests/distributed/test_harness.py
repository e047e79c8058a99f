"""The harness itself: results, failures, deaths and hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import WorldError, run_distributed

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


def hang_on_one_rank(payload):
    if os.environ["RANK"] == "1":
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
    begin = time.monotonic()
    with pytest.raises(WorldError, match=r"(?s)ranks \[1\] did not finish.*hang_on_one_rank"):
        run_distributed(2, "tests.distributed.test_harness:hang_on_one_rank", timeout_s=3)
    assert time.monotonic() - begin < 30


def test_a_function_that_does_not_exist_is_an_error_with_its_cause():
    with pytest.raises(WorldError, match=r"No module named 'tests\.no_such_module'"):
        run_distributed(2, "tests.no_such_module:function")
