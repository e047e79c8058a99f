"""Whether a run fits into its devices, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable

from megamem.config.run import RunConfig
from megamem.errors import LayoutError
from megamem.pipeline.balancing import place
from megamem.planning.activations import Activations
from megamem.planning.auto import least
from megamem.planning.machines import Machine
from megamem.planning.plan import RankReport, rank_reports
from megamem.planning.search import DP, LAYOUT_FIELDS, SEARCHED, WINDOW, Candidate, Search
from megamem.planning.show import GIB
from megamem.planning.step_time import Layout

REMEDIES = 2
"""Number of changes that are named."""
_PARTS = {
    "weights": "weights",
    "optimizer": "optimizer states",
    "gradients": "sums of gradients",
    "in_flight": "activations kept for the backward",
    "working": "the chunk at work (its activations, logits and gradients)",
    "states": "memory states",
    "borders": "hidden chunks between stages",
    "gathered": "weights gathered by ZeRO 3",
}


def check_memory(config: RunConfig, dp_size: int, machine: Machine, activations: Activations | None = None) -> None:
    """Compare the plan of the fullest rank with what its device holds.

    Args:
        dp_size: data-parallel ranks.
        activations: measurements of this model's activations at this precision, where there are some already.

    Raises: LayoutError with the bytes, their largest part and the changes that cost least time, if it does not fit.
    """
    activations = activations or Activations.of_run(config, device=machine.kind)
    ranks = rank_reports(Layout(config, dp_size, tuple(place(config))), activations)
    fullest = max(ranks, key=lambda rank: rank.total)
    if fullest.total <= machine.usable:
        return
    part, size = largest_part(fullest)
    stage = f" (stage {fullest.stage})" if len(ranks) > 1 else ""
    raise LayoutError(
        f"{config.name} does not fit: the fullest rank{stage} needs {fullest.total / GIB:.1f} GiB, "
        f"{size / GIB:.1f} GiB of it {part}, and {machine.name} has {machine.usable / GIB:.1f} GiB to use; "
        f"{_advice(config, dp_size, machine, activations)}; parallel.check_memory=false starts anyway"
    )


def largest_part(rank: RankReport) -> tuple[str, float]:
    """Return what most of a rank's bytes are, in words, and how many."""
    if rank.building >= rank.total:
        return "the whole model in FP32 while DeepSpeed divides it", rank.building
    sizes = rank.to_dict()
    found = {words: float(str(sizes[name])) for name, words in _PARTS.items()}
    return max(found.items(), key=lambda item: item[1])


def _advice(config: RunConfig, dp_size: int, machine: Machine, activations: Activations) -> str:
    """Return the cheapest remedies in words: each planned, ordered by the time of a step."""
    devices = dp_size * config.parallel.tp * config.parallel.pp
    # one change first; shorter windows cut gradients through memory, so that they come last
    found: list[Candidate] = []
    for fields in ((field,) for field in (*LAYOUT_FIELDS, WINDOW)):
        found += Search(config, devices, machine, activations=activations, fields=(*fields, DP)).run(top=1).best
    found.sort(key=lambda candidate: (-candidate.layout.config.bptt_chunks, candidate.time.total))
    if len(found) < REMEDIES:
        search = Search(config, devices, machine, activations=activations, fields=[*LAYOUT_FIELDS, DP])
        found += search.run(top=REMEDIES).best
    if not found:
        search = Search(config, devices, machine, activations=activations, fields=SEARCHED)
        best = search.run(top=REMEDIES)
        found = best.best
        if not found:
            return least(best.smallest, search)
    remedies = dict.fromkeys(_remedy(config, candidate) for candidate in found)
    return f"cheapest remedies: {' or '.join(list(remedies)[:REMEDIES])}"


def _remedy(config: RunConfig, candidate: Candidate) -> str:
    """Return what a layout changes of the run, as overrides, and what it takes."""
    changed = candidate.layout.config
    overrides = " ".join(_changes(config, changed))
    return f"{overrides} ({candidate.total / GIB:.1f} GiB, {candidate.time.total:.2f} s a step)"


def _changes(config: RunConfig, changed: RunConfig) -> Iterable[str]:
    """Yield overrides for fields that differ."""
    fields = [field for field in SEARCHED if field != DP or config.parallel.dp is not None]
    for field in fields:
        section, _, name = field.partition(".")
        before, after = (getattr(getattr(run, section), name) for run in (config, changed))
        if field == WINDOW:
            before, after = config.bptt_chunks, changed.bptt_chunks
        if before != after:
            yield f"{field}={str(after).lower()}"
