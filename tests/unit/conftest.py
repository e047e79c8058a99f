"""What several unit tests read."""

import pytest
import torch

from tests.unit.data_helpers import make_shards
from tests.unit.small_disk import small_disk  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder with tokenizer/, train/ and validation/."""
    root = tmp_path_factory.mktemp("data")
    make_shards(root, (800, 700), name="train", seed=0)
    make_shards(root, (300,), name="validation", seed=100)
    return root


@pytest.fixture
def one_thread():
    """One, for benchmarks that set torch's threads, which are as many as before again afterwards."""
    before = torch.get_num_threads()
    yield 1
    torch.set_num_threads(before)
