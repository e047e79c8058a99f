"""Checkpoints of a run: when they are saved, and how a run goes on from one."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from checkpoints.folder import FOLDER, Checkpoint
from checkpoints.resume import check_identity, choose, identity, load
from checkpoints.saver import Saver
from checkpoints.training_state import all_fragments, optimizer_steps
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, MegamemError
from megamem.pipeline.base import StepResult, TrainingEngine
from megamem.training.callbacks import BadSteps
from megamem.training.loop import Callback, Trainer


def on_rank_0(work: Callable[[], Any], group: ProcessGroup) -> Any:
    """Rank 0's result of `work` on all ranks; a MegamemError there is raised on all."""
    told: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            told[0] = work()
        except MegamemError as error:
            told[1] = error
        except Exception as error:  # a defect or a failing disk: nobody should wait for rank 0
            told[1] = MegamemError(f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(told, group_src=0, group=group)
    if told[1] is not None:
        raise told[1]
    return told[0]


def resume_point(config: RunConfig, facts: dict[str, Any], group: ProcessGroup) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint this run goes on from, chosen and verified by rank 0, and lines about skipped ones.

    facts: of `run_facts`. Raises: CheckpointError on all ranks.
    """

    def chosen() -> tuple[Checkpoint | None, list[str]]:
        checkpoint, skipped = choose(config.checkpoint, config.run_folder / FOLDER)
        if checkpoint is not None:
            saved = checkpoint.run()
            check_identity(checkpoint, saved, facts)
            _check_weights(config, checkpoint, saved)
        return checkpoint, skipped

    found: tuple[Checkpoint | None, list[str]] = on_rank_0(chosen, group)
    return found


def _check_weights(config: RunConfig, checkpoint: Checkpoint, saved: dict[str, Any]) -> None:
    """A run that asks for other weights to start from is another run, which must not go on from this one's."""
    wanted = config.training.init_from
    begun_with = saved["config"]["training"].get("init_from")
    if config.checkpoint.resume == "auto" and wanted is not None and str(wanted) != begun_with:
        raise CheckpointError(
            f"{checkpoint.path}: the run did not start from training.init_from {wanted}; choose another `name` to "
            "start a new one"
        )


def placed_as_before(config: RunConfig, checkpoint: Checkpoint | None) -> RunConfig:
    """The configuration with the layers on the stages they were measured to belong to when the run began.

    A second measurement may come out otherwise, and sums in another order are another run.
    """
    if checkpoint is None or config.parallel.placement != "measured":
        return config
    placement = tuple(checkpoint.run()["placement"])
    if len(placement) != config.parallel.pp:
        return config
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"placement": placement})})


def run_facts(config: RunConfig, data_fingerprint: str, tokenizer_sha256: str | None) -> dict[str, Any]:
    """What every checkpoint of the run says in run.json besides its counters."""
    return {
        **identity(config, data_fingerprint, tokenizer_sha256),
        "config": config.model_dump(mode="json"),
        "megamem": version("megamem"),
    }


def cpu_group(timeout_s: float) -> ProcessGroup:
    """A group of all ranks on gloo that nobody else uses. All ranks must call it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, ProcessGroup)
    return group


class Checkpoints(Callback):
    """Saves a checkpoint every so many steps or minutes, and at the end. The last of a run's callbacks."""

    def __init__(
        self,
        engine: TrainingEngine,
        saver: Saver,
        facts: dict[str, Any],
        bad_steps: BadSteps,
        validation: Callable[[], tuple[int, float] | None],
    ) -> None:
        """facts: of `run_facts`. validation: step and loss of the last validation."""
        self.engine, self.saver, self.facts = engine, saver, facts
        self.bad_steps, self.validation = bad_steps, validation
        self.saved = 0

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        trainer.saver = self.saver
        self.saved = trainer.step
        self._since = time.monotonic()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`."""
        config = trainer.config.checkpoint
        if (config.every and trainer.step % config.every == 0) or trainer.clock_says_save:
            with trainer.pause(f"checkpoint after step {trainer.step}"):
                self._save(trainer, wait=False)
        late = config.minutes is not None and time.monotonic() - self._since > 60 * config.minutes
        trainer.clock_says_save = late

    def finish(self, trainer: Trainer) -> None:
        """See `Callback.finish`."""
        if self.saved != trainer.step:
            self._save(trainer, wait=True)
        self.saver.wait(trainer.watch)
        self.saver.release()

    def _save(self, trainer: Trainer, wait: bool) -> None:
        topology, engine, step = self.engine.topology, self.engine, trainer.step
        tensors = all_fragments(engine)
        last = self.validation()
        run = {
            "step": step,
            "tokens": step * trainer.config.training.batch_tokens,
            "samples": step * trainer.config.global_rows,
            "optimizer_steps": optimizer_steps(engine),
            "bad_steps": self.bad_steps.counters(),
            "val_loss": last[1] if last is not None and last[0] == step else None,
            "layout": {"pp": topology.pp_size, "dp": topology.dp_size, "tp": topology.tp_size},
            "placement": [len(layers) for layers in engine.placement],
            **self.facts,
        }
        self.saver.save(step, tensors, run, wait, trainer.watch)
        self.saved, self._since = step, time.monotonic()


def go_on(trainer: Trainer, checkpoint: Checkpoint, bad_steps: BadSteps, group: ProcessGroup) -> None:
    """Put a run where a checkpoint was saved. A collective call."""
    run = load(trainer.engine, checkpoint, group)
    trainer.step = run["step"]
    bad_steps.set_counters(run["bad_steps"])
