"""A tiny corpus and a cluster, made once; what the tests need of the machine."""

import os
import shutil

import pytest

from tests.cluster.machine import skip_if_refused
from tests.cluster.slurm import Slurm
from tests.integration.conftest import data  # noqa: F401, the same tiny corpus

NEEDED = ("slurmctld", "slurmd", "munged", "sshd", "shellcheck", "ip", "unshare")


@pytest.fixture(scope="session", autouse=True)
def installed():
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    assert not missing, f"{', '.join(missing)}: not installed; run tests/cluster/install.sh"
    assert os.geteuid() == 0, "these tests start daemons and make network namespaces: run them as root"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Nodes have names of their own by a mount over /etc/hosts that only they see."""
    skip_if_refused("unshare", "--mount", "mount", "--bind", "/etc/hosts", "/etc/hosts")
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
