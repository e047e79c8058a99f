"""Callbacks and sinks that a configuration names: found by kind, checked with it, saved and loaded back."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from pydantic import PositiveInt

from megamem.config.extensions import CALLBACKS, SINKS, CallbackConfig, SinkConfig
from megamem.config.load import dump_yaml, load_config, parse_config
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.runs.result import RunResult, read_result, write_result
from megamem.runs.sinks.base import LogRecord, Sink
from megamem.runs.sinks.csv import CsvConfig
from megamem.training.callbacks.weight_norms import WeightNormsConfig
from megamem.training.loop import Callback
from tests.snippets import run_snippets

TREE = {
    "name": "case",
    "model": {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4},
    "data": {"sources": "none", "sequence_length": 8},
    "training": {"steps": 1, "batch_tokens": 8},
}


def run_with(callbacks: object = (), sinks: object = ()) -> RunConfig:
    training = {**TREE["training"], "callbacks": callbacks}
    return parse_config(RunConfig, {**TREE, "training": training, "logging": {"sinks": sinks}}, "run.yaml")


class Greeting(Callback):
    def __init__(self, times: int) -> None:
        self.times = times


class GreetingConfig(CallbackConfig):
    """A callback of another package."""

    kind: Literal["greeting"] = "greeting"
    times: PositiveInt = 1

    def build(self) -> Callback:
        return Greeting(self.times)


class Memo(Sink):
    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step, self.records = folder, step, []

    def write(self, record: LogRecord) -> None:
        self.records.append(record)


class MemoConfig(SinkConfig):
    """A sink of another package."""

    kind: Literal["memo"] = "memo"

    def build(self, folder: Path, step: int) -> Sink:
        return Memo(folder, step)


@pytest.fixture
def registered(monkeypatch):
    for registry in (CALLBACKS, SINKS):
        registry.kinds()
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    CALLBACKS.register(GreetingConfig)
    SINKS.register(MemoConfig)


class TestConfiguration:
    def test_kinds_are_found_and_validated(self, registered):
        config = run_with(
            [{"kind": "greeting", "times": 3}, "weight_norms"], [{"kind": "csv", "columns": ["loss"]}, "memo"]
        )
        assert config.training.callbacks == (GreetingConfig(times=3), WeightNormsConfig())
        assert config.logging.sinks == (CsvConfig(columns=("loss",)), MemoConfig())

    def test_the_one_that_the_page_shows_fills_records(self, monkeypatch):
        from megamem.training.build import build_callbacks

        monkeypatch.setattr(CALLBACKS, "_known", dict(CALLBACKS.kinds()))
        run_snippets("docs/watching.md")
        (clock,) = build_callbacks(run_with(["gpu_clock"]))
        monkeypatch.setattr(torch.cuda, "clock_rate", {torch.device("cuda", 1): 1410}.__getitem__)
        record: LogRecord = {"step": 1}
        clock.at_log(SimpleNamespace(topology=SimpleNamespace(device=torch.device("cuda", 1))), record)
        assert record == {"step": 1, "gpu_clock_mhz": 1410}

    def test_the_resolved_configuration_loads_back(self, registered, tmp_path):
        config = run_with([{"kind": "greeting", "times": 3}], [{"kind": "csv", "file": "a.csv"}])
        (tmp_path / "config.yaml").write_text(dump_yaml(config))
        assert load_config(RunConfig, tmp_path / "config.yaml") == config

    @pytest.mark.parametrize(
        ("callbacks", "sinks", "message"),
        [
            (
                ["weight_norm"],
                [],
                r"training\.callbacks\.0: kind: 'weight_norm' is no callback; did you mean 'weight_norms'",
            ),
            ([], ["cvs"], r"logging\.sinks\.0: kind: 'cvs' is no sink; did you mean 'csv'\?"),
            ([{"every": 2}], [], r"training\.callbacks\.0: a callback needs a `kind`"),
            ([{"kind": "weight_norms", "evry": 2}], [], r"callbacks\.0\.evry: unknown key; did you mean 'every'"),
            ([{"kind": "weight_norms", "every": 0}], [], r"callbacks\.0\.every: .*\(got 0\)"),
            ([], [{"kind": "csv", "file": "../x.csv"}], r"logging\.sinks\.0\.file: "),
            ([], [{"kind": "csv", "file": "config.yaml"}], r"logging\.sinks\.0\.file: "),
            ([], [{"kind": "csv", "columns": ["loss", "loss"]}], r"logging\.sinks\.0\.columns: loss is a column twice"),
        ],
    )
    def test_what_is_wrong_is_named(self, callbacks, sinks, message):
        with pytest.raises(ConfigError, match=message) as error:
            run_with(callbacks, sinks)
        assert "\n" not in str(error.value)

    def test_a_kind_that_builds_something_else_is_refused(self, registered, monkeypatch):
        from megamem.training.build import build_callbacks

        config = run_with(["greeting"])
        assert [type(callback) for callback in build_callbacks(config)] == [Greeting]
        monkeypatch.setattr(GreetingConfig, "build", lambda self: "hello")
        with pytest.raises(ConfigError, match=r"training\.callbacks: greeting builds a str; expected a .*Callback"):
            build_callbacks(config)


class TestCsv:
    def test_a_line_per_record_and_later_steps_are_dropped_when_a_run_resumes(self, tmp_path):
        config = CsvConfig(columns=("loss", "val_loss"))
        first = config.build(tmp_path, 0)
        first.write({"step": 1, "tokens": 8, "loss": 2.5})
        first.write({"step": 2, "tokens": 16, "loss": None})
        first.write({"step": 2, "tokens": 16, "val_loss": 2.0})
        first.write({"step": 3, "tokens": 24, "loss": 1.5})
        first.close()
        with (tmp_path / "metrics.csv").open("a") as file:
            file.write("4,1.")  # the process was killed while it wrote this line
        second = CsvConfig(columns=("lr", "loss")).build(tmp_path, 2)
        second.write({"step": 3, "loss": 1.25, "lr": 0.1})
        second.close()
        with (tmp_path / "metrics.csv").open(newline="") as file:
            lines = list(csv.reader(file))
        assert lines == [["step", "lr", "loss"], ["1", "", "2.5"], ["2", "", ""], ["2", "", ""], ["3", "0.1", "1.25"]]

    def test_a_new_run_begins_a_new_file(self, tmp_path):
        (tmp_path / "metrics.csv").write_text("step,loss\n1,2.0\n")
        CsvConfig(columns=("loss",)).build(tmp_path, 0).close()
        assert (tmp_path / "metrics.csv").read_text() == "step,loss\n"


class TestResult:
    RESULT = RunResult(
        "runs/a", 4, 400, 12.5, (0.5, 0.75), {"val_loss": 2.0, "picture": "a.png", "lzma_bits_per_byte": None}
    )

    def test_it_is_one_flat_mapping_and_comes_back(self, tmp_path):
        assert RunResult.from_dict(self.RESULT.to_dict()) == self.RESULT
        assert list(self.RESULT.to_dict())[:2] == ["run_dir", "steps"]
        write_result(tmp_path, self.RESULT)
        assert read_result(tmp_path) == self.RESULT

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"steps": "4"}, "steps: '4' is no integer"),
            ({"tokens": 1.5}, "tokens: 1.5 is no integer"),
            ({"run_dir": None}, "run_dir: None is no path"),
            ({"tokens_per_second": "fast"}, "tokens_per_second: 'fast' is no number"),
            ({"memory_gib_by_rank": 1.0}, "memory_gib_by_rank: 1.0 is no list of numbers"),
            ({"losses": {}}, "losses: {} is neither a number nor text"),
        ],
    )
    def test_what_is_wrong_is_named(self, change, message):
        with pytest.raises(ValueError, match=message):
            RunResult.from_dict({**self.RESULT.to_dict(), **change})

    def test_what_is_missing_or_damaged_is_no_result(self, tmp_path):
        assert read_result(tmp_path) is None
        for text in ('{"val_loss": 3', '{"val_loss": 3}', "[]"):
            (tmp_path / "result.json").write_text(text)
            assert read_result(tmp_path) is None
        with pytest.raises(ValueError, match="steps: missing"):
            RunResult.from_dict({"run_dir": "a"})
