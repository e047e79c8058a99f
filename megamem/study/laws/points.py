"""The points that a law is fitted to, from a study's records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megamem.study.collect import Record, curve, training_figures
from megamem.study.config import EVALUATION, SEED, TRAINED, LawConfig, StudyConfig, matches
from megamem.study.grid import PlannedRun
from megamem.study.laws.fit import FitError


def points(study: StudyConfig, law: LawConfig, runs: Sequence[PlannedRun], found: Sequence[Record]) -> list[Record]:
    """Return the records that the law is about: of finished runs, or of each validation as if the run had ended there.

    A validation's record is that of its run with `training_tokens`, `training_flops` and the figure as they were then.

    Raises: FitError without a point.
    """
    where = dict(law.where)
    if EVALUATION not in where and law.per != EVALUATION:
        where[EVALUATION] = (TRAINED,)
    chosen = [record for record in found if matches(where, record.labels)]
    if law.points == "validation":
        planned = {run.name: run for run in runs}
        chosen = [point for record in chosen for point in _validations(planned[record.run], record, law.figure)]
    elif chosen and not any(law.figure in record.figures for record in chosen):
        raise FitError(f"{law.figure!r} is not among a run's figures")
    kept = [record for record in chosen if law.figure in record.figures]
    if not kept:
        source = f"line with {law.figure!r} in metrics.jsonl" if law.points == "validation" else "record"
        raise FitError(f"no {source} of a finished run yet")
    return kept


def _validations(run: PlannedRun, record: Record, figure: str) -> Iterable[Record]:
    """Return a record for each validation of a run, from `record` of its end."""
    for tokens, value in curve(run, figure).items():
        then = {**training_figures(run.config, tokens, record.figures["training_tokens"]), figure: value}
        yield replace(record, figures={**record.figures, **then})


def grouped(law: LawConfig, kept: Sequence[Record]) -> dict[str, list[Record]]:
    """Return points by the value of `per`; all under an empty name without it."""
    groups: dict[str, list[Record]] = {}
    for record in kept:
        groups.setdefault(record.labels[law.per] if law.per else "", []).append(record)
    return groups


def variable(record: Record, name: str) -> float:
    """Return a figure, or the value of an axis whose values are numbers. Raises FitError without either."""
    row = record.row
    if name not in row:
        raise FitError(f"x: {name!r} is neither an axis nor among a run's figures")
    return float(str(row[name]))


def check_distinct(study: StudyConfig, law: LawConfig, group: Sequence[Record]) -> None:
    """Raise FitError where points with the same x differ in more than their seed: the law has no place for it."""
    seen: dict[tuple[float, ...], Record] = {}
    for record in group:
        tokens = [record.figures["training_tokens"]] if law.kind == "iso_flop" else []
        at = (*(variable(record, name) for name in law.x), *tokens)
        other = seen.setdefault(at, record)
        for axis in (*study.axes, EVALUATION):
            if axis not in (law.per, *law.x) and record.labels[axis] != other.labels[axis]:
                raise FitError(
                    f"{axis} {other.labels[axis]} and {record.labels[axis]} have the same {', '.join(law.x)}; make it "
                    f"`per`, or choose one under where.{axis}"
                )


def mixing_note(study: StudyConfig, law: LawConfig, group: Sequence[Record]) -> str:
    """Return a note on points that differ in several axes which neither `per` nor x names; empty if in fewer."""
    values = {
        axis: list(dict.fromkeys(record.labels[axis] for record in group))
        for axis in (*study.axes, EVALUATION)
        if axis not in (law.per, *law.x)
    }
    varied = [f"{axis} ({', '.join(found)})" for axis, found in values.items() if len(found) > 1]
    if len(varied) < 2:
        return ""
    return f"one law through {' and '.join(varied)}; where their laws may differ make one `per`, or choose under where"


def row_labels(study: StudyConfig, law: LawConfig, record: Record) -> dict[str, str]:
    """Return the labels that tell the rows of `tokens_to_loss` apart: all but `per`, `axis` and the seed."""
    return {axis: record.labels[axis] for axis in study.axes if axis not in (law.per, law.axis)}


def loss_curves(law: LawConfig, group: Sequence[Record]) -> dict[str, dict[float, float]]:
    """Return loss by tokens for each seed. Raises FitError where two evaluations give a seed two losses."""
    found: dict[str, dict[float, float]] = {}
    evaluations: dict[tuple[str, float], str] = {}
    for record in group:
        seed, tokens = record.labels[SEED], record.figures["training_tokens"]
        if (first := evaluations.setdefault((seed, tokens), record.evaluation)) != record.evaluation:
            raise FitError(
                f"seed {seed} has two figures after {tokens:,.0f} tokens, of the evaluations "
                f"{first} and {record.evaluation}; choose one under where.{EVALUATION}"
            )
        found.setdefault(seed, {})[tokens] = record.figures[law.figure]
    return found
