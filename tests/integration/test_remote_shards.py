"""Training on shards behind a web server that is busy for a while, for ever, or breaks off in the middle of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megamem.errors import StoreError
from tests.integration.commands import finish, megamem, run_tree, write_config
from tests.unit.web_server import Server, serving

pytestmark = pytest.mark.distributed


@pytest.fixture
def served(data: Path) -> Iterator[str]:
    """The URL of the corpus."""
    with serving(data) as url:
        yield url


def trained(data: Path, folder: Path, name: str, **section: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, result and errors of a run on two ranks; section: what its data differ in."""
    sections = {"name": name, "parallel": {"tp": 2}, "data": section, "training": {"steps": 2}}
    config = write_config(folder / f"{name}.yaml", run_tree(data, folder / "runs", **sections))
    code, out, err = finish(megamem("train", str(config)))
    return code, json.loads(out.splitlines()[-1]) if code == 0 else {}, err


def test_a_run_outlasts_a_busy_server(data: Path, served: str, tmp_path: Path) -> None:
    """Before its first step and between files: what it trains on is what it would have read from a disk."""
    remote = {"sources": [f"{served}/train"], "cache_folder": str(tmp_path / "cache"), "retry_minutes": 1}
    Server.busy, Server.broken = 5, 2
    code, result, err = trained(data, tmp_path, "remote", **remote)
    assert code == 0, err
    assert Server.busy == 0  # all five were refused
    assert Server.broken < 0
    assert "does not answer" in err
    local = trained(data, tmp_path, "local")[1]
    assert result["val_bits_per_byte"] == local["val_bits_per_byte"]


def test_a_server_that_stays_busy_ends_the_run_with_a_code_that_is_tried_again(
    data: Path, served: str, tmp_path: Path
) -> None:
    remote = {"sources": [f"{served}/train"], "cache_folder": str(tmp_path / "cache"), "retry_minutes": 0.02}
    Server.busy = 10**6
    code, _, err = trained(data, tmp_path, "remote", **remote)
    assert code == StoreError.exit_code
    assert "does not answer for 1 s" in err
    assert not list((tmp_path / "runs").glob("*"))
    Server.busy = 0
    assert trained(data, tmp_path, "remote", **remote)[0] == 0
