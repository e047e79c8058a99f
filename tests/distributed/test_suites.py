"""Suites of tasks on several ranks, each of which opens the data itself."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megamem.errors import DataError
from megamem.evaluation.suites.base import Setting
from megamem.evaluation.suites.recall import RECALL
from megamem.evaluation.suites.run import open_suite_everywhere
from megamem.parallel.topology import Topology
from tests.distributed.harness import run_distributed

pytestmark = pytest.mark.distributed


def opened(payload):
    """Per folder of this rank, the tasks that are open, or why none is."""
    topology = Topology.start(device="cpu")
    found = []
    for folders in payload:
        setting = Setting(
            lambda text: list(text.encode()),
            lambda tokens: bytes(tokens).decode(),
            Path(folders[topology.rank]),
            lengths=(512,),
            only=("drop", "nq"),
        )
        try:
            found.append([line.name for line, _ in open_suite_everywhere(RECALL, setting, dist.group.WORLD).tasks])
        except DataError as error:
            found.append(str(error))
    return found


def folder_of(path, **answers):
    """A folder with one question of each named set."""
    (path / "recall").mkdir(parents=True)
    for name, answer in answers.items():
        document = {"context": "the gate of the town is red", "question": "gate of the", "answers": [answer]}
        (path / "recall" / f"{name}.jsonl").write_text(json.dumps(document) + "\n")
    return str(path)


def test_ranks_that_would_ask_other_things_are_refused(tmp_path):
    """A set that one host lacks, another text, and no data on one host: each is an error on both ranks."""
    both = folder_of(tmp_path / "both", drop="red", nq="town")
    other = folder_of(tmp_path / "other", drop="town", nq="town")
    one, none = folder_of(tmp_path / "one", drop="red"), folder_of(tmp_path / "none")
    pairs = [(both, both), (both, one), (both, other), (both, none)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    first, second = run_distributed(2, "tests.distributed.test_suites:opened", pairs, env=offline)
    assert first == second
    assert first[0] == ["drop_512", "nq_512"]
    assert "suite recall: rank 1 on " in first[1]
    assert "does not have the documents of nq_512 that rank 0" in first[1]
    assert "does not have the documents of drop_512" in first[2]
    assert first[3].startswith("rank 1 on ")
    assert "suite recall: no task can be asked" in first[3]
