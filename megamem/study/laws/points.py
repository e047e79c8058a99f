"""From a study's records to the points that a law is fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megamem.study.collect import RUN, Record, curve, training_flops
from megamem.study.config import READING, SEED, TRAINED, LawConfig, StudyConfig, matches
from megamem.study.grid import PlannedRun
from megamem.study.laws.fit import FitError


def points(study: StudyConfig, law: LawConfig, runs: Sequence[PlannedRun], found: Sequence[Record]) -> list[Record]:
    """The records that the law is about: of finished runs, or of each validation as if the run had ended there.

    A validation's record is that of its run with `training_tokens`, `training_flops` and the figure as they were then.
    Raises: FitError without a point.
    """
    where = dict(law.where)
    if READING not in where and law.per != READING:
        where[READING] = (TRAINED,)
    chosen = [record for record in found if matches(where, record)]
    if law.points == "validation":
        planned = {run.name: run for run in runs}
        chosen = [point for record in chosen for point in _validations(planned[record[RUN]], record, law.figure)]
    elif chosen and not any(law.figure in record for record in chosen):
        raise FitError(f"{law.figure!r} is not among a run's figures")
    kept = [record for record in chosen if law.figure in record]
    if not kept:
        source = f"line with {law.figure!r} in metrics.jsonl" if law.points == "validation" else "record"
        raise FitError(f"no {source} of a finished run yet")
    return kept


def _validations(run: PlannedRun, record: Record, figure: str) -> Iterable[Record]:
    flops = training_flops(run.config)
    for tokens, value in curve(run, figure).items():
        yield {**record, "training_tokens": tokens, "training_flops": tokens * flops, figure: value}


def grouped(law: LawConfig, kept: Sequence[Record]) -> dict[str, list[Record]]:
    """Points by the value of `per`; all under an empty name without it."""
    groups: dict[str, list[Record]] = {}
    for record in kept:
        groups.setdefault(record[law.per] if law.per else "", []).append(record)
    return groups


def variable(record: Mapping[str, object], name: str) -> float:
    """A figure, or an axis whose values are numbers. Raises FitError where the record has neither."""
    if name not in record:
        raise FitError(f"x: {name!r} is neither an axis nor among a run's figures")
    return float(str(record[name]))


def distinct(study: StudyConfig, law: LawConfig, group: Sequence[Record]) -> None:
    """Raise FitError where points with the same x differ in more than their seed: the law has no place for it."""
    seen: dict[tuple[float, ...], Record] = {}
    for record in group:
        also = [record["training_tokens"]] if law.kind == "iso_flop" else []
        at = (*(variable(record, name) for name in law.x), *also)
        other = seen.setdefault(at, record)
        for axis in (*study.axes, READING):
            if axis not in (law.per, *law.x) and record[axis] != other[axis]:
                raise FitError(
                    f"{axis} {other[axis]} and {record[axis]} have the same {', '.join(law.x)}; make it `per`, or "
                    f"choose one under where.{axis}"
                )


def together(study: StudyConfig, law: LawConfig, group: Sequence[Record]) -> str:
    """What is to be said of points that differ in several axes which neither `per` nor x names; empty if in one."""
    values = {
        axis: list(dict.fromkeys(record[axis] for record in group))
        for axis in (*study.axes, READING)
        if axis not in (law.per, *law.x)
    }
    varied = [f"{axis} ({', '.join(found)})" for axis, found in values.items() if len(found) > 1]
    if len(varied) < 2:
        return ""
    return f"one law through {' and '.join(varied)}; where their laws may differ make one `per`, or choose under where"


def others(study: StudyConfig, law: LawConfig, record: Record) -> dict[str, str]:
    """A record's labels that tell the rows of `tokens_to_loss` apart: all but `per`, `axis` and the seed."""
    return {axis: record[axis] for axis in study.axes if axis not in (law.per, law.axis)}


def curves(law: LawConfig, group: Sequence[Record]) -> dict[str, dict[float, float]]:
    """Loss by tokens for each seed."""
    found: dict[str, dict[float, float]] = {}
    for record in group:
        found.setdefault(record[SEED], {})[record["training_tokens"]] = record[law.figure]
    return found
