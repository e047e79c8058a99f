"""A tiny corpus, made once."""

import pytest

from tests.unit.data_helpers import make_shards


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Folder with tokenizer/, train/ and validation/."""
    root = tmp_path_factory.mktemp("data")
    make_shards(root, (800, 700, 1500, 600, 1200, 900), name="train", seed=0)
    make_shards(root, (300, 200), name="validation", seed=100)
    return root
