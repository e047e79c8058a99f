"""Callbacks by themselves, on a made-up clock: what log lines say, which steps count as bad, what is recorded when."""

from __future__ import annotations

import json
import math
import time
from contextlib import contextmanager
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.errors import NonFiniteError
from megamem.pipeline.record import read_record
from megamem.pipeline.schedule import Action
from megamem.pipeline.simulate import Event
from megamem.runs.sinks.base import Sink
from megamem.training.callbacks import metrics
from megamem.training.callbacks.bad_steps import BadSteps
from megamem.training.callbacks.metrics import Metrics, Throughput
from megamem.training.callbacks.profiler import Profiler
from megamem.training.callbacks.schedule_recorder import ScheduleRecorder
from megamem.training.callbacks.validation import Validation
from megamem.training.callbacks.weight_norms import component_of
from megamem.training.loop import Callback
from megamem.training.phases import phases_of

TREE = {
    "name": "case",
    "model": {"layers": 2, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4},
    "data": {"sources": "none", "sequence_length": 8},
    "training": {"steps": 10, "batch_tokens": 32},
}


class Kept(Sink):
    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(dict(record))


class FakeTrainer:
    """What callbacks read of a trainer; `run` makes steps of given results, each of so many seconds."""

    def __init__(self, callbacks, world_size=1, **changes):
        self.config = parse_config(RunConfig, {**TREE, **changes}, "test")
        self.topology = SimpleNamespace(
            dp_group=None, world_size=world_size, rank=0, device=torch.device("cpu"), dp_rank=0, tp_rank=0, pp_rank=0,
            pp_size=1,
        )  # fmt: skip
        self.callbacks, self.step, self.lr, self.data_wait, self.paused = callbacks, 0, 0.0, 0.0, 0.0
        self.tokens = 0
        self.watched = []
        self.phases = phases_of(self.config)
        self.phase = self.phases[0]

    @contextmanager
    def pause(self, action):
        self.watched.append(action)
        yield

    def run(self, results, after=lambda step: None):
        for result in results:
            self.step += 1
            self.tokens += result.tokens
            after(self.step)
            for callback in self.callbacks:
                callback.after_step(self, result)


def result(nats=8.0, predicted=4.0, bad=0, grad_norm=None, spike=0, tokens=32):
    """Of one step of 32 positions, as the engine gives it."""
    norm = None if grad_norm is None else torch.tensor(grad_norm)
    device = {"loss_sum": nats, "predicted": predicted, "bad": bad, "spike": spike}
    values = {name: torch.tensor(value) for name, value in device.items()}
    return SimpleNamespace(**values, tokens=tokens, grad_norm=norm)


# log lines


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set; sums over ranks are of this one alone."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(metrics.dist, "all_reduce", lambda tensor, group=None: None)
    monkeypatch.setattr(metrics, "peak_memory", lambda device: 3 * 2**29)
    return now


def logged(trainer, callback):
    """Steps of the lines that a sink was given."""
    (sink,) = callback.sinks
    return [record["step"] for record in sink.records]


@pytest.mark.parametrize(
    ("every", "steps"), [(1, range(1, 11)), (3, (1, 3, 6, 9, 10)), (5, (1, 5, 10)), (100, (1, 10))]
)
def test_lines_of_the_first_the_last_and_every_so_many_steps(clock, every, steps):
    callback = Metrics(every, [Kept()], [1.0], None)
    trainer = FakeTrainer([callback])
    callback.start(trainer)
    trainer.run([result()] * 10)
    assert logged(trainer, callback) == list(steps)


def test_the_figures_of_a_line_by_hand(clock):
    """Four steps of 32 positions, 16 of them padding, in 10 seconds with 2 of validation and 1 of waiting for data."""
    callback = Metrics(4, [Kept()], flops_per_token=[50.0], peak=1000.0)
    trainer = FakeTrainer([callback], world_size=2)
    trainer.step, trainer.lr, trainer.data_wait, trainer.paused = 4, 0.25, 7.0, 30.0
    trainer.tokens = 100
    callback.start(trainer)

    def pass_time(step):
        clock.seconds += 2.5
        trainer.data_wait += 0.25
        trainer.paused += 0.5

    results = [result(8.0), result(2.0, tokens=16), result(1.0), result(5.0, grad_norm=1.5)]
    trainer.run(results, pass_time)
    (record,) = callback.sinks[0].records
    assert record == {
        "step": 8,
        "tokens": 100 + 112,
        "loss": 1.0,
        "grad_norm": 1.5,
        "lr": 0.25,
        "tokens_per_second": 14.0,
        "tokens_per_second_per_device": 7.0,
        "mfu": 7 * 50 / 1000,
        "padding": 16 / 128,
        "data_wait": 1 / 8,
        "memory_gib": 1.5,
        "eta_s": 2 * 8 / 4,
        "elapsed_s": 10.0,
    }


def test_each_line_is_of_the_steps_since_the_one_before(clock):
    callback = Metrics(2, [Kept()], [1.0], None)
    trainer = FakeTrainer([callback])
    callback.start(trainer)
    trainer.run([result(4.0 * step) for step in range(1, 11)], lambda step: setattr(clock, "seconds", 100.0 + step**2))
    records = callback.sinks[0].records
    # of step 1 alone, then of pairs; four predictions in each step
    assert [record["loss"] for record in records] == [1.0, 2.0, 3.5, 5.5, 7.5, 9.5]
    # n^2 seconds after n steps: 1, 3, then 4 + 8 i more
    assert [record["tokens_per_second"] for record in records] == [32.0, *(32 / 3, 64 / 12, 64 / 20, 64 / 28, 64 / 36)]
    assert [record["elapsed_s"] for record in records] == [1, 4, 16, 36, 64, 100]
    assert [record["mfu"] for record in records] == [None] * 6, "without a known peak there is none"
    assert records[-1]["eta_s"] == 0


def test_skipped_steps_count_as_nothing_in_the_mean(clock):
    callback = Metrics(10, [Kept()], [1.0], None)
    trainer = FakeTrainer([callback])
    trainer.step = 1
    callback.start(trainer)
    trainer.run(
        [result(8.0), result(math.nan, 4.0, bad=1), result(4.0, 2.0), result(math.inf, bad=1), *[result(0, 0)] * 5]
    )
    assert callback.sinks[0].records[-1]["loss"] == 12 / 6
    trainer.step = 9
    callback.start(trainer)
    trainer.run([result(math.nan, bad=1)])
    assert math.isnan(callback.sinks[0].records[-1]["loss"]), "of a step alone that was skipped"


def test_sums_are_over_ranks(clock, monkeypatch):
    """The other rank has three times the loss; the number of predictions is that of the batch already."""
    monkeypatch.setattr(metrics.dist, "all_reduce", lambda tensor, group=None: tensor.mul_(4 if group else 1))
    callback = Metrics(1, [Kept()], [1.0], None)
    trainer = FakeTrainer([callback])
    trainer.topology.dp_group = "dp"
    callback.start(trainer)
    trainer.run([result(2.0, 8.0)])
    assert callback.sinks[0].records[0]["loss"] == 1.0


class Ends(Callback):
    """Adds a figure, then ends the run."""

    def at_log(self, trainer, record):
        record["mine"] = 7.0
        raise NonFiniteError("enough")


def test_the_line_of_a_step_that_ends_the_run_is_written(clock):
    callback = Metrics(1, [Kept()], [1.0], None)
    trainer = FakeTrainer([callback, Ends()])
    callback.start(trainer)
    with pytest.raises(NonFiniteError):
        trainer.run([result()])
    assert callback.sinks[0].records[0]["mine"] == 7.0


def test_the_speed_of_a_run_is_the_median_without_the_first_line():
    speeds = [5.0, 100.0, 300.0, 200.0, 0.0]
    found = Throughput()
    medians = [found.tokens_per_second()]
    for speed in speeds:
        found.at_log(None, {"tokens_per_second": speed or None})
        medians.append(found.tokens_per_second())
    assert medians == [0.0, 5.0, 100.0, 200.0, 200.0, 150.0]


# bad steps


def flags(bits):
    return [result(bad=bit) for bit in bits]


def test_too_many_in_a_row_end_the_run_by_steps_and_samples():
    callback = BadSteps(limit=3)
    trainer = FakeTrainer([callback])
    trainer.run(flags([0, 1, 1, 0, 1, 1, 1, 0]))
    record = {}
    with pytest.raises(NonFiniteError) as ended:
        callback.at_log(trainer, record)
    # four sequences in a batch
    assert str(ended.value) == (
        "loss or gradients were not finite in steps 5-7, samples 16-27: 3 steps in a row (training.max_bad_steps 3) "
        "updated nothing; the weights from before them are saved"
    )
    assert record == {"skipped": 5}


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 0, 1]), max_size=40), st.integers(1, 4), st.integers(1, 7))
def test_streaks_are_those_of_all_steps_wherever_lines_are(bits, limit, every):
    """Against the runs of equal flags; a streak may begin before the last line."""
    callback = BadSteps(limit)
    trainer = FakeTrainer([callback])
    longest = max((len(list(run)) for bad, run in groupby(bits) if bad), default=0)
    given_up = False
    for first in range(0, len(bits), every):
        trainer.run(flags(bits[first : first + every]))
        record = {}
        try:
            callback.at_log(trainer, record)
        except NonFiniteError:
            given_up = True
        assert record["skipped"] == sum(bits[: first + every])
    assert given_up == (longest >= limit)


def test_spikes_are_counted_apart_and_end_nothing():
    spikes = BadSteps(limit=2)
    trainer = FakeTrainer([spikes], training={**TREE["training"], "skip_spikes": 6.0})
    trainer.run([result(spike=1), result(spike=1), result(spike=1), result(bad=1), result()])
    record = {}
    spikes.at_log(trainer, record)
    assert record == {"skipped": 1, "skipped_spikes": 3}
    resumed = BadSteps(limit=2)
    resumed.set_counts(json.loads(json.dumps(spikes.counts())))
    assert resumed.counts() == {"total": 1, "streak": [], "spikes": 3}


@pytest.mark.parametrize(("before", "streak"), [([1, 0, 1, 1], [3, 4]), ([1, 1, 0], []), ([], [])])
def test_a_resumed_run_counts_on(before, streak):
    saved = BadSteps(limit=3)
    FakeTrainer([saved]).run(flags(before))
    counts = json.loads(json.dumps(saved.counts()))
    assert counts == {"total": sum(before), "streak": streak, "spikes": 0}
    resumed = BadSteps(limit=3)
    resumed.set_counts(counts)
    trainer = FakeTrainer([resumed])
    trainer.step = len(before)
    trainer.run(flags([1]))
    record = {}
    if len(streak) == 2:
        with pytest.raises(NonFiniteError, match="in steps 3-5"):
            resumed.at_log(trainer, record)
    else:
        resumed.at_log(trainer, record)
    assert record["skipped"] == sum(before) + 1


# validation


@pytest.mark.parametrize(("every", "steps"), [(0, []), (3, [3, 6, 9]), (10, [10])])
def test_validations_are_records_of_their_own(every, steps):
    sink, losses = Kept(), iter(range(5, 20))
    callback = Validation(every, lambda: {"val_loss": float(next(losses)), "val_bits_per_byte": None}, [sink])
    trainer = FakeTrainer([callback])
    trainer.run([result()] * 10)
    assert sink.records == [
        {"step": step, "tokens": 32 * step, "val_loss": 5.0 + number, "val_bits_per_byte": None}
        for number, step in enumerate(steps)
    ]
    assert callback.last == ((steps[-1], 4.0 + len(steps)) if steps else None)
    assert trainer.watched == [f"validation after step {step}" for step in steps]


# recorded steps and traces


@pytest.fixture
def recorder():
    """(callback of step 3, executor)."""
    executor = SimpleNamespace(events=None)
    return ScheduleRecorder(3, SimpleNamespace(executor=executor)), executor


@pytest.mark.parametrize("resumed_at", [0, 2])
def test_one_step_is_recorded(tmp_path, recorder, resumed_at):
    callback, executor = recorder
    trainer = FakeTrainer([callback], runs_folder=str(tmp_path))
    trainer.config.run_folder.mkdir()
    trainer.step = resumed_at
    callback.start(trainer)
    recording = []

    def work(step):
        recording.append((step, executor.events is not None))
        if executor.events is not None:
            executor.events.append(Event(0, Action("forward", 0, 0), 1.0, 2.0))

    trainer.run([result()] * (6 - resumed_at), work)
    assert [step for step, on in recording if on] == [3]
    assert len(read_record(trainer.config.run_folder).events) == 1


@pytest.mark.parametrize("other", ["dp_rank", "tp_rank"])
def test_one_rank_of_a_stage_records(tmp_path, recorder, other):
    callback, executor = recorder
    trainer = FakeTrainer([callback], runs_folder=str(tmp_path))
    setattr(trainer.topology, other, 1)
    callback.start(trainer)
    trainer.run([result()] * 5)
    assert executor.events is None
    assert list(tmp_path.iterdir()) == []


class FakeProfile:
    """torch's profiler, which takes seconds to start: notes the steps between its beginning and its end."""

    current: list[int] | None = None

    def __init__(self, **options):
        self.steps = []

    def __enter__(self):
        FakeProfile.current = self.steps

    def __exit__(self, *_):
        FakeProfile.current = None

    def export_chrome_trace(self, path):
        with open(path, "w") as file:
            json.dump(self.steps, file)


@pytest.mark.parametrize(
    ("first", "last", "resumed_at", "steps", "traced"),
    [
        (2, 3, 0, 5, [2, 3]),
        (1, 1, 0, 2, [1]),
        (2, 5, 0, 3, [2, 3]),  # stopped before the last of them
        (4, 5, 3, 9, [4, 5]),
        (4, 5, 4, 9, None),  # resumed between them: half a trace would mislead
    ],
)
def test_a_trace_holds_the_steps_that_were_asked_for(tmp_path, monkeypatch, first, last, resumed_at, steps, traced):
    monkeypatch.setattr(torch.profiler, "profile", FakeProfile)
    callback = Profiler(first, last, tmp_path)
    trainer = FakeTrainer([callback])
    trainer.topology.rank, trainer.step = 3, resumed_at
    callback.start(trainer)
    trainer.run(
        [result()] * (steps - resumed_at),
        lambda step: FakeProfile.current.append(step) if FakeProfile.current is not None else None,
    )
    callback.finish(trainer)
    path = tmp_path / "trace-rank3.json"
    assert (json.loads(path.read_text()) if path.exists() else None) == traced


def test_components_of_parameters():
    names = ["layers.3.mixer.gate.logit", "layers.11.norm.weight", "embedding.weight", "head.weight", "norm.weight"]
    assert [component_of(name) for name in names] == ["layers.3", "layers.11", "embedding", "head", "norm"]
