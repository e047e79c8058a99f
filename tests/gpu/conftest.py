"""Marks every test here `gpu` and skips those for which there are too few CUDA devices."""

from pathlib import Path

import pytest
import torch

from tests.unit.data_helpers import make_shards

HERE = Path(__file__).parent


def missing_devices(item, found):
    """Return why a test cannot run on so many devices, None if it can; `devices(N)` marks what needs several."""
    mark = item.get_closest_marker("devices")
    needed = mark.args[0] if mark else 1
    if found >= needed:
        return None
    return f"needs {needed} CUDA device{'s' if needed > 1 else ''}, found {found}"


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason := missing_devices(item, torch.cuda.device_count()):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder with tokenizer/ and train/."""
    root = tmp_path_factory.mktemp("data")
    make_shards(root, (800, 700, 1500, 600), name="train", seed=0)
    return root
