"""Checkpoints of a run: when they are saved, and how a run resumes from one."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from checkpoints.folder import Checkpoint
from checkpoints.location import check_folder, run_checkpoints
from checkpoints.records import RunFacts, SavedRun
from checkpoints.resume import (
    all_agree,
    check_identity,
    check_weights,
    choose_checkpoint,
    load_training_state,
    run_identity,
)
from checkpoints.saver import Saver
from checkpoints.training_state import all_fragments, optimizer_steps
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, DamagedError, MegamemError, StoreError
from megamem.pipeline.base import StepResult, TrainingEngine
from megamem.pipeline.start_weights import check_start
from megamem.training.callbacks.bad_steps import BadSteps
from megamem.training.loop import Callback, Trainer
from megamem.training.phases import samples_after
from tokenization.tokenizer import Tokenizer

T = TypeVar("T")


def on_rank_0(work: Callable[[], T], group: ProcessGroup) -> T:
    """Do `work` on rank 0 and return its result on all ranks; a MegamemError there is raised on all."""
    shared: list[object] = [None, None]
    if group.rank() == 0:
        try:
            shared[0] = work()
        except MegamemError as error:
            shared[1] = error
        except Exception as error:
            # a defect or a failing disk: no rank should wait for rank 0
            shared[1] = MegamemError(f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(shared, group_src=0, group=group)
    result, raised = shared
    if isinstance(raised, MegamemError):
        raise raised
    return result  # type: ignore[return-value]  # what rank 0's `work` returned, pickled and read again


def check_folder_everywhere(config: RunConfig, group: ProcessGroup) -> None:
    """Check that every rank can write checkpoints where `checkpoint.folder` says, if it does.

    A collective call of all ranks of `group`. Raises StoreError or CheckpointError with the first rank that cannot, and
    why; see `check_folder`.
    """
    if config.checkpoint.folder is None:
        return
    error = None
    try:
        check_folder(run_checkpoints(config))
    except (CheckpointError, StoreError) as caught:
        error = type(caught)(f"rank {group.rank()} on {platform.node()}: {caught}")
    all_agree(error, group)


def resume_point(config: RunConfig, facts: RunFacts, group: ProcessGroup) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that this run resumes from, and lines about those that were skipped.

    Rank 0 chooses and verifies it for all ranks.

    Args:
        config: the run.
        facts: what `run_facts` returns for it.
        group: all ranks.

    Raises:
        CheckpointError: there are checkpoints and none can be used, or the chosen one is of another run; on all ranks.
    """

    def chosen() -> tuple[Checkpoint | None, list[str]]:
        checkpoint, skipped = choose_checkpoint(config.checkpoint, run_checkpoints(config))
        if checkpoint is not None:
            saved = checkpoint.run()
            check_identity(checkpoint, saved, facts)
            check_weights(config, checkpoint, saved)
        elif config.origin is not None:
            raise CheckpointError(
                f"{config.run_folder}: a branch of {config.origin.run} at step {config.origin.step}, but it has no "
                "checkpoint to begin with; make it again with megamem branch"
            )
        elif config.training.init_from is not None:
            check_start(config, facts.get("vocabulary_sha256"))
        return checkpoint, skipped

    return on_rank_0(chosen, group)


def placed_as_before(config: RunConfig, checkpoint: Checkpoint | None) -> RunConfig:
    """Return the configuration with layers on the stages they were measured to belong to when the run began.

    A second measurement may come out otherwise, and sums in another order are another run.
    """
    if checkpoint is None or config.parallel.placement != "measured":
        return config
    placement = tuple(checkpoint.run()["placement"])
    if len(placement) != config.parallel.pp:
        return config
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"placement": placement})})


def run_facts(config: RunConfig, data_fingerprints: Sequence[str], tokenizer: Tokenizer | None) -> RunFacts:
    """Return what every checkpoint of the run says in run.json besides its counters.

    data_fingerprints: of the data of each phase.
    """
    return {
        **run_identity(config, data_fingerprints, tokenizer.hash if tokenizer else None),
        "config": config.model_dump(mode="json"),
        "vocabulary_sha256": tokenizer.vocabulary_hash if tokenizer else None,
        "megamem": version("megamem"),
    }


def cpu_group(timeout_s: float) -> ProcessGroup:
    """Make a group of all ranks on gloo that nobody else uses. All ranks must call it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, ProcessGroup)
    return group


class Checkpoints(Callback):
    """Saves a checkpoint every so many steps or minutes, and at the end. The last of a run's callbacks."""

    def __init__(
        self,
        engine: TrainingEngine,
        saver: Saver,
        facts: RunFacts,
        bad_steps: BadSteps,
        last_validation: Callable[[], tuple[int, float] | None],
    ) -> None:
        """Describe what is saved.

        Args:
            engine: holds weights, moments and memory states.
            saver: writes them.
            facts: what `run_facts` returns for the run.
            bad_steps: counts that are saved with them.
            last_validation: gives step and loss of the last validation, if there was one.
        """
        self.engine, self.saver, self.facts = engine, saver, facts
        self.bad_steps, self.last_validation = bad_steps, last_validation
        self.saved = 0
        """Step of the last checkpoint, or the one the run resumed from."""

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        trainer.saver = self.saver
        self.saved = trainer.step
        self._since = time.monotonic()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`."""
        config = trainer.config.checkpoint
        periodic = config.every and trainer.step % config.every == 0
        if periodic or trainer.step in config.keep_steps or trainer.save_due:
            with trainer.pause(f"checkpoint after step {trainer.step}"):
                self._save(trainer, wait=False)
        # ranks agree on this after the step, and all save after the next one
        trainer.save_due = config.minutes is not None and time.monotonic() - self._since > 60 * config.minutes

    def finish(self, trainer: Trainer) -> None:
        """See `Callback.finish`."""
        if self.saved != trainer.step:
            self._save(trainer, wait=True)
        self.saver.wait(trainer.watch)
        self.saver.release()

    def _save(self, trainer: Trainer, wait: bool) -> None:
        """Save a checkpoint. wait: return once it is complete."""
        topology, engine, step = self.engine.topology, self.engine, trainer.step
        tensors = all_fragments(engine)
        last = self.last_validation()
        run: SavedRun = {
            "step": step,
            "tokens": trainer.tokens,
            "samples": samples_after(trainer.phases, step),
            "optimizer_steps": optimizer_steps(engine),
            "bad_steps": self.bad_steps.counts(),
            "val_loss": last[1] if last is not None and last[0] == step else None,
            "layout": {"pp": topology.pp_size, "dp": topology.dp_size, "tp": topology.tp_size},
            "placement": [len(layers) for layers in engine.placement],
            **self.facts,
        }
        self.saver.save(step, tensors, run, wait, trainer.watch)
        self.saved, self._since = step, time.monotonic()


def resume(trainer: Trainer, checkpoint: Checkpoint, bad_steps: BadSteps, group: ProcessGroup) -> None:
    """Put a run where a checkpoint was saved. A collective call of all ranks of `group`.

    Raises CheckpointError: the checkpoint is damaged or does not fit.
    """
    try:
        run = load_training_state(trainer.engine, checkpoint, group)
    except DamagedError as error:
        if trainer.config.checkpoint.resume != "auto":
            raise
        raise DamagedError(f"{error}; --fallback goes on from the newest undamaged one") from None
    trainer.go_on(run["step"], run["tokens"])
    bad_steps.set_counts(run["bad_steps"])
