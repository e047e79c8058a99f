"""How a run resumes: which checkpoint it takes, whether that fits, and its tensors back into memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError
from safetensors import safe_open
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from checkpoints.folder import Checkpoint, begun_from, checkpoints_in, open_checkpoint
from checkpoints.fragments import Fragments, LoadPlanner, region
from checkpoints.location import Location
from checkpoints.records import PhaseIdentity, RunIdentity, SavedRun, TensorEntry
from checkpoints.states import Lanes
from checkpoints.storage import SafeReader, read_index
from checkpoints.training_state import (
    as_fragments,
    optimizer_fragments,
    random_states,
    set_optimizer_steps,
    set_random_states,
    spike_fragments,
    update_model_weights,
)
from checkpoints.verify import verify
from megamem.config.checkpoint import CheckpointConfig
from megamem.config.kernels import KernelsConfig
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, MegamemError
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.start_weights import shown_files, weight_sources


def choose_checkpoint(config: CheckpointConfig, folder: Location) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to resume from, None for a fresh start, and lines about those that were skipped.

    Args:
        config: says how a run starts.
        folder: holds the run's own checkpoints.

    Raises:
        CheckpointError: `folder` holds checkpoints but none can be used, or the newest is damaged and fallback is off.
    """
    if config.resume == "none":
        return None, []
    if config.resume != "auto" and not begun_from(folder, config.resume):
        chosen = open_checkpoint(config.resume)
        verify(chosen, skip_extents=True)
        return chosen, []
    found = checkpoints_in(folder)
    usable = [c for c in found if c.complete]
    if not usable:
        if found:
            raise CheckpointError(
                f"{folder}: holds {len(found)} checkpoint(s), but none was written to its end "
                f"(newest: {found[-1].path.name}); remove them or give another `name` to start afresh"
            )
        return None, []
    skipped = []
    for checkpoint in reversed(usable):
        try:
            # extents are checked when they are read; to take another checkpoint instead, it must be known before
            verify(checkpoint, skip_extents=not config.fallback)
        except CheckpointError as error:
            if not config.fallback:
                raise CheckpointError(f"{error}; --fallback goes on from the newest undamaged one") from None
            skipped.append(f"skipped {checkpoint.path.name}: {error}")
            continue
        return checkpoint, skipped
    raise CheckpointError(f"{folder}: all {len(usable)} checkpoints are damaged; the newest: {skipped[0]}")


MUST_AGREE = ("model", "data_fingerprint", "tokenizer_sha256", "batch_tokens", "sequence_length", "phases")
"""Parts of run.json that a run cannot change, as the meaning of all others depends on them."""


def run_identity(config: RunConfig, data_fingerprints: Sequence[str], tokenizer_sha256: str | None) -> RunIdentity:
    """Return what makes a checkpoint one of this run. data_fingerprints: of the data of each phase."""
    phases = [
        PhaseIdentity(
            first_step=step,
            data_fingerprint=fingerprint,
            batch_tokens=phase.training.batch_tokens,
            sequence_length=phase.data.sequence_length,
        )
        for step, phase, fingerprint in zip(config.phase_starts, config.phases, data_fingerprints, strict=True)
    ]
    return {
        "model": _trained_part(config.model.model_dump(mode="json")),
        "data_fingerprint": data_fingerprints[0],
        "tokenizer_sha256": tokenizer_sha256,
        "batch_tokens": config.training.batch_tokens,
        "sequence_length": config.data.sequence_length,
        "phases": phases[1:],
    }


def check_identity(checkpoint: Checkpoint, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError naming the first field of the run that is not that of the checkpoint.

    Args:
        checkpoint: for the message.
        saved: what its run.json says.
        now: the same of the run that would resume.
    """
    before = {**saved, "model": _trained_part(saved.get("model")), "phases": _begun(checkpoint, saved)}
    now = {**now, "phases": _begun(checkpoint, now)}
    for name in MUST_AGREE:
        if difference := _difference(name, before.get(name), now[name]):
            raise CheckpointError(
                f"{checkpoint.path}: {difference}; a run cannot go on with another (its weights alone: "
                "megamem checkpoint merge, then megamem start-from)"
            )


def check_weights(config: RunConfig, checkpoint: Checkpoint, saved: SavedRun) -> None:
    """Raise CheckpointError for a run that wants to start from, or to train, other weights than the saved one."""
    files = config.training.init_from
    wanted = config.training.model_dump(mode="json")["init_from"]
    begun_with = saved["config"]["training"].get("init_from")
    froze = saved["config"]["training"].get("freeze")
    if config.training.freeze != froze:
        raise CheckpointError(
            f"{checkpoint.path}: training.freeze was {froze} and is {config.training.freeze}; a run cannot go on with "
            "other parameters learning (its weights alone: megamem checkpoint merge, then megamem start-from)"
        )
    if config.checkpoint.resume == "auto" and wanted is not None and wanted != begun_with:
        raise CheckpointError(
            f"{checkpoint.path}: the run did not start from training.init_from {shown_files(files)}; choose another "
            "`name` to start a new one"
        )


def _begun(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> dict[str, PhaseIdentity]:
    """Return the phases that had begun at a checkpoint; those that come later may still change."""
    return {
        f"after_step_{phase['first_step']}": phase
        for phase in identity.get("phases", [])
        if phase["first_step"] < checkpoint.step
    }


def _trained_part(model: object) -> dict[str, Any]:
    """Return the part of a model's configuration that its weights and states depend on.

    Fields that came with a later version have their defaults. How attention and recurrences are computed and what the
    weights once were drawn from may change between two parts of a run.
    """
    # a configuration of another version, which may not be valid now, is compared as it stands
    with contextlib.suppress(ValidationError):
        model = ModelConfig.model_validate(model).model_dump(mode="json")
    free = {*KernelsConfig.model_fields, "init_std"}
    return {key: value for key, value in model.items() if key not in free} if isinstance(model, dict) else {}


def _difference(name: str, saved: object, now: object) -> str | None:
    """Return the first difference between two trees of plain data, in words; None if they are equal."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted({*saved, *now}):
            if found := _difference(f"{name}.{key}", saved.get(key), now.get(key)):
                return found
        return None
    return None if saved == now else f"{name} was {saved!r} and is {now!r}"


def load_initial_weights(engine: TrainingEngine, group: ProcessGroup) -> None:
    """Load weights, and nothing else, from the files that `training.init_from` names: whole tensors by global name.

    A run leaves such a file at its end. Parameters that no file holds keep their initial values. A collective call of
    all ranks of `group`.

    Raises:
        CheckpointError: a file cannot be read or is of another model; the message names file and tensor.
    """
    error, sources = None, {}
    try:
        sources = weight_sources(engine.config)
    except CheckpointError as found:
        error = str(found)
    all_agree(error, group)
    with contextlib.ExitStack() as stack:
        paths = {path for path, _ in sources.values()}
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
        for key, fragments in optimizer_fragments(engine).items():
            kind, name = key.split("/", 1)
            for piece in fragments.pieces if kind == "master" and name in sources else []:
                path, their = sources[name]
                piece.tensor.copy_(files[path].get_slice(their)[region(piece.offsets, piece.tensor.shape)])
    update_model_weights(engine)


def _mismatch(checkpoint: Checkpoint, index: Mapping[str, TensorEntry], tensors: Mapping[str, Fragments]) -> str | None:
    """Return which of `tensors` a checkpoint lacks or has in another shape; None if it has them all."""
    for name, fragments in tensors.items():
        if name not in index:
            return f"{checkpoint.path}: {name} is missing; the checkpoint belongs to another model"
        if any(piece.tensor.is_floating_point() != _is_float(index[name]) for piece in fragments.pieces):
            return f"{checkpoint.path}: {name} is {index[name]['dtype']}, which the run's is not"
        if list(fragments.shape) != index[name]["shape"]:
            return f"{checkpoint.path}: {name} has shape {index[name]['shape']}, the run {list(fragments.shape)}"
    return None


def _is_float(entry: TensorEntry) -> bool:
    """Return whether a tensor of an index holds floating-point numbers."""
    return "float" in entry["dtype"]


def all_agree(error: MegamemError | str | None, group: ProcessGroup) -> None:
    """Raise the error of one rank on all ranks; a line becomes a CheckpointError."""
    errors: list[MegamemError | str | None] = [None] * group.size()
    dist.all_gather_object(errors, error, group=group)
    if found := next((error for error in errors if error), None):
        raise CheckpointError(found) if isinstance(found, str) else found


def load_training_state(engine: TrainingEngine, checkpoint: Checkpoint, group: ProcessGroup) -> SavedRun:
    """Put weights, moments, memory states and random generators back, whatever layout saved them.

    A collective call of all ranks of `group`.

    Returns:
        The contents of run.json.

    Raises:
        CheckpointError: a tensor is missing or of another shape; the message names it.
    """
    index, run, lanes = read_index(checkpoint.path), checkpoint.run(), Lanes.of(engine)
    carried = lanes.empty(set(index))
    generators = {name: state for name, state in random_states(engine.topology).items() if name in index}
    # a run that has just begun to look for spikes, or in another window, begins with an empty one
    spikes = {
        name: found
        for name, found in spike_fragments(engine).items()
        if name in index and list(found.shape) == index[name]["shape"]
    }
    tensors = {**optimizer_fragments(engine), **lanes.fragments(carried), **as_fragments(generators), **spikes}
    all_agree(_mismatch(checkpoint, index, tensors), group)
    read_tensors(checkpoint.path, tensors, group)
    set_optimizer_steps(engine, run["optimizer_steps"])
    update_model_weights(engine)
    set_random_states(engine.topology, generators)
    lanes.drop_padding(carried, tensors)
    engine.carried = carried
    dist.barrier(group=group)
    return run


def read_tensors(folder: Location, tensors: Mapping[str, Fragments], group: ProcessGroup) -> None:
    """Fill this rank's fragments from a checkpoint that has them all. A collective call of all ranks of `group`.

    Raises:
        DamagedError: a file is not as it was written.
        CheckpointError: a file cannot be read; the message has the cause.
    """
    try:
        state_dict_loader.load(
            dict(tensors), storage_reader=SafeReader(folder), planner=LoadPlanner(), process_group=group
        )
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise CheckpointError(f"{folder}: {' '.join(str(cause).split())}") from error
