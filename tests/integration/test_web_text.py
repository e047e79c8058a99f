"""docs/web_text.md as it is typed, on a small corpus: from parquet, local and in an object store, to jobs of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megamem.data.shard_store import ShardStore
from tests.integration.commands import environment
from tests.integration.s3_server import S3Server
from tests.snippets import snippets
from tests.unit.data_helpers import text_of

TOKENIZER, ONE_MACHINE, SCRIPT, MANY_MACHINES, RUN = (block.text for block in snippets("docs/web_text.md", "bash"))
PARTS = 8
SBATCH = f"""#!/bin/bash
# runs the tasks of an array one after the other, each as SLURM would
export SLURM_CPUS_PER_TASK=1
for SLURM_ARRAY_TASK_ID in $(seq {PARTS}); do
  export SLURM_ARRAY_TASK_ID
  bash "${{@: -1}}" || exit
done
"""


pytestmark = pytest.mark.slow


def documents(folder: Path) -> list[tuple[str, list[int]]]:
    """Names within the corpus, and tokens."""
    store = ShardStore(str(folder))
    return [(store.name(d), store.tokens(d, 0, int(store.lengths[d])).tolist()) for d in range(len(store))]


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder after all blocks, and what the last command of each said."""
    folder = tmp_path_factory.mktemp("web")
    for number in range(PARTS + 2):
        texts = [text_of(60 + 10 * line, 10 * number + line) for line in range(5)]
        path = folder / "data/web" / ("train" if number < PARTS + 1 else "validation") / f"000_{number:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": texts, "url": ["https://example.org"] * 5}), path)
    (folder / "shards.sh").write_text(SCRIPT)
    (folder / "bin").mkdir()
    (folder / "bin/sbatch").write_text(SBATCH)
    (folder / "bin/sbatch").chmod(0o755)
    path = os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    said = {}
    with S3Server(tmp_path_factory.mktemp("store") / "s3") as server:
        server.store().put(str(folder / "data/web/train") + "/", "bucket/web/train/", recursive=True)

        def type_in(name: str, block: str) -> None:
            ran = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block], cwd=folder, capture_output=True, text=True, timeout=1200,
                env=environment() | server.environment | {"PATH": path}, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
            said[name] = ran.stdout

        type_in("tokenizer", TOKENIZER)
        type_in("one machine", ONE_MACHINE)
        (folder / "data/shards/train").rename(folder / "one")
        type_in("many machines", MANY_MACHINES)
        type_in("run", RUN)
    return folder, said


def test_parts_from_the_store_are_what_one_machine_writes(typed: tuple[Path, dict[str, str]]) -> None:
    folder, _ = typed
    one, many = documents(folder / "one"), documents(folder / "data/shards/train")
    assert len(one) == 5 * (PARTS + 1)
    assert many == one
    assert len(list((folder / "data/shards/train").glob(f"part-*-of-{PARTS:04d}"))) == PARTS


def test_the_commands_say_that_shards_are_whole(typed: tuple[Path, dict[str, str]]) -> None:
    _, said = typed
    assert "shards are whole" in said["one machine"]
    assert f"{PARTS} shards are whole" in said["many machines"]


def test_jobs_of_8_32_and_64_devices_are_written(typed: tuple[Path, dict[str, str]]) -> None:
    _, said = typed
    assert [f"#SBATCH --nodes={nodes}\n" in said["run"] for nodes in (1, 4, 8)] == [True] * 3
    assert "tokens: 30000000000" in said["run"]
