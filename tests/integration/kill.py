"""Kills a training job again and again at random moments, in the middle of saves too, and lets it go on each time.

    python -m tests.integration.kill --kills 50

A job of two ranks trains with a checkpoint every second step. Each life is ended by SIGKILL of all ranks or of one,
at a random moment or as soon as a save is under way; every fourth by SIGTERM, which leaves a checkpoint of the step it
ends at. Saves are slowed down. Each life must begin at the newest completed checkpoint, and the run must end with the
weights of one that was never interrupted, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.folder import checkpoints_in, folder_name, open_checkpoint
from checkpoints.read import compare
from megamem.errors import FINAL, STOPPED
from tests.integration.commands import run_tree, write_config
from tests.integration.ranks import Job, command

WORLD, SAVES, EVERY = 2, 40, 2
"""Ranks, checkpoints of a run, steps between them."""


def slow_command(pause_s: float, *arguments: str) -> None:
    """On a rank: the command, with pauses at each stage of a save."""
    from checkpoints import folder, saver, storage, target

    def slowed(function: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(pause_s)
            return function(*args, **kwargs)

        return slow

    storage.SafeWriter.write_data = slowed(storage.SafeWriter.write_data)  # type: ignore[method-assign]
    saver.Saver._written = slowed(saver.Saver._written)  # type: ignore[method-assign]
    target.mark_complete = slowed(folder.mark_complete)  # type: ignore[attr-defined]
    folder.write_text = slowed(folder.write_text)  # between the rename and the marker
    command(*arguments)


@dataclass(frozen=True)
class Life:
    """One life of the job."""

    signal: str
    in_save: bool
    """Whether it was killed while a checkpoint was being written."""
    newest: int
    """Step of the newest complete checkpoint afterwards."""
    went_on_from: int
    """Step it had begun at."""


def begun_at(job: Job) -> int:
    """The step a job goes on from, 0 for a fresh start."""
    found = re.search(r"goes on from .*step-(\d+)", job.output(0, "out"))
    return int(found[1]) if found else 0


def newest(folder: Path) -> int:
    """Step of the newest complete checkpoint, 0 if there is none."""
    return max((c.step for c in checkpoints_in(folder) if c.complete), default=0)


def torment(data: Path, folder: Path, kills: int, seed: int, layout: dict[str, Any]) -> list[Life]:
    """Kill the job `kills` times, then let it end; asserts that each life began where it should."""
    chance = random.Random(seed)
    steps = EVERY * max(SAVES, 2 * kills)
    sections = {
        "training": {"steps": steps}, "checkpoint": {"every": EVERY}, "evaluation": {"every": 0},
        "logging": {"every": 1}, **layout,
    }  # fmt: skip
    trees = {name: run_tree(data, folder / "runs", name=name, **sections) for name in ("tormented", "calm")}
    configs = {name: write_config(folder / f"{name}.yaml", tree) for name, tree in trees.items()}
    saves = folder / "runs" / "tormented" / "checkpoints"
    lives: list[Life] = []
    while len(lives) < kills + kills // 3:
        expected = newest(saves)
        gently = len(lives) % 4 == 3
        with Job(folder / f"life{len(lives)}", WORLD, slow_command, 0.05, "train", str(configs["tormented"])) as job:
            job.wait_for(r"step +\d+/")
            assert begun_at(job) == expected, "each life begins at the newest complete checkpoint"
            ranks = chance.choice([[0, 1], [0, 1], [0], [1]])
            time.sleep(chance.uniform(0.0, 1.2))
            if len(lives) % 2:
                wait_until(lambda: saving(saves), 10)
            within = saving(saves)
            for rank in ranks:
                job.send(rank, signal.SIGTERM if gently else signal.SIGKILL)
            codes = job.codes(300)
            assert None not in codes, "a job that has lost a rank ends"
            assert not gently or codes == [STOPPED] * WORLD
            assert not FINAL & set(codes), "an agent starts it again"
        lives.append(Life("SIGTERM" if gently else "SIGKILL", within, newest(saves), expected))
        assert lives[-1].newest >= expected, "nothing that was complete is lost"
        assert not gently or lives[-1].newest > expected, "a run that is asked to end saves"
    with (
        Job(folder / "end-tormented", WORLD, command, "train", str(configs["tormented"])) as tormented,
        Job(folder / "end-calm", WORLD, command, "train", str(configs["calm"])) as calm,
    ):
        for job in (tormented, calm):
            assert job.codes(300) == [0] * WORLD, job.output(0)
    last = [open_checkpoint(folder / "runs" / name / "checkpoints" / folder_name(steps)) for name in configs]
    count, differences = compare(*last)
    assert count
    assert [str(difference) for difference in differences] == []
    return lives


def saving(folder: Path) -> bool:
    """Whether a save is under way."""
    return any(folder.glob("*.partial"))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Raises AssertionError if it never comes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def main() -> None:
    """The long form; the tests run a short one."""
    from tests.unit.data_helpers import make_shards

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_shards(root, (800, 700, 1500, 600, 1200, 900), name="train", seed=0)
        make_shards(root, (300, 200), name="validation", seed=100)
        lives = torment(root, root, arguments.kills, arguments.seed, {"parallel": {"tp": 2}})
    killed = [life for life in lives if life.signal == "SIGKILL"]
    sys.stdout.write(
        f"{len(killed)} times SIGKILL, {sum(life.in_save for life in killed)} of them inside a save, and "
        f"{len(lives) - len(killed)} times SIGTERM; every life went on from the newest complete checkpoint, and the "
        "last weights are those of the uninterrupted run, bit for bit\n"
    )


if __name__ == "__main__":
    main()
