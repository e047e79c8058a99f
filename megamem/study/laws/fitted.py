"""The laws of a study, fitted: rows, notes and plots. Where a law cannot be fitted, a note gives the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

import numpy as np

from megamem.study.collect import Record
from megamem.study.config import LawConfig, StudyConfig
from megamem.study.grid import PlannedRun, describe
from megamem.study.laws.budgets import BestSize, Parabola, at_once, best_size, loss_at, parabola, tokens_to
from megamem.study.laws.fit import Fit, FitError, fit_law
from megamem.study.laws.points import check_distinct, grouped, loss_curves, mixing_note, points, row_labels, variable
from megamem.study.plots import Plot, Series
from megamem.study.tables import axis_values

SAME_BUDGET = 1.1
"""Largest ratio between the training FLOPs of runs that count as one budget."""
SIZES = {"parameters", "non_embedding_parameters"}
"""Figures whose product with training tokens is proportional to compute."""
LINES = 10
"""Most curves that are drawn of a law of several variables."""
Sized = tuple[float, float, str]
"""Size, loss and name of a run at a budget."""


@dataclass
class LawResult:
    """The part of the report about one law."""

    config: LawConfig
    heads: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks, among them the reason why something could not be fitted."""
    plots: list[Plot] = field(default_factory=list)
    data: list[dict[str, object]] = field(default_factory=list)
    """The figures of the rows, for records.json."""

    def markdown(self) -> str:
        """Return title, table and notes in markdown."""
        lines = [f"| {' | '.join(cells)} |" for cells in [self.heads, *self.rows]]
        lines[1:1] = ["|---" * len(self.heads) + "|"]
        table = "\n".join(lines) + "\n\n" if self.rows else ""
        return f"### {self.config.title}\n\n{table}" + "".join(f"- {note}\n" for note in self.notes)


def fitted_laws(study: StudyConfig, runs: Sequence[PlannedRun], found: Sequence[Record]) -> list[LawResult]:
    """Return all of a study's laws, fitted to what has finished so far."""
    kinds = {"power": _power, "iso_flop": _iso_flop, "tokens_to_loss": _tokens_to_loss}
    results = []
    for law in study.laws:
        result = LawResult(law)
        try:
            kept = points(study, law, runs, found)
            kinds[law.kind](study, result, kept)
            result.notes += _decaying(law, runs, kept)
        except FitError as error:
            result.notes.append(f"not fitted: {error}")
        results.append(result)
    return results


def _decaying(law: LawConfig, runs: Sequence[PlannedRun], kept: Sequence[Record]) -> list[str]:
    """Return a note where validations are not what runs of that length would have reached."""
    names = {record.run for record in kept} if law.points == "validation" else set()
    decaying = sum(run.name in names and run.config.optimizer.min_lr_ratio < 1 for run in runs)
    cause = f"the learning rate of {decaying} of {len(names)} runs decays (optimizer.min_lr_ratio below 1)"
    return [f"{cause}: a run that ended at a validation would have had another loss"] if decaying else []


def _by_group(study: StudyConfig, law: LawConfig, kept: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records by the value of `per`, in the study's order."""
    groups = grouped(law, kept)
    order = axis_values(study, law.per) if law.per else [""]
    return {name: groups[name] for name in order if name in groups}


def _note(law: LawConfig, group: str, words: str) -> list[str]:
    """Return a note about a group as a list; an empty one if there are no words."""
    return [f"{law.per} {group}: {words}" if law.per else words] if words else []


# --- sums of powers ---


def _power(study: StudyConfig, result: LawResult, kept: Sequence[Record]) -> None:
    """Fit sums of powers to the records of each group: rows of constants with intervals, and plots of the curves."""
    law, fits = result.config, dict[str, tuple[Fit, list[Record]]]()
    # one law for each value of `per`; a group that cannot be fitted leaves a note
    for group, these in _by_group(study, law, kept).items():
        try:
            check_distinct(study, law, these)
            result.notes += _note(law, group, mixing_note(study, law, these))
            x = [[variable(record, name) for name in law.x] for record in these]
            losses, named = [record.figures[law.figure] for record in these], [record.run for record in these]
            fits[group] = fit_law(x, losses, law.x, named), these
        except FitError as error:
            result.notes += _note(law, group, f"not fitted: {error}")
    if not fits:
        return
    # compute is proportional to the product of parameters and tokens, and of nothing else
    best = f"best {law.x[0]} by compute"
    of_compute = len(law.x) == 2 and "training_tokens" in law.x and not SIZES.isdisjoint(law.x)
    columns: list[dict[str, str]] = []
    for group, (fit, _) in fits.items():
        if fit.undecided:
            names = " and ".join(fit.undecided)
            result.notes += _note(law, group, f"the losses do not decide the exponent of {names}")
        estimates = fit.estimates
        if of_compute and not fit.undecided:
            estimates[best] = fit.estimate(lambda law: law.exponents[1] / sum(law.exponents))
        columns.append({name: str(e) for name, e in estimates.items()})
        columns[-1] |= {"points": str(fit.points), "residual": f"{fit.residual:.2%}"}
        result.data.append(
            {"group": group, "points": fit.points, "residual": fit.residual}
            | {name: [e.value, e.low, e.high] for name, e in estimates.items()}
        )
    result.heads = [law.per or "", *(group or law.figure for group in fits)]
    most = max(columns, key=len)
    result.rows = [[name, *(column.get(name, "") for column in columns)] for name in most]
    terms = " + ".join(f"scale / {name}^exponent" for name in law.x)
    result.notes.insert(0, f"`{law.figure}` = floor + {terms}; 90 % intervals by bootstrap in brackets.")
    if best in most:
        result.notes.insert(
            1,
            f"Where compute is proportional to {law.x[0]} times {law.x[1]}, the best {law.x[0]} grows as compute to "
            f"the power under `{best}`.",
        )
    if len(law.x) == 1:
        series = [
            s for i, (group, (fit, these)) in enumerate(fits.items()) for s in _law_series(law, group, i, fit, these)
        ]
        result.plots.append(Plot(law.name, law.title, law.x[0], law.figure, tuple(series), log_x=True))
    else:
        result.plots += [_surface(law, group, fit, these) for group, (fit, these) in fits.items()]


def _law_series(law: LawConfig, group: str, number: int, fit: Fit, these: Sequence[Record]) -> list[Series]:
    """Return the points and the law through them with its band, over its only variable."""
    x = [variable(record, law.x[0]) for record in these]
    at = np.geomspace(min(x), max(x), 60)
    losses, low, high = (values.tolist() for values in fit.predict(at[:, None]))
    name = group or law.figure
    return [
        Series(name, at.tolist(), losses, number, low=low, high=high),
        _measured(law, these, x, name, number),
    ]


def _surface(law: LawConfig, group: str, fit: Fit, these: Sequence[Record]) -> Plot:
    """Return the plot of a law of several variables: the one with most values is the x axis, and each combination of
    the others has a curve."""
    x = np.array([[variable(record, name) for name in law.x] for record in these])
    across = int(np.argmax([len(np.unique(column)) for column in x.T]))
    rest = [i for i in range(len(law.x)) if i != across]
    combinations = [tuple(row) for row in np.unique(x[:, rest], axis=0)]
    combinations = combinations[:: -(-len(combinations) // LINES)]
    series = []
    for number, combination in enumerate(combinations):
        here = (x[:, rest] == combination).all(1)
        name = ", ".join(f"{law.x[i]} {_shown(value)}" for i, value in zip(rest, combination, strict=True))
        at = np.empty((60, len(law.x)))
        at[:, across] = np.geomspace(x[here, across].min(), x[here, across].max(), 60)
        at[:, rest] = combination
        losses, low, high = (values.tolist() for values in fit.predict(at))
        series.append(Series(name, at[:, across].tolist(), losses, number, low=low, high=high))
        mine = [record for record, chosen in zip(these, here, strict=True) if chosen]
        series.append(_measured(law, mine, x[here, across].tolist(), name, number))
    title = f"{law.title}: {law.per} {group}" if law.per else law.title
    name = f"{law.name}-{group}" if law.per else law.name
    return Plot(name, title, law.x[across], law.figure, tuple(series), log_x=True)


def _shown(value: float) -> str:
    """Return a value of a variable as text."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _measured(law: LawConfig, these: Sequence[Record], x: Sequence[float], name: str, number: int) -> Series:
    """Return the measured losses as points."""
    return Series(name, list(x), [record.figures[law.figure] for record in these], number, line=False, marks=True)


# --- the best size for a budget ---


def _iso_flop(study: StudyConfig, result: LawResult, kept: Sequence[Record]) -> None:
    """Fit parabolas of loss over log size at each budget, and a power law through their minima."""
    law = result.config
    growth: dict[str, tuple[list[Parabola], BestSize | None]] = {}
    # points by budget, a parabola at each budget, then the law through their minima
    for group, these in _by_group(study, law, kept).items():
        found = []
        try:
            check_distinct(study, law, these)
            result.notes += _note(law, group, mixing_note(study, law, these))
            budgets = _final_budgets(law, these) if law.axis else _interpolated(law, these)
        except FitError as error:
            result.notes += _note(law, group, f"not fitted: {error}")
            continue
        for budget, sized in budgets.items():
            try:
                found.append(parabola(budget, sized))
            except FitError as error:
                result.notes += _note(law, group, f"not fitted: {error}")
        law_of_size = None
        try:
            law_of_size = best_size(found)
            growing = f"best {law.x[0]} = {law_of_size.scale:.3g} x FLOPs^{law_of_size.exponent}"
            result.notes += _note(law, group, growing)
        except FitError as error:
            result.notes += _note(law, group, f"not fitted: {error}")
        growth[group] = found, law_of_size
    result.heads = [law.per or "law", "FLOPs", f"best {law.x[0]}", f"{law.figure} there", "points"]
    for group, (found, law_of_size) in growth.items():
        for one in found:
            result.rows.append(
                [
                    group or "all",
                    f"{one.budget:.3g}",
                    f"{one.best_size:,.0f}",
                    f"{one.best_loss:.4f}",
                    str(len(one.sizes)),
                ]
            )
            result.data.append({"group": group, "flops": one.budget, "best": one.best_size, "loss": one.best_loss})
        if law_of_size:
            e = law_of_size.exponent
            result.data.append({"group": group, "scale": law_of_size.scale, "exponent": [e.value, e.low, e.high]})
    result.plots += [_valleys(law, group, found) for group, (found, _) in growth.items() if found]
    if any(found for found, _ in growth.values()):
        result.plots.append(_growth(law, growth))


def _final_budgets(law: LawConfig, these: Sequence[Record]) -> dict[float, list[Sized]]:
    """Return size, loss and run by the budget in FLOPs, of runs whose value of `axis` names the budget."""
    assert law.axis is not None
    found: dict[float, list[Sized]] = {}
    for value in dict.fromkeys(record.labels[law.axis] for record in these):
        here = [record for record in these if record.labels[law.axis] == value]
        flops = [record.figures["training_flops"] for record in here]
        if max(flops) > SAME_BUDGET * min(flops):
            raise FitError(f"{law.axis} {value} is no budget: its runs took {min(flops):.3g} to {max(flops):.3g} FLOPs")
        found[mean(flops)] = [(variable(record, law.x[0]), record.figures[law.figure], record.run) for record in here]
    return dict(sorted(found.items()))


def _interpolated(law: LawConfig, these: Sequence[Record]) -> dict[float, list[Sized]]:
    """Return size, loss and run by the budget in FLOPs, of runs whose validations lie on both sides of it."""
    by_run: dict[str, dict[float, float]] = {}
    sizes = {record.run: variable(record, law.x[0]) for record in these}
    for record in these:
        by_run.setdefault(record.run, {})[record.figures["training_flops"]] = record.figures[law.figure]
    found = {}
    for budget in sorted(law.budgets):
        losses = {run: loss_at(budget, curve) for run, curve in by_run.items()}
        found[budget] = [(sizes[run], loss, run) for run, loss in losses.items() if loss is not None]
    return found


def _valleys(law: LawConfig, group: str, found: Sequence[Parabola]) -> Plot:
    """Return the plot of losses over sizes with the parabola of each budget."""
    series = []
    for number, one in enumerate(found):
        at, name = np.geomspace(min(one.sizes), max(one.sizes), 60), f"{one.budget:.3g} FLOPs"
        series.append(Series(name, list(one.sizes), list(one.losses), number, line=False, marks=True))
        series.append(Series(name, at.tolist(), one(at).tolist(), number))
    title = f"{law.title}: {law.per} {group}" if law.per else law.title
    name = f"{law.name}-{group}" if law.per else law.name
    return Plot(name, title, law.x[0], law.figure, tuple(series), log_x=True)


def _growth(law: LawConfig, growth: Mapping[str, tuple[Sequence[Parabola], BestSize | None]]) -> Plot:
    """Return the plot of the best size over the budget, with the law through it."""
    series = []
    for number, (group, (found, law_of_size)) in enumerate(growth.items()):
        budgets, name = [one.budget for one in found], group or law.x[0]
        series.append(Series(name, budgets, [one.best_size for one in found], number, line=False, marks=True))
        if law_of_size:
            series.append(Series(name, budgets, law_of_size(budgets).tolist(), number))
    title = f"{law.title}: best size by budget"
    return Plot(f"{law.name}-best", title, "training FLOPs", f"best {law.x[0]}", tuple(series), log_x=True, log_y=True)


# --- tokens that a loss takes ---


def _tokens_to_loss(study: StudyConfig, result: LawResult, kept: Sequence[Record]) -> None:
    """Read off the tokens that each value of `per` takes to a loss, and their ratios, seed by seed."""
    law = result.config
    assert law.per is not None
    places = {tuple(row_labels(study, law, record).items()): row_labels(study, law, record) for record in kept}
    values = list(_by_group(study, law, kept))
    compared = [value for value in values if law.against in values and value != law.against]
    result.heads = ["", "loss", *values, *(f"{value} / {law.against}" for value in compared)]
    # a row for each combination of the other axes
    for labels in places.values():
        here = [record for record in kept if row_labels(study, law, record) == labels]
        known = {value: loss_curves(law, these) for value, these in _by_group(study, law, here).items()}
        # the least loss that all of the curves reach
        least = max(min(curve.values()) for seeds in known.values() for curve in seeds.values())
        target = law.target or least
        taken = {
            value: {seed: tokens_to(target, curve) for seed, curve in seeds.items()} for value, seeds in known.items()
        }
        reached_at_once = {
            value: any(at_once(target, curve) for curve in seeds.values()) for value, seeds in known.items()
        }
        ratios = {value: _ratios(taken.get(value, {}), taken.get(law.against or "", {})) for value in compared}
        cells = [
            _bound(reached_at_once.get(v, False), False) + _spread(list(taken.get(v, {}).values()), ",.0f")
            for v in values
        ]
        # a ratio is a bound where either side was at the loss from its first point on
        for value in compared:
            sign = _bound(reached_at_once.get(value, False), reached_at_once.get(law.against or "", False))
            cells.append(sign + _spread(ratios[value], ".2f"))
        result.rows.append([describe(labels) or "all", f"{target:.4f}", *cells])
        at_most = [value for value, first in reached_at_once.items() if first]
        result.data.append({"labels": labels, "loss": target, "tokens": taken, "at_most": at_most, "ratios": ratios})
        name = "-".join([law.name, *labels.values()])
        result.plots.append(_curves_plot(law, name, describe(labels), target, known))
    result.notes.append(f"Training tokens until `{law.figure}` is at the loss, mean ± standard deviation over seeds.")
    if any(row["at_most"] for row in result.data):
        result.notes.append("≤, ≥, ?: a curve's first point is at the loss already; when it got there is not known.")


def _ratios(taken: Mapping[str, float | None], reference: Mapping[str, float | None]) -> list[float | None]:
    """Return the ratios seed by seed; None where one of the two never reached the loss."""
    pairs = [(tokens, reference[seed]) for seed, tokens in taken.items() if seed in reference]
    return [tokens / base if tokens and base else None for tokens, base in pairs]


def _bound(above: bool, below: bool) -> str:
    """Return the sign before a ratio whose numerator (`above`) or denominator (`below`) is only an upper bound."""
    return "? " if above and below else "≤ " if above else "≥ " if below else ""


def _spread(values: Sequence[float | None], form: str) -> str:
    """Return mean and standard deviation as text, with how many values are None. form: a format specification."""
    known = [value for value in values if value is not None]
    if not known:
        return "never" if values else ""
    text = f"{mean(known):{form}}" + (f" ± {stdev(known):{form}}" if len(known) > 1 else "")
    return text + (f" ({len(values) - len(known)} never)" if len(known) < len(values) else "")


def _curves_plot(
    law: LawConfig, name: str, where: str, target: float, known: Mapping[str, Mapping[str, Mapping[float, float]]]
) -> Plot:
    """Return the plot of the loss curves of all seeds, with the target as a line."""
    series = []
    for number, (value, seeds) in enumerate(known.items()):
        for curve in seeds.values():
            points = sorted(curve.items())
            series.append(Series(value, [x for x, _ in points], [y for _, y in points], number, marks=True))
    ends = [x for one in series for x in one.x]
    series.append(Series(f"loss {target:.4f}", [min(ends), max(ends)], [target, target], 8, dash="dash"))
    title = f"{law.title}: {where}" if where else law.title
    return Plot(name, title, "training tokens", law.figure, tuple(series), log_x=True)
