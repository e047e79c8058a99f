"""A tiny corpus, made once."""

import os
import shutil

import pytest

from tests.unit.data_helpers import make_shards

NEEDED = ("slurmctld", "slurmd", "munged", "sshd", "shellcheck", "ip", "unshare")


@pytest.fixture(scope="session", autouse=True)
def installed():
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    assert not missing, f"{', '.join(missing)}: not installed; run tests/cluster/install.sh"
    assert os.geteuid() == 0, "these tests start daemons and make network namespaces: run them as root"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Folder with tokenizer/, train/ and validation/."""
    root = tmp_path_factory.mktemp("data")
    make_shards(root, (800, 700, 1500, 600, 1200, 900), name="train", seed=0)
    make_shards(root, (300, 200), name="validation", seed=100)
    return root
