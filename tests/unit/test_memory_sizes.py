"""Sizes of memories in log lines, and the warning of one that grows."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from megamem.memory.base import TensorSpec
from megamem.training.callbacks import memory_sizes
from megamem.training.callbacks.memory_sizes import MemorySizes


def fake_trainer():
    """What the callback reads of a trainer."""
    topology = SimpleNamespace(rank=0, device=torch.device("cpu"))
    engine = SimpleNamespace(observe_states=None)
    return SimpleNamespace(topology=topology, engine=engine, step=0, phase=SimpleNamespace(end=10))


def grown(*sizes):
    """Warnings of log lines at which a memory of one layer has these sizes."""
    spec = {"layers.1": {"matrix": TensorSpec((2, 2), dtype="float32"), "tail": TensorSpec((3,))}, "layers.2": {}}
    callback = MemorySizes(spec, every=1)
    trainer = fake_trainer()
    callback.start(trainer)
    records = []
    for size in sizes:
        trainer.step += 1
        matrix = torch.tensor([[2.0, 0.0], [0.0, 0.0]]) * size  # root mean square: size
        trainer.engine.observe_states({"layers.1": {"matrix": matrix, "tail": torch.full((3,), 1e9)}, "layers.2": {}})
        records.append({})
        callback.at_log(trainer, records[-1])
    return records


def test_a_memory_that_grows_is_logged_and_warned_of_once_for_each_thousandfold(monkeypatch, caplog):
    monkeypatch.setattr(memory_sizes.dist, "all_reduce", lambda tensor, op: None)
    sizes = [0.5, 2.0**19, 2.0**21, 2.0**22, 2.0**31, math.nan]
    records = grown(*sizes)
    assert [record["memory_rms/layers.1"] for record in records] == [*sizes[:-1], math.inf]
    assert all(record.keys() == {"memory_rms/layers.1"} for record in records)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 5", "step 6"]
    assert "the memory of model.layers.1 has a root mean square of 2.1e+06" in lines[0]
    assert "\n" not in lines[0]


def test_models_without_such_memories_have_no_figures(monkeypatch):
    monkeypatch.delattr(memory_sizes.dist, "all_reduce")  # not even a collective
    callback, record = MemorySizes({"layers.0": {"tail": TensorSpec((3,))}}, every=1), {}
    trainer = fake_trainer()
    callback.start(trainer)
    assert trainer.engine.observe_states is None
    callback.at_log(trainer, record)
    assert record == {}
