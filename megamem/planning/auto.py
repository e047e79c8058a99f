"""What the planner chooses for the fields of a run that are given as `auto` (`megamem.config.auto`)."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megamem.config.auto import value_at
from megamem.config.run import RunConfig
from megamem.errors import LayoutError
from megamem.planning.activations import Activations
from megamem.planning.machines import Machine, machine
from megamem.planning.search import ORDER, Candidate, Search
from megamem.planning.show import GIB, layout_overrides
from megamem.planning.step_time import Layout

KEPT_FREE = 0.05
"""Share of a device's usable bytes that a chosen layout leaves, as plans are not exact."""


def is_open(config: RunConfig, devices: int) -> bool:
    """Return whether fields of the run are still to be chosen for so many devices."""
    return bool(config.auto.fields) and config.auto.devices != devices


def resolve_auto(
    config: RunConfig,
    devices: int,
    machine: Machine,
    activations: Activations | None = None,
    must_fit: bool = True,
) -> RunConfig:
    """Return the run with numbers in the place of `auto`, which depend on nothing but the arguments.

    Of the layouts that fit and are predicted to be about as fast as the fastest, the simplest is taken: fewest stages,
    tensor-parallel ranks and ZeRO stages, least computed again, most rows of a micro-batch. Its windows are read layer
    by layer if the order is open, they can be, and it is predicted to take no longer then. Of a run in phases the one
    with the longest sequences decides, among layouts into which the batches of all divide.

    Args:
        devices: ranks of the whole job.
        activations: measurements of this model's activations at this precision, where there are some already.
        must_fit: refuse a run that fits in no layout, instead of giving it the one that needs the fewest bytes.

    Raises: LayoutError if no layout divides model and batch, or none fits.
    """
    if not is_open(config, devices):
        return config
    config = _by_chunk(config)
    roomy = machine.model_copy(update={"reserve": machine.reserve + KEPT_FREE * machine.usable})
    longest = max(config.phases, key=lambda phase: phase.data.sequence_length)
    activations = activations and activations.of_phase(longest)
    search = _search(config, longest, devices, roomy, activations)
    found = search.simplest()
    if ORDER in config.auto.fields and (chunks := found or search.smallest) is not None:
        layers = search.by_layer(chunks)
        if layers is not None and (found is None or layers.time.total <= found.time.total):
            found = layers
    found = found or (None if must_fit else search.smallest)
    if found is None:
        raise LayoutError(f"{', '.join(config.auto.fields)}: auto, but {_why(config, search)}")
    return _chosen(config, found.layout.config, devices)


def resolve_for(config: RunConfig, devices: int | None, kind: str, activations: Activations | None = None) -> RunConfig:
    """Return `resolve_auto` for devices of a kind (see `machine`); as many as configured if their number is not given.

    Raises: ConfigError for an unknown kind, or as `resolve_auto`.
    """
    parallel = config.parallel
    devices = devices or config.auto.devices or parallel.tp * parallel.pp * (parallel.dp or 1)
    return resolve_auto(config, devices, machine(kind, devices), activations)


def divided(config: RunConfig, devices: int) -> RunConfig:
    """Return the run in any layout that divides model and batch; whether it fits is not asked.

    Raises: LayoutError if there is none.
    """
    if not is_open(config, devices):
        return config
    config = _by_chunk(config)
    search = _search(config, config, devices, machine("h100", devices))
    layout = next(filter(search.valid, search.layouts()), None)
    if layout is None:
        raise LayoutError(f"{', '.join(config.auto.fields)}: auto, but {_why(config, search)}")
    return _chosen(config, layout.config, devices)


def chosen_before(config: RunConfig, saved: RunConfig, devices: int) -> RunConfig | None:
    """Return the run with the values that `saved` holds, if these were chosen for the same on as many devices."""
    if saved.auto != config.auto.model_copy(update={"devices": devices}):
        return None
    try:
        found = _chosen(config, saved, devices)
    except ValidationError:
        return None  # the batch or the model is another one now
    same = all(getattr(found, section) == getattr(saved, section) for section in ("model", "data", "parallel"))
    lengths = ("batch_tokens", "bptt_chunks", "window_order", "precision")
    same = same and all(getattr(found.training, name) == getattr(saved.training, name) for name in lengths)
    return found if same else None


def _by_chunk(config: RunConfig) -> RunConfig:
    """Return the run with windows by chunk where their order is open: one that was chosen before allows no pipeline."""
    if ORDER not in config.auto.fields:
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"window_order": "chunks"})})


def _chosen(config: RunConfig, layout: RunConfig, devices: int) -> RunConfig:
    """Return `config` with its `auto` fields as `layout` has them."""
    tree: dict[str, Any] = config.model_dump()
    for field in config.auto.fields:
        section, _, name = field.partition(".")
        tree[section][name] = value_at(layout, field)
    tree["auto"] = {"fields": config.auto.fields, "devices": devices}
    return RunConfig.model_validate(tree)


def _search(
    config: RunConfig, part: RunConfig, devices: int, machine: Machine, activations: Activations | None = None
) -> Search:
    """Return a search over the `auto` fields of a run, by the bytes and the time of `part` of it: a phase, or all."""

    def divides_phases(layout: Layout) -> bool:
        if not config.training.phases:
            return True
        try:
            whole = _chosen(config, layout.config, devices)
            for phase in whole.phases:
                phase.accumulation_steps(layout.dp_size)
        except ValueError:
            return False
        return True

    fields = config.auto.fields
    return Search(part, devices, machine, activations=activations, fields=fields, accept=divides_phases)


def _why(config: RunConfig, search: Search) -> str:
    """Return why a search has found nothing for a run."""
    devices = search.devices
    if not search.tried:
        rows = " and ".join(dict.fromkeys(str(phase.global_rows) for phase in config.phases))
        return (
            f"no layout divides the model and the {rows} sequences of a step (training.batch_tokens) on "
            f"{devices} devices; use another number of devices or another batch"
        )
    return f"no layout fits into {devices} x {search.machine.name}: {least(search.smallest, search)}"


def least(smallest: Candidate | None, search: Search) -> str:
    """Return the line about the layout that needs the fewest bytes of those that were tried."""
    assert smallest is not None  # it is the first that was tried and did not fit
    return (
        f"of {search.tried} that were tried, {layout_overrides(smallest)} needs least, {smallest.total / GIB:.1f} GiB "
        f"where {search.machine.usable / GIB:.1f} GiB may be used; take more devices or a smaller model.chunk_size"
    )
