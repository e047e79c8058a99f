"""A rank that is stopped or hangs is named with what it was at, and the job ends."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import TCPStore

from checkpoints.saver import THREAD, WAITING
from megamem.errors import MegamemError, StuckRankError
from megamem.training.watchdog import RankStatus, Watchdog, diagnose
from tests.integration.commands import run_tree, write_config
from tests.integration.ranks import Job, command

pytestmark = pytest.mark.alone
STALL_S = 6
SLACK_S = 12
"""Beyond the timeout: beats of a tenth of it, and the end of a Python process on a busy machine."""
NAMES = {0: r"rank 0 \(dp 0, tp 0\)", 1: r"rank 1 \(dp 0, tp 1\)"}


@pytest.fixture
def config(data, tmp_path):
    tree = run_tree(
        data,
        tmp_path / "runs",
        training={"steps": 100_000},
        parallel={"tp": 2, "stall_timeout_s": STALL_S},
        evaluation={"every": 0},
        logging={"every": 1},
    )
    return write_config(tmp_path / "run.yaml", tree)


@pytest.mark.distributed
@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named(config, tmp_path, stopped):
    survivor = 1 - stopped
    with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
        job.wait_for(r"step +2/")
        time.sleep(STALL_S / 5)  # two beats: a rank says what it is at with each
        job.send(stopped, signal.SIGSTOP)
        begun = time.monotonic()
        codes = job.codes(STALL_S + SLACK_S)
        seconds = time.monotonic() - begun
        silence = rf"stopped responding for \d+ s \(parallel\.stall_timeout_s {STALL_S}\)"
        line = rf"megamem: {NAMES[stopped]} {silence}, last at: (.*); the job ends\n"
        found = re.fullmatch(line, job.output(survivor))
        assert found, job.output(survivor)
        assert re.match(r"step \d+: ", found[1])
        assert codes[survivor] == StuckRankError.exit_code
        # a stopped process would make a launcher wait
        assert codes[stopped] == -signal.SIGKILL
        assert STALL_S - 1 < seconds < STALL_S + SLACK_S


STAGES = {0: r"rank 0 \(stage 0, dp 0, tp 0\)", 1: r"rank 1 \(stage 1, dp 0, tp 0\)"}
ACTION = r"step \d+: (forward|backward) of micro-batch \d+, chunk \d+: waiting for the .* of the stage (above|below)"
"""What a rank is at while its neighbour does not answer."""
PIPELINE = ("parallel.tp=1", "parallel.pp=2")


@pytest.mark.distributed
@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_stage_is_named(config, tmp_path, stopped):
    survivor = 1 - stopped
    with Job(tmp_path / "job", 2, command, "train", str(config), *PIPELINE) as job:
        job.wait_for(r"step +2/")
        time.sleep(STALL_S / 5)
        job.send(stopped, signal.SIGSTOP)
        assert job.codes(STALL_S + SLACK_S)[survivor] == StuckRankError.exit_code
        line = rf"megamem: {STAGES[stopped]} stopped responding for \d+ s .*, last at: step \d+: .*; the job ends\n"
        assert re.fullmatch(line, job.output(survivor)), job.output(survivor)


@pytest.mark.distributed
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_stage_takes_the_others_along(config, tmp_path, killed):
    survivor = 1 - killed
    with Job(tmp_path / "job", 2, command, "train", str(config), *PIPELINE) as job:
        job.wait_for(r"step +2/")
        job.send(killed, signal.SIGKILL)
        codes = job.codes(STALL_S + SLACK_S)
        said = job.output(survivor)
        assert codes[killed] == -signal.SIGKILL
        assert codes[survivor] == MegamemError.exit_code, said
        lost = rf"megamem: {STAGES[survivor]} lost its connection to another rank, which has ended, at: step \d+: .*\n"
        # where rank 0 has ended, c10d may complain about its store first
        assert re.search(rf"(?:^|\n){lost}$", said), said


def meddled_with(*arguments: str) -> None:
    """On a rank: the command, with a stranger at the watchdog's port who writes to all of its keys for three seconds.

    Ranks write their own keys again in each beat, and may all do so at the same time: the first one reads 0.3 s late,
    so that what the stranger has written in between is read.
    """
    from megamem.training import watchdog

    serve, awaited, reading = watchdog.serve_store, watchdog.Messages.awaited, threading.Event()

    def read_late(messages, key):
        reading.set()
        time.sleep(0.3)
        return awaited(messages, key)

    def serve_to_all(*given):
        store = serve(*given)

        def meddle() -> None:
            reading.wait()
            stranger = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
            for _ in range(30):
                for key in ("rank/0", "rank/1", "message", "left/1"):
                    stranger.set(f"watchdog/{key}", b"1|2|\xff")
                time.sleep(0.1)

        threading.Thread(target=meddle, daemon=True).start()
        watchdog.Messages.awaited = read_late
        return store

    watchdog.serve_store = serve_to_all
    command(*arguments)


@pytest.mark.distributed
def test_a_stranger_at_the_watchdogs_port_ends_nothing(config, tmp_path):
    """Before, the threads that read died of what it wrote: the run went on unwatched."""
    with Job(tmp_path / "job", 2, meddled_with, "train", str(config)) as job:
        job.wait_for("ignored what stands at 'watchdog/rank/1'", stream="err")
        time.sleep(STALL_S)
        job.send(1, signal.SIGSTOP)
        codes = job.codes(STALL_S + SLACK_S)
        assert codes[0] == StuckRankError.exit_code
        assert re.search(rf"megamem: {NAMES[1]} stopped responding .*; the job ends\n", job.output(0)), job.output(0)


def test_a_watchdog_that_fails_says_so_and_goes_on(capsys):
    """The end of a job is written to a full disk, say; and a look that fails is one look."""
    ended, looks = [], []

    def full(code, message):
        raise OSError("No space left on device")

    topology = SimpleNamespace(rank=0, world_size=1, tp_size=1, dp_size=1, name=lambda rank=0: "rank 0")
    dog = Watchdog(topology, 1.0, ended.append, full)
    observe = dog._observe

    def observe_from_the_second_look_on() -> None:
        looks.append(None)
        if len(looks) == 1:
            raise ValueError("a defect")
        observe()

    dog._observe = observe_from_the_second_look_on
    with dog:
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ended == [StuckRankError.exit_code]
    said = capsys.readouterr().err
    assert "megamem: rank 0: the watchdog fails, and tries again (ValueError: a defect)\n" in said
    assert "rank 0 makes no progress for" in said


def test_an_older_message_that_is_put_back_is_no_sign_of_life():
    topology = SimpleNamespace(rank=0, world_size=1, tp_size=1, dp_size=1, name=lambda rank=0: "rank 0")
    dog = Watchdog(topology, 1.0)
    dog.statuses[1] = RankStatus()
    seen = []
    for beat in (3, 4, 3, 4, 5):
        dog._states[1] = f"{beat}|{beat}|0|host:1|0|0|step {beat}"
        dog._observe()
        seen.append((dog.statuses[1].beat, dog.statuses[1].progress, dog.statuses[1].beat_at))
    assert [each[:2] for each in seen] == [(3, 3), (4, 4), (4, 4), (4, 4), (5, 5)]
    assert seen[1][2] == seen[2][2] == seen[3][2] < seen[4][2], "since the fourth beat it has shown nothing"


def asleep_in_a_chunk(*arguments: str) -> None:
    """On a rank: the command, with stage 1 asleep in the middle of its third step."""
    import os

    from megamem.pipeline.executor import StageExecutor

    forward, count = StageExecutor._forward, 0

    def sleepy(self, action, entered):
        nonlocal count
        count += action.micro_batch == 1 and action.chunk == 2
        if count == 3 and os.environ["RANK"] == "1":
            time.sleep(600)
        return forward(self, action, entered)

    StageExecutor._forward = sleepy
    command(*arguments)


@pytest.mark.distributed
def test_a_stage_that_hangs_is_named_with_its_action(config, tmp_path):
    with Job(tmp_path / "job", 2, asleep_in_a_chunk, "train", str(config), *PIPELINE) as job:
        job.wait_for(r"step +2/")
        assert job.codes(STALL_S + SLACK_S) == [StuckRankError.exit_code] * 2
        said = job.output(0) + job.output(1)
        at = "step 3: forward of micro-batch 1, chunk 2"
        assert re.fullmatch(rf"megamem: {STAGES[1]} makes no progress for \d+ s .*, last at: {at}.*\n", said), said


def asleep_in_step_3(*arguments: str) -> None:
    """On a rank: the command, with rank 1 asleep in its third step."""
    import os

    from megamem.pipeline.engine import WindowEngine

    backward, count = WindowEngine.backward, 0

    def sleepy(self, *arguments):
        nonlocal count
        count += 1
        if count == 3 and os.environ["RANK"] == "1":
            watch = arguments[-1]
            watch("a nap")
            time.sleep(600)
        return backward(self, *arguments)

    WindowEngine.backward = sleepy
    command(*arguments)


@pytest.mark.distributed
def test_a_rank_that_hangs_is_named_not_those_that_wait_for_it(config, tmp_path):
    with Job(tmp_path / "job", 2, asleep_in_step_3, "train", str(config)) as job:
        job.wait_for(r"step +2/")
        begun = time.monotonic()
        assert job.codes(STALL_S + SLACK_S) == [StuckRankError.exit_code] * 2
        assert time.monotonic() - begun < STALL_S + SLACK_S
        said = job.output(0) + job.output(1)
        assert re.fullmatch(rf"megamem: {NAMES[1]} makes no progress for \d+ s .*, last at: step 3: a nap; .*\n", said)


@pytest.mark.distributed
def test_a_rank_that_ends_takes_the_others_along(config, tmp_path):
    with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
        job.wait_for(r"step +2/")
        job.send(1, signal.SIGKILL)
        first, second = job.codes(STALL_S + SLACK_S)
        assert (first, second) == (MegamemError.exit_code, -signal.SIGKILL)
        lost = rf"megamem: {NAMES[0]} lost its connection to another rank, which has ended, at: step \d+: .*\n"
        assert re.fullmatch(lost, job.output(0))


class TestDiagnose:
    """`timeout` is 10; times are seconds ago."""

    NOW, TIMEOUT = 1000.0, 10.0

    def diagnose(self, **ranks):
        """ranks: r0=(progress, seconds since progress, seconds since a beat, waiting)."""
        statuses = {
            int(name[1:]): RankStatus(
                progress=progress, progress_at=self.NOW - idle, beat_at=self.NOW - silent, waiting=waiting
            )
            for name, (progress, idle, silent, waiting) in ranks.items()
        }
        return diagnose(statuses, self.NOW, self.TIMEOUT)

    def test_all_is_well(self):
        assert self.diagnose(r0=(5, 9.9, 1, True), r1=(5, 2, 1, False)) is None

    def test_a_silent_thread_is_blamed_first(self):
        found = self.diagnose(r0=(4, 11, 1, False), r1=(9, 11, 6, False), r2=(1, 11, 1, True))
        assert found == (1, "stopped responding")

    def test_silence_alone_is_no_stall(self):
        """A thread may be late while the work goes on."""
        assert self.diagnose(r0=(5, 1, 1, False), r1=(5, 3, 9, False)) is None

    def test_who_does_not_wait_holds_the_others_up(self):
        found = self.diagnose(r0=(5, 11, 1, True), r1=(5, 11, 1, False), r2=(4, 11, 1, True))
        assert found == (1, "makes no progress")

    def test_who_waits_is_not_blamed_while_the_culprit_may_still_show(self):
        """Rank 1 came later to where it hangs."""
        assert self.diagnose(r0=(5, 11, 1, True), r1=(5, 8, 1, False)) is None
        assert self.diagnose(r0=(5, 14, 1, True), r1=(5, 10.1, 1, False)) == (1, "makes no progress")

    def test_all_wait(self):
        """Different collectives: whoever is furthest behind."""
        assert self.diagnose(r0=(6, 12, 1, True), r1=(5, 11, 1, True)) == (1, "makes no progress")

    def test_waiting_for_twice_the_time_is_a_stall_whatever_the_others_do(self):
        assert self.diagnose(r0=(6, 21, 1, True), r1=(90, 1, 1, False)) == (0, "makes no progress")

    def test_the_lowest_rank_of_equals(self):
        found = self.diagnose(r1=(5, 11, 1, False), r0=(5, 11, 1, False))
        assert found == (0, "makes no progress")


@pytest.mark.parametrize(("host", "said"), [("elsewhere", " on elsewhere"), (socket.gethostname(), "")])
def test_hosts_are_named_where_there_are_several(host, said):
    dog = Watchdog(SimpleNamespace(rank=0, world_size=1), STALL_S)
    dog._states = {1: f"1|1|0|{host}:12|step 3: a: b"}
    assert dog._on_host(f"{host}:12") == said


@pytest.mark.parametrize(("action", "waits"), [("step 3: backward", False), (WAITING, True)])
def test_a_save_in_the_background_is_no_waiting(action, waits):
    """Its thread sits in a collective; the run does so only where it waits for that thread."""
    lock = threading.Lock()
    collective = compile("lock.acquire()", "torch/distributed/distributed_c10d.py", "exec")
    thread = threading.Thread(target=exec, args=(collective, {"lock": lock}), name=THREAD, daemon=True)
    dog = Watchdog(SimpleNamespace(rank=0, world_size=1), STALL_S)
    with lock:
        thread.start()
        time.sleep(0.2)
        dog.progress(action)
        assert dog._waits() == waits
        thread.name = "autograd"
        assert dog._waits(), "all other threads count"
    thread.join()


@pytest.mark.distributed
def test_a_rank_stopped_before_its_first_beat_is_found(tmp_path):
    with Job(tmp_path, 2, stopped_at_once) as job:
        assert job.codes(STALL_S + SLACK_S) == [StuckRankError.exit_code, -signal.SIGKILL]
        assert re.match(rf"megamem: {NAMES[1]} stopped responding for .* last at: starting; ", job.output(0))


def stopped_at_once() -> None:
    """On a rank: rank 1 stops itself as the watch begins."""
    import os

    from megamem.parallel.topology import Topology
    from megamem.training.watchdog import Watchdog

    topology = Topology.start(2, device="cpu", timeout_s=60)
    with Watchdog(topology, STALL_S):
        if topology.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
