"""What is said of runs from their folders alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import threading
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.errors import CheckpointError, ConfigError
from megamem.runs.heartbeat import NAME, Beat, Heartbeat, RankBeat, read_beat, state_of
from megamem.runs.status import (
    STALE_BEATS,
    condition_of,
    find_runs,
    format_duration,
    process_gone,
    read_status,
    run_page,
    runs_table,
)

GONE_PID = 2**22 + 1
"""Above the kernel's largest."""


def beat(**fields) -> Beat:
    base = {
        "time": time.time(), "interval_s": 5.0, "state": "training", "host": socket.gethostname(), "pid": os.getpid(),
        "step": 12, "steps": 40, "tokens": 4096, "loss": 3.25, "tokens_per_second": 1500.0, "eta_s": 75.0,
        "val_loss": 3.5,
    }  # fmt: skip
    return Beat(**{**base, **fields})


def make_run(folder, found: Beat | None = None, result: dict | None = None):
    folder.mkdir(parents=True)
    for name in ("config.yaml", "environment.json"):
        (folder / name).touch()
    if found is not None:
        (folder / NAME).write_text(found.model_dump_json())
    if result is not None:
        complete = {
            "run_dir": str(folder),
            "steps": 4,
            "tokens": 64,
            "tokens_per_second": 1.0,
            "memory_gib_by_rank": [1],
            **result,
        }
        (folder / "result.json").write_text(json.dumps(complete))
    return folder


def shown(part, width=200) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(part)
    return text.getvalue()


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


class TestJudge:
    @pytest.mark.parametrize(
        ("state", "age", "gone", "condition"),
        [
            ("training", 1, False, "running"),
            ("starting", 59, False, "running"),
            ("saving", 61, False, "stale"),
            ("training", 16, True, "stale"),
            # a process of another container may look as if it were gone; its heartbeat shows that it is not
            ("training", 14, True, "running"),
            ("ended", 10**6, True, "done"),
            ("stopped", 10**6, True, "stopped"),
            ("failed", 10**6, True, "failed"),
        ],
    )
    def test_by_state_age_and_process(self, state, age, gone, condition):
        assert condition_of(beat(state=state), age, lambda found: gone)[0] == condition

    def test_a_clock_that_is_ahead_is_no_age(self):
        assert condition_of(beat(), -100, lambda found: True)[0] == "running"

    def test_reasons(self):
        assert condition_of(beat(state="failed", message="no"), 0, lambda found: False)[1] == "no"
        assert "no heartbeat for 0:02:00, one was due every 5 s" in condition_of(beat(), 120, lambda found: False)[1]
        assert f"process {os.getpid()} on" in condition_of(beat(), 20, lambda found: True)[1]

    def test_only_a_process_of_this_host_is_known_to_be_gone(self):
        assert not process_gone(beat())
        assert process_gone(beat(pid=GONE_PID))
        assert not process_gone(beat(pid=GONE_PID, host="elsewhere"))
        assert not process_gone(beat(pid=1))


class TestLook:
    def test_a_running_run(self, tmp_path):
        checkpoint = tmp_path / "run" / "checkpoints" / "step-00000010"
        run = make_run(tmp_path / "run", beat())
        checkpoint.mkdir(parents=True)
        assert read_status(run).checkpoint is None, "it is not complete"
        (checkpoint / "COMPLETE").touch()
        found = read_status(run)
        assert found.condition == "running"
        assert found.checkpoint[0] == 10
        assert 0 <= found.checkpoint[1] < 60
        figures = found.to_dict()
        assert figures["step"] == 12
        assert figures["state"] == "running"
        assert figures["at"] == "training"
        assert figures["checkpoint_step"] == 10

    def test_a_done_run_has_the_figures_of_its_end(self, tmp_path):
        run = make_run(tmp_path / "run", beat(state="ended"), {"val_loss": 2.0, "steps": 40})
        assert read_status(run).condition == "done"
        assert read_status(run).val_loss == 2.0

    def test_a_run_that_began_again_has_not(self, tmp_path):
        run = make_run(tmp_path / "run", beat(), {"val_loss": 2.0, "steps": 12})
        assert read_status(run).condition == "running"
        assert read_status(run).val_loss == 3.5

    def test_without_a_heartbeat(self, tmp_path):
        assert read_status(make_run(tmp_path / "a", None, {"steps": 7, "val_loss": 2.0})).condition == "done"
        assert read_status(tmp_path / "a").step == 7
        lost = read_status(make_run(tmp_path / "b"))
        assert (lost.condition, lost.reason, lost.step) == ("stale", "no heartbeat", None)

    def test_figures_of_a_run_that_never_beat(self, tmp_path):
        found = read_status(make_run(tmp_path / "run")).to_dict()
        assert found == {
            "run": str(tmp_path / "run"), "state": "stale", "at": None, "reason": "no heartbeat", "age_s": None,
            "step": None, "val_loss": None, "checkpoint_step": None, "checkpoint_age_s": None,
        }  # fmt: skip
        done = read_status(make_run(tmp_path / "done", None, {"steps": 7, "val_loss": None})).to_dict()
        assert (done["state"], done["step"], done["val_loss"]) == ("done", 7, None), "a loss that was not finite"

    @pytest.mark.parametrize("missing", ["config.yaml", "environment.json"])
    def test_a_run_folder_has_both_of_its_files(self, tmp_path, missing):
        (make_run(tmp_path / "run") / missing).unlink()
        assert list(find_runs(tmp_path)) == []

    def test_a_damaged_heartbeat_is_none(self, tmp_path):
        run = make_run(tmp_path / "run", beat())
        (run / NAME).write_text("{")
        assert read_beat(run) is None
        (run / NAME).write_text("{}")
        assert read_status(run).condition == "stale"

    def test_no_run(self, tmp_path):
        with pytest.raises(ConfigError, match="no such folder"):
            read_status(tmp_path / "none")
        with pytest.raises(ConfigError, match="not a run folder"):
            read_status(tmp_path)

    def test_runs_of_studies_are_found_and_nothing_within_a_run(self, tmp_path):
        runs = [tmp_path / "b", tmp_path / "studies" / "s" / "runs" / "x", tmp_path / "a"]
        for run in runs:
            make_run(run)
        make_run(tmp_path / "a" / "inner")
        (tmp_path / "studies" / "s" / "configs").mkdir()
        assert list(find_runs(tmp_path)) == [runs[2], runs[0], runs[1]]
        with pytest.raises(ConfigError, match="no such folder"):
            list(find_runs(tmp_path / "none"))


class TestPages:
    def test_a_table_of_runs(self, tmp_path):
        make_run(tmp_path / "one", beat())
        make_run(tmp_path / "two", beat(state="failed", exit_code=5, message="loss was not finite"))
        make_run(tmp_path / "three", None, {"steps": 9, "val_loss": 1.5})
        text = shown(runs_table([read_status(path) for path in find_runs(tmp_path)], tmp_path))
        assert [cell.strip() for cell in text.splitlines()[3].strip("│").split("│")] == [
            "one", "running", "12/40", "3.2500", "3.5000", "1,500", "0:01:15", "0:00:00",
        ]  # fmt: skip
        assert "failed (5)" in text
        assert "0:01:15" not in text.splitlines()[5], "a run that has failed never arrives"

    def test_a_page_names_ranks_and_the_slow_one(self, tmp_path):
        ranks = [
            RankBeat(rank=0, name="rank 0 (dp 0, tp 0)", process="a:1", action="step 13: micro-batch 0, chunks 0-3",
                     idle_s=0.4, waiting=True, wait_share=0.61),
            RankBeat(rank=1, name="rank 1 (dp 0, tp 1)", process="b:2", action="step 13: [odd]", idle_s=65,
                     waiting=False, wait_share=None),
        ]  # fmt: skip
        text = shown(run_page(read_status(make_run(tmp_path / "run", beat(ranks=ranks, slow="rank 1 is slow")))))
        for words in ("12 of 40", "4,096", "rank 1 is slow", "waiting", "working", "61%", "0:01:05", "[odd]", "none"):
            assert words in text

    def test_a_page_in_full(self, tmp_path, monkeypatch):
        now = time.time()
        run = make_run(tmp_path / "run", beat(time=now - 4, host="a", pid=7, state="saving"))
        marker = run / "checkpoints" / "step-00000008" / "COMPLETE"
        marker.parent.mkdir(parents=True)
        marker.touch()
        os.utime(marker, (now - 90, now - 90))
        monkeypatch.setattr(time, "time", lambda: now)
        lines = shown(run_page(read_status(run))).splitlines()
        assert [re.split(r"  +", line.strip()) for line in lines] == [
            ["run", str(run)],
            ["state", "running"],
            ["at", "saving"],
            ["heartbeat", "0:00:04 ago, by process 7 on a"],
            ["step", "12 of 40"],
            ["tokens", "4,096"],
            ["loss", "3.2500"],
            ["validation loss", "3.5000"],
            ["tokens/s", "1,500"],
            ["ETA", "0:01:15"],
            ["last checkpoint", "after step 8, 0:01:30 ago"],
        ]

    def test_a_page_of_a_run_that_never_beat(self, tmp_path):
        run = make_run(tmp_path / "run")
        assert [line.split() for line in shown(run_page(read_status(run))).splitlines()] == [
            ["run", str(run)], ["state", "stale"], ["reason", "no", "heartbeat"],
        ]  # fmt: skip

    def test_a_page_of_a_failed_run_says_why(self, tmp_path):
        run = make_run(tmp_path / "run", beat(state="failed", exit_code=5, message="loss was [not] finite"))
        text = shown(run_page(read_status(run)))
        assert "failed (5)" in text
        assert "loss was [not] finite" in text
        assert "ETA" not in text

    def test_spans(self):
        shown = {0.4: "0:00:00", 59.6: "0:01:00", 3 * 3600 + 125: "3:02:05", None: ""}
        assert {seconds: format_duration(seconds) for seconds in shown} == shown


class TestCommands:
    def test_status(self, tmp_path):
        run = make_run(tmp_path / "run", beat())
        result = call("status", str(run))
        assert result.exit_code == 0
        assert "12 of 40" in result.output
        found = json.loads(call("status", str(run), "--json").output)
        assert (found["state"], found["step"], found["steps"], found["loss"]) == ("running", 12, 40, 3.25)

    def test_a_watched_run_is_shown_until_it_ends(self, tmp_path, monkeypatch):
        run = make_run(tmp_path / "run", beat())
        monkeypatch.setattr(time, "sleep", lambda s: (run / NAME).write_text(beat(state="stopped").model_dump_json()))
        states = [
            json.loads(line)["state"] for line in call("status", str(run), "--json", "--watch").output.splitlines()
        ]
        assert states == ["running", "stopped"]
        (run / NAME).write_text(beat().model_dump_json())
        assert "stopped" in call("status", str(run), "--watch").output

    def test_runs(self, tmp_path):
        make_run(tmp_path / "one", beat())
        make_run(tmp_path / "studies" / "s" / "runs" / "two", beat(state="ended"))
        lines = [json.loads(line) for line in call("runs", str(tmp_path), "--json").output.splitlines()]
        assert [line["state"] for line in lines] == ["running", "done"]
        assert "studies/s/runs/two" in call("runs", str(tmp_path)).output

    def test_no_runs(self, tmp_path):
        result = call("runs", str(tmp_path))
        assert result.exit_code == 0
        assert "no runs" in result.output
        assert isinstance(call("runs", str(tmp_path / "none")).exception, ConfigError)
        assert isinstance(call("status", str(tmp_path)).exception, ConfigError)


class TestHeartbeat:
    def test_it_begins_beats_and_ends(self, tmp_path):
        with Heartbeat(tmp_path, interval_s=0.02) as heart:
            heart.begin(40)
            assert read_beat(tmp_path).state == "starting"
            heart.write({"step": 4, "tokens": 400, "loss": 2.0, "tokens_per_second": 10.0, "eta_s": 100.0})
            heart.write({"step": 5, "tokens": 500, "val_loss": 2.5})
            deadline = time.monotonic() + 10
            while read_beat(tmp_path).val_loss is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            found = read_beat(tmp_path)
            assert (found.step, found.steps, found.loss, found.val_loss, found.pid) == (5, 40, 2.0, 2.5, os.getpid())
            assert 90 < found.eta_s <= 100
        assert read_beat(tmp_path).state == "ended"
        assert [path.name for path in tmp_path.iterdir()] == [NAME], "nothing temporary is left"

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (CheckpointError("step 4: the disk is full"), CheckpointError.exit_code, "step 4: the disk is full"),
            (ValueError("a\nb"), 1, "ValueError: a b"),
            (KeyboardInterrupt(), 130, "interrupted"),
        ],
    )
    def test_a_run_that_fails_says_so(self, tmp_path, error, code, line):
        with contextlib.suppress(type(error)), Heartbeat(tmp_path, interval_s=60) as heart:
            heart.begin(4)
            raise error
        found = read_beat(tmp_path)
        assert (found.state, found.exit_code, found.message) == ("failed", code, line)

    def test_what_was_said_first_stands(self, tmp_path):
        with contextlib.suppress(RuntimeError), Heartbeat(tmp_path, interval_s=60) as heart:
            heart.begin(4)
            heart.failed(6, "rank 1 makes no progress")
            raise RuntimeError("connection closed by peer")
        assert read_beat(tmp_path).message == "rank 1 makes no progress"

    def test_nothing_is_written_before_the_folder_is_ours(self, tmp_path):
        with pytest.raises(CheckpointError), Heartbeat(tmp_path, interval_s=60):
            raise CheckpointError("damaged")
        assert list(tmp_path.iterdir()) == []

    def test_other_ranks_write_nothing(self, tmp_path):
        with Heartbeat(None, interval_s=60) as heart:
            heart.begin(4)
            heart.failed(6, "rank 1 makes no progress")

    def test_a_full_disk_ends_no_run(self, tmp_path):
        with Heartbeat(tmp_path / "none", interval_s=60) as heart:
            heart.begin(4)

    def test_a_disk_that_does_not_answer_keeps_no_run_from_ending(self, tmp_path, monkeypatch):
        answers = threading.Event()
        monkeypatch.setattr("megamem.runs.heartbeat.LAST_S", 0.1)
        with Heartbeat(tmp_path, interval_s=0.01) as heart:
            heart.begin(4)
            monkeypatch.setattr("pathlib.Path.replace", lambda path, target: answers.wait(30))
            time.sleep(0.1)  # the next beat hangs, and whatever wants to write after it
            begun = time.monotonic()
            heart.failed(6, "rank 1 makes no progress")
        assert time.monotonic() - begun < 10
        answers.set()

    def test_numbers_that_are_none_are_null(self, tmp_path):
        with Heartbeat(tmp_path, interval_s=60) as heart:
            heart.begin(4)
            heart.write({"step": 1, "loss": float("nan")})
        assert read_beat(tmp_path).loss is None
        json.loads((tmp_path / NAME).read_text(), parse_constant=pytest.fail)

    @pytest.mark.parametrize(
        ("action", "state"),
        [
            ("starting", "starting"),
            ("loading runs/a/checkpoints/step-00000002", "starting"),
            ("step 3: waiting for data", "training"),
            ("step 3: gradient reduction and optimizer step", "training"),
            ("validation after step 3", "evaluating"),
            ("validation, call 1 of 2", "evaluating"),
            ("evaluation, held-out loss: call 1 of 9", "evaluating"),
            ("checkpoint after step 3", "saving"),
            ("saving the weights", "saving"),
            ("waiting for the checkpoint to be written", "saving"),
        ],
    )
    def test_states(self, action, state):
        assert state_of(action) == state


def test_a_beat_may_be_late_by_what_file_systems_keep_back():
    """NFS clients may show an old file for a minute (acregmax 60 s); at 5 s a beat that is not death yet."""
    assert STALE_BEATS * 5 >= 60
