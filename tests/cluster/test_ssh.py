"""`megamem launch --on ssh` to two sshd on two addresses: a run, a signal, a failure, a host that is not there."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest
import yaml

from megamem.errors import STOPPED, DataError, NodesMissingError
from tests.cluster.hosts import SshHosts
from tests.cluster.runs import losses, tiny_run, wait_for
from tests.integration.commands import LENGTH, finish, megamem
from tests.integration.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]
ADDRESSES = ["127.0.0.2", "127.0.0.3"]
LONG_S = 400
"""Of four Python processes that import torch and DeepSpeed, on a busy machine."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with SshHosts(tmp_path_factory.mktemp("ssh"), ADDRESSES, free_port()) as found:
        yield found


@pytest.fixture
def cluster(hosts, tmp_path):
    """File of the cluster."""
    tree = {
        "nodes": 2,
        "processes_per_node": 1,
        "port": free_port(),
        "max_restarts": 0,
        "stop_seconds": 30,
        "environment": {"OMP_NUM_THREADS": 1, "GREETING": "it's a $HOME; `true`", "WANDB_MODE": "offline"},
        "ssh": {"hosts": ADDRESSES, "port": hosts.port, "options": hosts.options, "python": sys.executable},
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def launch(config, cluster, *overrides):
    return megamem("launch", str(config), "--on", "ssh", "--cluster", str(cluster), *overrides)


@pytest.mark.timeout(1800)
def test_a_run_on_two_hosts_stopped_by_a_signal_and_gone_on_with(data, tmp_path, cluster):
    config = tiny_run(data, tmp_path, training={"batch_tokens": 4 * LENGTH}, parallel={"pp": 2})
    run = tmp_path / "runs" / "run"
    process = launch(config, cluster)
    wait_for(lambda: len(losses(run)) >= 3 or process.poll() is not None, LONG_S, lambda: "no third step")
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process, LONG_S)
    assert code == STOPPED, err
    assert "[127.0.0.2] stopped by a signal at a step border" in out
    stopped_at = len(losses(run))
    process = launch(config, cluster)
    code, out, err = finish(process, LONG_S)
    assert code == 0, err
    assert re.search(rf"\[127\.0\.0\.2\] goes on from .*step-{stopped_at:08d}", out)
    assert "[127.0.0.2] megamem: 2 node(s) x 1 rank(s) start" in err
    assert {line.partition("]")[0] for line in err.splitlines()} <= {"[127.0.0.2", "[127.0.0.3"}
    assert json.loads((run / "result.json").read_text())["steps"] == len(losses(run))
    assert len(list((run / "launch").iterdir())) == 2, "a snapshot of each start"


@pytest.mark.timeout(1800)
def test_what_one_host_ends_with_ends_all(data, tmp_path, cluster):
    """Only the first rank looks at the data: the second host's waits for it, and is ended."""
    config = tiny_run(data, tmp_path, parallel={"pp": 2})
    code, _, err = finish(launch(config, cluster, f"data.sources=[{tmp_path / 'nothing'}]"), LONG_S)
    assert code == DataError.exit_code
    assert re.search(r"\[127\.0\.0\.2\] megamem: .*nothing", err), err


def test_a_host_that_does_not_answer_is_named(data, tmp_path, cluster):
    config = tiny_run(data, tmp_path, parallel={"pp": 2})
    code, _, err = finish(launch(config, cluster, "ssh.hosts=[127.0.0.2, 127.0.0.4]"), LONG_S)
    assert "megamem: ssh.hosts: 127.0.0.4: ssh could not connect, or lost the connection\n" in err
    assert code == NodesMissingError.exit_code
