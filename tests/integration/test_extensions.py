"""A package beside megamem brings a callback, a sink and a task; `megamem train` finds all three by entry points."""

from __future__ import annotations

import csv
import json

import pytest

from tests.integration.commands import VOCABULARY, environment, finish, megamem, run_tree, write_config

pytestmark = pytest.mark.distributed

MODULE = f"""
from pathlib import Path
from typing import Literal

import numpy as np

from megamem.config.extensions import CALLBACKS, SINKS, CallbackConfig, SinkConfig
from megamem.data.tasks.base import TASKS, TaskConfig
from megamem.runs.sinks.base import Sink
from megamem.training.loop import Callback


class CountSteps(Callback):
    def __init__(self, name):
        self.name, self.steps = name, 0

    def after_step(self, trainer, result):
        self.steps += 1

    def at_log(self, trainer, record):
        record[self.name] = self.steps


@CALLBACKS.register
class CountStepsConfig(CallbackConfig):
    kind: Literal["count_steps"] = "count_steps"
    name: str = "counted"

    def build(self):
        return CountSteps(self.name)


class Notes(Sink):
    def __init__(self, path):
        self.path, self.lines = path, []

    def write(self, record):
        self.lines.append(f"{{record['step']}}")

    def finish(self, result):
        self.lines.append(f"ended after {{result.steps}}")

    def close(self):
        self.path.write_text(" ".join(self.lines))


@SINKS.register
class NotesConfig(SinkConfig):
    kind: Literal["notes"] = "notes"

    def build(self, folder: Path, step: int):
        return Notes(folder / "notes.txt")


class Copy:
    fingerprint, vocab_size, tokenizer_hash = "copy-1", {VOCABULARY}, None

    def __init__(self, length):
        self.length = length

    def make(self, generator):
        text = np.tile(generator.integers(1, self.vocab_size, self.length // 2), 2)
        return text, np.where(np.arange(self.length) < self.length // 2, -100, np.roll(text, -1))


@TASKS.register
class CopyConfig(TaskConfig):
    kind: Literal["copy"] = "copy"

    def open(self):
        return Copy(self.length)
"""
ENTRY_POINTS = """[megamem.callbacks]
count_steps = my_package

[megamem.sinks]
notes = my_package

[megamem.tasks]
copy = my_package
"""


@pytest.fixture
def package(tmp_path):
    """A folder with an installed package, as pip leaves it."""
    folder = tmp_path / "site"
    information = folder / "my_package-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "my_package.py").write_text(MODULE)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def test_a_package_brings_a_callback_a_sink_and_a_task(data, package, tmp_path):
    (tmp_path / "copy.yaml").write_text("kind: copy\nlength: 128\nexamples: 64\n")
    (tmp_path / "other.yaml").write_text("kind: copy\nlength: 128\nexamples: 2\nseed: 1\n")
    tree = run_tree(
        data,
        tmp_path / "runs",
        data={
            "sources": [str(tmp_path / "copy.yaml")],
            "validation": [str(tmp_path / "other.yaml")],
            "tokenizer": None,
        },
        training={"callbacks": [{"kind": "count_steps", "name": "seen"}, "weight_norms"]},
        logging={"sinks": ["notes", {"kind": "csv", "columns": ["seen", "weight_norm/layers.0", "val_loss"]}]},
    )
    config = write_config(tmp_path / "run.yaml", tree)
    code, out, err = finish(
        megamem("train", str(config), "parallel.tp=2", env={**environment(), "PYTHONPATH": str(package)})
    )
    assert (code, err) == (0, ""), out
    folder = tmp_path / "runs" / "run"
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["seen"] for record in logged if "loss" in record] == [1, 2, 4, 6]
    assert (folder / "notes.txt").read_text() == "1 2 3 4 6 6 ended after 6"
    with (folder / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["step"] for line in lines] == ["1", "2", "3", "4", "6", "6"]
    norms = [float(line["weight_norm/layers.0"]) for line in lines if line["seen"]]
    assert len(norms) == 4
    assert all(norm > 0 for norm in norms)
    assert json.loads(out.splitlines()[-1])["val_accuracy"] is not None
    assert "kind: count_steps" in (folder / "config.yaml").read_text(), "the resolved configuration names it"
