"""Where the time of a forward and backward pass goes, by part of the model.

Functions of the model are wrapped in `record_function` for the time of the measurement. A backward node belongs to the
part whose forward made it (torch gives both the same sequence number). Each part counts its own time only: what a
labelled call spends in another labelled call counts for the inner one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile, record_function

import megamem.ops.attention.merged as merged
import megamem.ops.attention.softmax as attention
from megamem.memory.shared.block_attention import AttentionProjections, BlockAttention
from megamem.model.mlp import SwiGLU
from megamem.model.norm import RMSNorm
from megamem.model.stage import Stage

PREFIX = "part: "
LOCAL, MEMORY, RETRIEVAL, UPDATE = "local attention", "memory attention", "memory retrieval", "memory update"
HOOKS = {"recall": RETRIEVAL, "mix": RETRIEVAL, "remember": UPDATE, "summarize": UPDATE}
"""Methods in which mechanisms read and write their memory."""
PARTS = (
    LOCAL, MEMORY, RETRIEVAL, UPDATE, "projections", "MLP", "head and loss", "norms", "rotary",
    "other",
)  # fmt: skip
_BACKWARD = "autograd::engine::evaluate_function: "


def _labelled(function: Callable[..., Any], part: str | Callable[..., str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + (part if isinstance(part, str) else part(*args))):
            return function(*args, **kwargs)

    return run


def _causal(*args: Any) -> str:
    """The merged kernels' last argument says whether a part is the causal one."""
    return LOCAL if args[-1] else MEMORY


@contextmanager
def labels(stage: Stage) -> Iterator[None]:
    """Parts of `stage` announce themselves to the profiler."""
    patches: list[tuple[Any, str, str | Callable[..., str]]] = [
        (merged, "_forward", _causal),
        (merged, "_backward", _causal),
        (attention, "merged_attention", MEMORY),
        (AttentionProjections, "project", "projections"),
        (SwiGLU, "forward", "MLP"),
        (RMSNorm, "forward", "norms"),
        (Stage, "token_losses", "head and loss"),
    ]
    kinds = {type(block.mixer) for block in stage.own_layers}
    patches += [
        (kind, name, part)
        for kind in kinds
        for name, part in HOOKS.items()
        if name in vars(kind) and vars(kind)[name] is not vars(BlockAttention).get(name)
    ]
    with ExitStack() as stack:
        for owner, name, part in patches:
            stack.enter_context(mock.patch.object(owner, name, _labelled(getattr(owner, name), part)))
        backends = {name: _labelled(kernel, LOCAL) for name, kernel in attention._BACKENDS.items()}
        stack.enter_context(mock.patch.dict(attention._BACKENDS, backends))
        for block in stage.own_layers:
            output, rotary = block.mixer.output, block.mixer.apply_rotary
            stack.enter_context(mock.patch.object(output, "forward", _labelled(output.forward, "projections")))
            stack.enter_context(mock.patch.object(block.mixer, "apply_rotary", _labelled(rotary, "rotary")))
        yield


def seconds_by_part(stage: Stage, run: Callable[[], object], passes: int = 3) -> dict[str, float]:
    """Seconds that the fastest of some `run`s of `stage` (forward and backward) spends in each of `PARTS`."""
    found = []
    for _ in range(passes):
        with labels(stage), profile(activities=[ProfilerActivity.CPU]) as trace, record_function(PREFIX + "other"):
            run()
        totals = _exclusive(trace.events())
        found.append({part: totals.get(part, 0.0) for part in PARTS})
    return min(found, key=lambda parts: sum(parts.values()))


def _exclusive(events: Any) -> Mapping[str, float]:
    """Own time of each labelled interval, summed by label, in seconds."""
    events = sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end))
    made_by: dict[int, str] = {}
    open_labels: list[tuple[float, str]] = []
    totals: dict[str, float] = defaultdict(float)
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        while open_labels and open_labels[-1][0] <= begin:
            open_labels.pop()
        label = None
        if event.name.startswith(PREFIX):
            label = event.name.removeprefix(PREFIX)
        elif event.name.startswith(_BACKWARD):
            label = made_by.get(event.sequence_nr, "other")
        elif event.sequence_nr >= 0 and open_labels and not event.name.endswith(("Backward", "Backward0")):
            made_by.setdefault(event.sequence_nr, open_labels[-1][1])
        if label is None:
            continue
        seconds = (end - begin) * 1e-6
        totals[label] += seconds
        if open_labels:
            totals[open_labels[-1][1]] -= seconds
        open_labels.append((end, label))
    return totals


def profile_table(columns: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Rows `part, share of each column's total`; parts that take no time anywhere are left out."""
    rows = []
    for part in PARTS:
        if any(column[part] > 0 for column in columns.values()):
            shares = (column[part] / sum(column.values()) for column in columns.values())
            rows.append([part, *(f"{share:.1%}" for share in shares)])
    return rows
