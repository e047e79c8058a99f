"""Where metrics go: what of a file stays when a run resumes, what is shown of a record, that all sinks are closed."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.evaluation.metrics import last_step, read_curves
from megamem.runs.sinks.base import Sink
from megamem.runs.sinks.build import build_sinks, closing
from megamem.runs.sinks.console import ConsoleLines
from megamem.runs.sinks.csv import CsvFile
from megamem.runs.sinks.json_lines import JsonLines
from megamem.runs.sinks.tensorboard import TensorBoard
from tests.unit.small_disk import SmallDisk

RECORDS = [{"step": step, "tokens": 8 * step, "loss": 1 / step} for step in range(1, 7)]


def write(sink, records):
    for record in records:
        sink.write(record)
    sink.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# metrics.jsonl


def test_records_come_back_as_they_were(tmp_path):
    write(JsonLines(tmp_path / "metrics.jsonl"), RECORDS)
    assert lines(tmp_path / "metrics.jsonl") == RECORDS


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(RECORDS[0])
    assert lines(tmp_path / "metrics.jsonl") == RECORDS[:1]
    sink.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_numbers_that_json_has_no_word_for_are_null(tmp_path, value):
    write(JsonLines(tmp_path / "metrics.jsonl"), [{"step": 1, "loss": value}])
    (found,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(found, parse_constant=pytest.fail) == {"step": 1, "loss": None}


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("step", range(7))
def test_a_resumed_run_drops_what_it_makes_again(tmp_path, kind, step):
    """And a line that was being written when the process was killed."""
    path = tmp_path / f"metrics.{kind}"
    make = (lambda at: JsonLines(path, at)) if kind == "jsonl" else (lambda at: CsvFile(path, ("tokens", "loss"), at))
    write(make(0), RECORDS)
    with path.open("a") as file:
        file.write('{"step": 6, "tok' if kind == "jsonl" else "6,4")
    again = [{**record, "loss": 9.0} for record in RECORDS[step:]]
    write(make(step), again)
    found = path.read_text().splitlines()
    expected = RECORDS[:step] + again
    if kind == "jsonl":
        assert [json.loads(line) for line in found] == expected
    else:
        assert found == ["step,tokens,loss", *(f"{r['step']},{r['tokens']},{r['loss']}" for r in expected)]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "nothing temporary is left"


@pytest.mark.parametrize("damage", [b"\0" * 40, b"\xff\xfe", b"", b"[1]", b'{"tokens": 1}', b"[" * 20000])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_damaged_line_prevents_no_resume(tmp_path, kind, damage, caplog):
    """It is left out, of the curves too, and of metrics.jsonl a warning says so."""
    path = tmp_path / f"metrics.{kind}"
    make = (lambda at: JsonLines(path, at)) if kind == "jsonl" else (lambda at: CsvFile(path, ("tokens", "loss"), at))
    write(make(0), RECORDS)
    whole = path.read_bytes()
    cut = whole.index(b"\n", len(whole) // 2) + 1
    path.write_bytes(whole[:cut] + damage + b"\n" + whole[cut:])
    if kind == "jsonl":
        assert len(read_curves(path).training) == len(RECORDS)
        assert last_step(path, "loss") == 6
    write(make(6), [])
    assert path.read_bytes() == whole
    assert (f"{path}: 1 lines are damaged and left out" in caplog.text) == (kind == "jsonl")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_full_disk_ends_no_run_and_loses_no_line(small_disk: SmallDisk, kind, caplog):
    path = small_disk.folder / f"metrics.{kind}"
    make = (lambda at: JsonLines(path, at)) if kind == "jsonl" else (lambda at: CsvFile(path, ("tokens", "loss"), at))
    sink = make(0)
    sink.write(RECORDS[0])
    small_disk.fill()
    # more than what is left of the file's last page
    many = [{"step": step, "tokens": 8 * step, "loss": 0.5} for step in range(2, 2000)]
    for record in many:
        sink.write(record)
    assert caplog.text.count("cannot be written (No space left on device); training goes on") == 1
    small_disk.empty()
    last = {"step": 2000, "tokens": 16000, "loss": 0.25}
    sink.write(last)
    sink.close()
    found = path.read_text().splitlines()
    if kind == "jsonl":
        assert [json.loads(line) for line in found] == [RECORDS[0], *many, last]
    else:
        assert found[1:] == [f"{r['step']},{r['tokens']},{r['loss']}" for r in (RECORDS[0], *many, last)]


def test_a_resume_on_a_full_disk_goes_on(small_disk: SmallDisk, caplog):
    """Lines that cannot be dropped stay, and of each step the last line counts."""
    path = small_disk.folder / "metrics.jsonl"
    write(JsonLines(path), RECORDS)
    with path.open("a") as file:
        file.write('{"step": 7, "tok')
    small_disk.fill()
    sink = JsonLines(path, 3)
    assert f"{path}: keeps lines of steps that are made again (No space left on device)" in caplog.text
    small_disk.empty()
    again = [{**record, "loss": 9.0} for record in RECORDS[3:]]
    write(sink, again)
    assert read_curves(path).training == tuple((float(r["tokens"]), r["loss"]) for r in (*RECORDS[:3], *again))


def test_a_disk_that_stays_full_is_told_of(small_disk: SmallDisk, caplog):
    path = small_disk.folder / "metrics.jsonl"
    sink = JsonLines(path)
    small_disk.fill()
    write(sink, RECORDS)
    assert f"{path}: lacks its last 6 lines" in caplog.text


def test_columns_may_change_between_two_parts_of_a_run(tmp_path):
    path = tmp_path / "metrics.csv"
    write(CsvFile(path, ("loss", "lr")), [{"step": 1, "loss": 2.5, "lr": 0.1, "mfu": 0.5}, {"step": 2, "loss": None}])
    write(CsvFile(path, ("mfu", "loss"), 2), [{"step": 3, "mfu": 0.25}])
    assert path.read_text().splitlines() == ["step,mfu,loss", "1,,2.5", "2,,", "3,0.25,"]


# the console


def shown(record, steps=1200):
    text = io.StringIO()
    ConsoleLines(Console(file=text, width=40), steps).write(record)
    return text.getvalue()


def test_a_record_is_one_line_in_words():
    """Longer than the terminal is wide, but not broken."""
    record = {
        "step": 20, "tokens": 81_920, "loss": 3.14159, "grad_norm": 0.5, "lr": 3e-4, "tokens_per_second": 9000.0,
        "tokens_per_second_per_device": 4500.4, "mfu": 0.4321, "data_wait": 0.0125, "memory_gib": 1.2345,
        "eta_s": 3 * 3600 + 62.4, "elapsed_s": 5.0, "skipped": 0, "weight_norm/head": 3.0,
    }  # fmt: skip
    assert shown(record) == (
        "step   20/1200  loss 3.1416  grad norm 0.500  lr 3.00e-04  4,500 tokens/s/device  MFU 43.2%  data wait 1.2%  "
        "1.23 GiB  ETA 3:01:02\n"
    )


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"step": 1200, "loss": None, "mfu": None}, "step 1200/1200\n"),
        ({"step": 3, "skipped": 2}, "step    3/1200  skipped 2\n"),
        ({"step": 3, "eta_s": 59.6}, "step    3/1200  ETA 0:01:00\n"),
        ({"step": 3, "eta_s": 100 * 3600.0}, "step    3/1200  ETA 100:00:00\n"),
        (
            {
                "step": 3,
                "val_loss": 2.0,
                "val_accuracy": 0.25,
                "val_bits_per_byte": 1.5,
                "val_beyond_first_chunk_loss": 1.75,
            },
            "step    3/1200  validation loss 2.0000  accuracy 25.00%  1.5000 bits/byte  beyond first chunk 1.7500\n",
        ),
        ({"step": 3, "loss": math.nan}, "step    3/1200  loss nan\n"),
    ],
)
def test_what_is_not_known_is_left_out(record, line):
    assert shown(record) == line


# TensorBoard


def points(folder, figure):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(figure)]


def test_tensorboard_reads_what_was_written_and_drops_what_was_made_again(tmp_path):
    write(
        TensorBoard(tmp_path, 0),
        [{"step": 1, "loss": 4.0, "lr": None}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": 9.0}],
    )
    assert points(tmp_path, "loss") == [(1, 4.0), (2, 3.0), (3, 9.0)]
    write(TensorBoard(tmp_path, 2), [{"step": 3, "loss": 2.5}, {"step": 4, "loss": 2.0}])
    assert points(tmp_path, "loss") == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 2.0)]


# all of them


class Noted(Sink):
    def __init__(self):
        self.closed = 0

    def write(self, record):
        """Nothing."""

    def close(self):
        self.closed += 1


def test_sinks_are_closed_once_however_the_run_ends():
    sinks = [Noted(), Noted()]
    with closing(sinks):
        assert [sink.closed for sink in sinks] == [0, 0]
    with pytest.raises(KeyboardInterrupt), closing(sinks):
        raise KeyboardInterrupt
    assert [sink.closed for sink in sinks] == [2, 2]


def test_a_run_s_sinks_are_those_of_its_configuration(tmp_path):
    tree = {
        "name": "case",
        "model": {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4},
        "data": {"sources": "none", "sequence_length": 8},
        "training": {"steps": 70, "batch_tokens": 8},
        "logging": {"wandb": {"mode": "disabled"}},
    }
    text = io.StringIO()

    def built(logging):
        config = parse_config(RunConfig, {**tree, "logging": {**tree["logging"], **logging}}, "test")
        return build_sinks(config, tmp_path, Console(file=text), 0)

    sinks = built({})
    assert [type(sink) for sink in sinks] == [JsonLines, ConsoleLines]
    with closing(sinks):
        for sink in sinks:
            sink.write({"step": 7, "loss": 1.0})
    assert text.getvalue() == "step  7/70  loss 1.0000\n"
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 7, "loss": 1.0}]
    sinks = built({"tensorboard": True, "sinks": [{"kind": "csv", "file": "mine.csv"}]})
    assert [type(sink) for sink in sinks] == [JsonLines, ConsoleLines, TensorBoard, CsvFile]
    with closing(sinks):
        assert (tmp_path / "mine.csv").exists()
        assert (tmp_path / "tensorboard").is_dir()
