"""Ranks of a job agree on what the planner chose: real processes, by `megamem train` itself and by an agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

BOOKS = Path(__file__).resolve().parents[2] / "configs" / "recipes" / "books.yaml"
TINY = (
    "model.layers=1", "model.hidden_size=32", "model.heads=2", "model.memory=[]", "model.vocab_size=64",
    "data.sequence_length=512", "training.batch_tokens=4096", "data.sources=[none]", "data.tokenizer=null",
    "data.validation=[]", "parallel=auto", "training.micro_batch_size=auto", "training.recompute=auto",
)  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("train",), ("--processes", "2")),
        pytest.param(("agent", "--processes", "2", "--", "train"), (), marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_a_step_in_the_layout_that_one_process_chose(
    before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "megamem", *before, str(BOOKS), "--dry-run", *TINY, *after]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mock step on 2 process(es)" in done.stdout
    # a run of 20,576 parameters fits whole: data-parallel ranks, all four sequences of each at once
    printed = yaml.safe_load(done.stdout.partition("\nparameters: ")[0])
    assert (printed["parallel"]["tp"], printed["parallel"]["pp"], printed["training"]["micro_batch_size"]) == (1, 1, 4)
    assert printed["auto"]["devices"] == 2
