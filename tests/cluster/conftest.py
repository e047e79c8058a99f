"""A tiny corpus, made once."""

import os
import shutil

import pytest

from tests.integration.conftest import data  # noqa: F401, the same tiny corpus

NEEDED = ("slurmctld", "slurmd", "munged", "sshd", "shellcheck", "ip", "unshare")


@pytest.fixture(scope="session", autouse=True)
def installed():
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    assert not missing, f"{', '.join(missing)}: not installed; run tests/cluster/install.sh"
    assert os.geteuid() == 0, "these tests start daemons and make network namespaces: run them as root"
