"""A job across two hosts with a cable between them: the same run as on one host, and what a cut cable does to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launchers.node import TOKEN
from megamem.errors import STOPPED, NodesMissingError, StuckRankError
from tests.cluster.hosts import Network
from tests.cluster.machine import skip_if_refused
from tests.cluster.runs import losses, megamem, tiny_run, wait_for
from tests.integration.commands import LENGTH, environment
from tests.integration.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]
STALL_S = 15
SLACK_S = 30
"""For beats of a tenth of the stall timeout and the ends of Python processes on a busy machine."""
LONG_S = 400
"""For the imports of torch and DeepSpeed there, and the run."""
LAYOUTS = {"pp": {"pp": 2}, "dp": {"zero_stage": 1}}


@pytest.fixture
def network():
    made = "mount --bind /etc/hosts /etc/hosts && ip link add mm-a type veth peer name mm-b"
    skip_if_refused("unshare", "--net", "--mount", "--uts", "sh", "-c", made)  # what it is made of, but private
    with Network() as found:
        yield found


def config_of(data: Path, folder: Path, layout: str) -> Path:
    """A run that does not end by itself."""
    parallel = {**LAYOUTS[layout], "stall_timeout_s": STALL_S, "timeout_s": 120}
    training = {"steps": 100_000, "batch_tokens": 4 * LENGTH}
    return tiny_run(data, folder, training=training, parallel=parallel, checkpoint={"every": 2, "keep_last": 3})


def on_one_host(data: Path, folder: Path, layout: str, steps: int) -> dict[int, float]:
    """Losses of the first steps of the same run by two ranks on one host."""
    folder.mkdir()
    config = config_of(data, folder, layout)
    megamem("train", str(config), "--processes", "2", f"training.stop_after={steps}", ends_with=STOPPED)
    found = losses(folder / "runs" / "run")
    assert sorted(found) == list(range(1, steps + 1))
    return found


class Hosts:
    """An agent on each of two hosts, which may be left and started again. A context manager."""

    def __init__(self, network: Network, config: Path, folder: Path, nodes: str, restarts: int) -> None:
        folder.mkdir()
        port, self.folder = free_port(), folder
        variables = {**environment(), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "GLOO_SOCKET_IFNAME": "cable0"}
        variables[TOKEN] = "known to both"
        self.agents = []
        for host, address in enumerate(network.ADDRESSES):
            words = [
                sys.executable, "-m", "megamem", "agent", "--nodes", nodes, "--processes", "1", "--job", "test",
                "--head", network.ADDRESSES[0], "--port", str(port), "--node-rank", str(host), "--address", address,
                "--max-restarts", str(restarts), "--stop-seconds", "30", "--", "train", str(config),
            ]  # fmt: skip
            log = (folder / f"log-{host}").open("wb")
            # sessions of their own, so that nothing is left of a test that fails
            self.agents.append(
                subprocess.Popen(
                    network.command(host, *words), env=variables, stdout=log, stderr=log, start_new_session=True
                )
            )

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait(60)
            except subprocess.TimeoutExpired:
                agent.kill()

    def log(self, host: int) -> str:
        return (self.folder / f"log-{host}").read_text(errors="replace")

    def logs(self) -> str:
        return f"{self.log(0)}\n----\n{self.log(1)}"

    def codes(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        for agent in self.agents:
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running\n{self.logs()}") from None
        return [agent.returncode for agent in self.agents]

    def wait_for_step(self, run: Path, step: int) -> None:
        wait_for(
            lambda: len(losses(run)) >= step or any(agent.poll() is not None for agent in self.agents),
            LONG_S,
            self.logs,
        )
        assert all(agent.poll() is None for agent in self.agents), self.logs()


SILENT = r"megamem: rank [01] \([^)]*\) on host-[ab] (stopped responding|makes no progress) for \d+ s "


@pytest.mark.timeout(1500)
def test_a_cut_cable_ends_the_job_by_name_and_the_same_command_goes_on(network, data, tmp_path):
    """Two stages of a pipeline, one on each host."""
    config, run = config_of(data, tmp_path, "pp"), tmp_path / "runs" / "run"
    with Hosts(network, config, tmp_path / "first", "2", restarts=0) as hosts:
        hosts.wait_for_step(run, 5)
        network.cut()
        begun = time.monotonic()
        wait_for(lambda: re.search(SILENT, hosts.logs()) is not None, STALL_S + SLACK_S, hosts.logs)
        assert time.monotonic() - begun < STALL_S + SLACK_S
        # the agents try in vain to tell one another
        assert hosts.codes(LONG_S) == [StuckRankError.exit_code] * 2, hosts.logs()
    network.mend()
    with Hosts(network, config, tmp_path / "second", "2", restarts=0) as hosts:
        hosts.wait_for_step(run, len(losses(run)) + 5)
        hosts.agents[0].send_signal(signal.SIGTERM)
        assert hosts.codes(LONG_S) == [STOPPED] * 2, hosts.logs()
        assert "goes on from" in hosts.logs()
    found = losses(run)
    # bit for bit: the same ranks add the same numbers in the same order
    assert found == on_one_host(data, tmp_path / "one-host", "pp", len(found))


@pytest.mark.timeout(1500)
def test_the_host_that_remains_goes_on_alone_where_the_layout_allows_it(network, data, tmp_path):
    """Data parallel, one rank on each host; batch and layout fit one host too."""
    config, run = config_of(data, tmp_path, "dp"), tmp_path / "runs" / "run"
    with Hosts(network, config, tmp_path / "first", "1,2", restarts=1) as hosts:
        hosts.wait_for_step(run, 5)
        network.cut()
        wait_for(lambda: "goes on from" in hosts.log(0), LONG_S, hosts.logs)
        together = len(losses(run))
        wait_for(lambda: len(losses(run)) >= together + 3, LONG_S, hosts.logs)
        hosts.agents[0].send_signal(signal.SIGTERM)
        alone, lost = hosts.codes(LONG_S)
        assert alone == STOPPED, hosts.logs()
        assert lost in (StuckRankError.exit_code, NodesMissingError.exit_code), hosts.log(1)
        assert "megamem: 1 node(s) x 1 rank(s) start, restart 1 of at most 1\n" in hosts.log(0)
        assert re.search(SILENT, hosts.log(0)), hosts.log(0)
    found = losses(run)
    expected = on_one_host(data, tmp_path / "one-host", "dp", len(found))
    resumed = int(re.search(r"goes on from .*step-0*(\d+)", hosts.log(0))[1])
    assert resumed >= 2
    assert [found[step] for step in range(1, resumed + 1)] == [expected[step] for step in range(1, resumed + 1)]
    # one rank adds up what two did, in another order, carried through some AdamW steps
    assert [found[step] for step in expected] == pytest.approx(list(expected.values()), abs=1e-5)
