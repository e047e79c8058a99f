"""Branches of a run: new runs that begin with one of its checkpoints and decay from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpoints.find import checkpoints_folder
from checkpoints.folder import Checkpoint, checkpoints_in, share
from checkpoints.location import run_checkpoints
from checkpoints.resume import check_identity, check_weights, run_identity
from checkpoints.verify import verify
from megamem.config.load import Tree, apply_override, merge, parse_config, read_yaml
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError, RunFolderError
from megamem.runs.folder import create_run_folder


def make_branch(
    run: Path,
    at: int,
    *,
    data_identity: Callable[[RunConfig], tuple[list[str], str | None]],
    steps: int | None = None,
    name: str | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Make the folder of a run that begins with the checkpoint of `run` after step `at`, and return its configuration.

    Its learning rate decays from there to its last step; up to there it is that of `run`, whose folder is only read.

    Args:
        run: folder of a run with `optimizer.schedule` wsd.
        at: a step of its stable part that has a checkpoint.
        data_identity: opens the data of a run and returns the fingerprints of each phase and the tokenizer's hash; not
            called where the branch reads what `run` reads.
        steps: steps of the branch, those before `at` included; if not given, so many that the decay is
            `optimizer.decay_ratio` of them.
        name: of the new run; `RUN-STEPS` if not given. Its folder lies beside that of `run`.
        overrides: `section.key=value`, applied last.

    Raises:
        ConfigError: `run` has no configuration, it or the branch is not stable up to that step, or the branch would end
            before it.
        CheckpointError: there is no checkpoint of that step, it is damaged, or the branch could not go on with it.
        RunFolderError: there is a folder of that name.
    """
    run = run if run.name else run.resolve()  # the folder beside it is named
    tree = read_yaml(run / "config.yaml")
    origin = parse_config(RunConfig, tree, str(run / "config.yaml"))
    _check_stable(str(run), origin, at)
    checkpoint = checkpoint_at(run, at)
    config = _branched(tree, origin, run, at, steps or _usual_steps(origin, at), name, overrides)
    _check_goes_on(run, origin, config, checkpoint, data_identity)
    verify(checkpoint)
    checkpoints = run_checkpoints(config)
    if config.checkpoint.folder is not None and checkpoints_in(checkpoints):
        raise RunFolderError(f"{checkpoints}: holds checkpoints already; give the branch another --name")
    try:
        config.run_folder.mkdir(parents=True)
    except FileExistsError:
        raise RunFolderError(f"{config.run_folder}: exists already; give the branch another --name") from None
    try:
        share(checkpoint, checkpoints)
    except (CheckpointError, OSError):
        shutil.rmtree(config.run_folder)
        raise
    # last: a folder without a configuration is never taken for a run
    create_run_folder(config)
    return config


def checkpoint_at(run: Path, step: int) -> Checkpoint:
    """Return a run's checkpoint after a step. Raises CheckpointError naming the steps that have one."""
    found = {one.step: one for one in checkpoints_in(checkpoints_folder(run)) if one.complete}
    if step not in found:
        there = f"there are those of steps {', '.join(map(str, sorted(found)))}" if found else "there is none at all"
        raise CheckpointError(f"{run}: no checkpoint of step {step}; {there} (checkpoint.keep_steps saves and keeps)")
    return found[step]


def _check_stable(where: str, origin: RunConfig, at: int) -> None:
    """Raise ConfigError unless the learning rate of a run is at its peak until after step `at`.

    where: the run's name in messages.
    """
    optimizer, steps = origin.optimizer, origin.steps
    if optimizer.schedule != "wsd":
        raise ConfigError(
            f"{where}: optimizer.schedule is {optimizer.schedule}, which has no stable part to branch off; train with "
            "wsd"
        )
    first, last = optimizer.warmup(steps), steps - optimizer.decay(steps)
    if not first <= at <= last:
        raise ConfigError(f"{where}: step {at} is not in its stable part, which lies between steps {first} and {last}")


def _check_goes_on(
    run: Path,
    origin: RunConfig,
    config: RunConfig,
    checkpoint: Checkpoint,
    data_identity: Callable[[RunConfig], tuple[list[str], str | None]],
) -> None:
    """Raise ConfigError or CheckpointError where training would refuse a branch, or its decay not begin at its start.

    Args:
        run: the folder of its origin.
        origin: the configuration there.
        config: the branch's.
        checkpoint: that it begins with.
        data_identity: as in `make_branch`.
    """
    _check_stable(f"branch of {run}", config, checkpoint.step)
    saved = checkpoint.run()
    fingerprints = [saved["data_fingerprint"], *(phase["data_fingerprint"] for phase in saved.get("phases", []))]
    tokenizer = saved["tokenizer_sha256"]
    # data need not be there to branch; they are looked at where they may be others
    before, now = ([phase.data for phase in one.phases] for one in (origin, config))
    if now != before[: len(now)] or len(fingerprints) < len(now):
        fingerprints, tokenizer = data_identity(config)
    check_identity(checkpoint, saved, run_identity(config, fingerprints[: len(now)], tokenizer))
    check_weights(config, checkpoint, saved)


def _usual_steps(origin: RunConfig, at: int) -> int:
    """Return the length of a branch whose decay is `optimizer.decay_ratio` of it."""
    return max(at + 1, round(at / (1 - origin.optimizer.decay_ratio)))


def _branched(
    tree: Tree, origin: RunConfig, run: Path, at: int, steps: int, name: str | None, overrides: Sequence[str]
) -> RunConfig:
    """Return the configuration of a branch: that of its origin but for its length, its decay and its name."""
    later = zip(tree["training"].get("phases", []), origin.phase_starts[1:], strict=True)
    phases = [phase for phase, start in later if start < steps]
    where = f"branch of {run} at step {at}"
    if steps <= at:
        raise ConfigError(f"{where}: would end after step {steps} already; give it more than {at} steps")
    changed = merge(
        tree,
        {
            "name": name or f"{origin.name}-{steps}",
            "runs_folder": str(run.parent),
            "training": {"steps": steps, "tokens": None, "stop_after": None, "phases": phases},
            "optimizer": {"warmup_steps": origin.optimizer.warmup(origin.steps), "decay_steps": steps - at},
            "checkpoint": {"keep_steps": [], "resume": "auto"},
            "logging": {"profile_steps": None, "record_step": None},
            "origin": {"run": str(run), "step": at},
            "lesson": None,
        },
    )
    for override in overrides:
        changed = apply_override(changed, override)
    return parse_config(RunConfig, changed, where)
