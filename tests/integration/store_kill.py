"""Kills a training job inside its saves to an object store, and the store too, and lets both go on each time.

    python -m tests.integration.store_kill --kills 10

A job of two ranks trains with a checkpoint every second step, in a store that it reaches over HTTP. Each life is ended
by SIGKILL of all ranks at another moment of a save; every second time the store is killed with it, and started again.
Each life must begin at the newest complete checkpoint, and the run must end with the state of a run on a local disk
that was never interrupted, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.folder import checkpoints_in, folder_name, open_checkpoint
from checkpoints.location import ObjectPath
from checkpoints.read import compare
from checkpoints.verify import verify
from tests.integration.commands import run_tree, write_config
from tests.integration.kill import begun_at, wait_until
from tests.integration.ranks import Job, command
from tests.integration.s3_server import BUCKET, S3Server, with_environment

WORLD, EVERY, PAUSE_S = 2, 2, 0.04


def slow_command(environment: dict[str, str], *arguments: str) -> None:
    """On a rank: the command, with a pause before each object that a save writes or removes."""
    from checkpoints import target

    def slowed(function: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(PAUSE_S)
            return function(*args, **kwargs)

        return slow

    target.ObjectTarget._upload = slowed(target.ObjectTarget._upload)  # type: ignore[method-assign]
    with_environment(environment, *arguments)


@dataclass(frozen=True)
class Life:
    """One life of the job."""

    objects: tuple[str, ...]
    """Objects of the checkpoint that was being written, as far as they were there."""
    store_killed: bool
    newest: int
    """Step of the newest complete checkpoint afterwards."""


def complete(folder: ObjectPath) -> list[int]:
    """Steps of the complete checkpoints, each of which is as it was written."""
    found = [checkpoint for checkpoint in checkpoints_in(folder) if checkpoint.complete]
    for checkpoint in found:
        verify(checkpoint)
    return [checkpoint.step for checkpoint in found]


def unfinished(folder: ObjectPath) -> list[ObjectPath]:
    """Checkpoints without a marker."""
    return [checkpoint.path for checkpoint in checkpoints_in(folder, unfinished=True) if not checkpoint.complete]


def wait_for_another(folder: ObjectPath, before: list[ObjectPath]) -> None:
    """Wait until a save is under way that is not one of `before`."""
    wait_until(lambda: bool(set(unfinished(folder)) - set(before)), 30)


def torment(data: Path, folder: Path, server: S3Server, kills: int, seed: int) -> list[Life]:
    """Kill the job inside `kills` saves, then let it end; asserts that each life began where it should."""
    chance, steps = random.Random(seed), EVERY * 4 * kills
    sections = {
        "training": {"steps": steps}, "evaluation": {"every": 0}, "logging": {"every": 1}, "parallel": {"tp": WORLD},
    }  # fmt: skip
    store = {"every": EVERY, "folder": f"s3://{BUCKET}/checkpoints", "retry_minutes": 0.5}
    trees = {
        "tormented": run_tree(data, folder / "runs", name="tormented", **sections, checkpoint=store),
        "calm": run_tree(data, folder / "runs", name="calm", **sections, checkpoint={"every": steps}),
    }
    configs = {name: write_config(folder / f"{name}.yaml", tree) for name, tree in trees.items()}
    saves = ObjectPath(f"s3://{BUCKET}/checkpoints/tormented")
    lives: list[Life] = []
    while len(lives) < kills:
        expected = max(complete(saves), default=0)
        arguments = (server.environment, "train", str(configs["tormented"]))
        with Job(folder / f"life{time.monotonic_ns()}", WORLD, slow_command, *arguments) as job:
            job.wait_for(r"step +\d+/")
            assert begun_at(job) == expected, "each life begins at the newest complete checkpoint"
            wait_for_another(saves, unfinished(saves))
            time.sleep(chance.uniform(0.0, 6 * PAUSE_S))
            store_too = len(lives) % 2 == 1
            if store_too:
                server.kill()
            for rank in range(WORLD):
                job.send(rank, signal.SIGKILL)
            assert job.codes(300) == [-signal.SIGKILL] * WORLD
        if store_too:
            server.start()
        newest = max(complete(saves), default=0)
        assert newest >= expected, "nothing that was complete is lost"
        if left := [path for path in unfinished(saves) if int(path.name[5:]) > newest]:
            lives.append(Life(tuple(sorted(left[-1].entries())), store_too, newest))
    with (
        Job(folder / "end-tormented", WORLD, with_environment, *arguments) as tormented,
        Job(folder / "end-calm", WORLD, command, "train", str(configs["calm"])) as calm,
    ):
        for job in (tormented, calm):
            assert job.codes(300) == [0] * WORLD, job.output(0)
    assert unfinished(saves) == [], "what killed saves have left is removed"
    last = open_checkpoint(saves / folder_name(steps))
    count, differences = compare(last, open_checkpoint(folder / "runs" / "calm" / "checkpoints" / folder_name(steps)))
    assert count
    assert [str(difference) for difference in differences] == []
    return lives


def main() -> None:
    """The long form; the tests run a short one."""
    from tests.unit.data_helpers import make_shards

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, S3Server(Path(name) / "s3") as server:
        os.environ.update(server.environment)
        root = Path(name)
        make_shards(root, (800, 700, 1500, 600, 1200, 900), name="train", seed=0)
        make_shards(root, (300, 200), name="validation", seed=100)
        lives = torment(root, root, server, arguments.kills, arguments.seed)
        last = checkpoints_in(ObjectPath(f"s3://{BUCKET}/checkpoints/tormented"))[-1]
        size = last.bytes
    for life in lives:
        sys.stdout.write(f"newest {life.newest:3d}, unfinished: {', '.join(life.objects)}\n")
    sys.stdout.write(
        f"{len(lives)} times SIGKILL inside a save, {sum(life.store_killed for life in lives)} of them of the store "
        f"too, in {time.monotonic() - began:.0f} s; every life went on from the newest complete checkpoint, and the "
        f"last ({size:,} bytes) is that of the uninterrupted run, bit for bit\n"
    )


if __name__ == "__main__":
    main()
