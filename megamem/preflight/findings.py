"""The findings of a preflight, from its record alone: pure functions, no process involved."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megamem.preflight.records import Link, RankFacts, Record

SLOW, VERY_SLOW = 0.8, 0.5
"""Shares of the median of all others below which a rank or link is a warning, and an error."""
LOW_DISK = 5 * 2**30
"""Free bytes below which a run's checkpoints and shards soon fill the disk."""
CLOCK_S = 1.0
"""Seconds of difference from which times in logs and heartbeats of different hosts are hard to compare."""
HARDWARE = ("device", "driver")
"""Versions that may differ between hosts of one job, at a price; all others must not."""
LISTED = 8
"""Most lines about single links."""


@dataclass(frozen=True)
class Finding:
    """One line about something that is wrong."""

    level: Literal["error", "warning"]
    line: str


def findings(record: Record) -> list[Finding]:
    """Return everything that is wrong, errors first."""
    ranks = {facts.rank: facts for facts in record.ranks}
    found = [Finding("error", line) for line in record.errors]
    found += disagreements(record.ranks)
    found += folders(record.ranks, record.folder)
    found += clocks(record.links, ranks)
    for what in ("bf16", "fp32"):
        rates = {facts.rank: float(getattr(facts, what)) for facts in record.ranks}
        found += slow_ranks(rates, ranks, f"{what} matrix products run at")
    # memory that another process holds will be missing later; a warning only, as hosts of CPU ranks need not be alike
    found += [
        Finding("warning", finding.line)
        for finding in slow_ranks({r.rank: float(r.memory) for r in record.ranks}, ranks, "free memory is")
    ]
    for title, pairs in classes(record.links, ranks).items():
        found += wrong_links(pairs, ranks)
        found += slow_links(pairs, ranks, title)
    return sorted(found, key=lambda finding: finding.level)


def healthy(found: Sequence[Finding]) -> bool:
    """Return whether there is no error."""
    return all(finding.level != "error" for finding in found)


def disagreements(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Return the versions that are not the same on all ranks, naming the ranks that differ from most."""
    found = []
    reported = [{**facts.versions, "device": facts.device} for facts in ranks]
    for name in dict.fromkeys(name for versions in reported for name in versions):
        values = [versions.get(name, "absent") for versions in reported]
        usual, count = Counter(values).most_common(1)[0]
        for value in dict.fromkeys(values):
            if value != usual:
                names = _listed([facts.name for facts, theirs in zip(ranks, values, strict=True) if theirs == value])
                level: Literal["error", "warning"] = (
                    "warning" if name in HARDWARE or "unknown" in (value, usual) else "error"
                )
                found.append(Finding(level, f"{name} is {value} on {names}, but {usual} on {count} of {len(ranks)}"))
    return found


def folders(ranks: Sequence[RankFacts], folder: str) -> list[Finding]:
    """Return problems with the folder of runs, once for each host."""
    found = []
    for facts in {facts.host: facts for facts in reversed(ranks)}.values():
        if facts.disk is not None and facts.disk < LOW_DISK:
            line = f"{folder}: {facts.disk / 2**30:.1f} GiB free on {facts.host}; checkpoints and shards need room"
            found.append(Finding("warning", line))
    # where rank 0 cannot write, the others miss its file: only rank 0's problem counts
    wrong = ranks[:1] if ranks and ranks[0].folder else [facts for facts in ranks if facts.folder]
    for facts in {(facts.host, facts.folder): facts for facts in reversed(wrong)}.values():
        found.append(Finding("error", f"{folder}: {facts.folder} ({facts.name})"))
    return found


def clocks(links: Sequence[Link], ranks: Mapping[int, RankFacts]) -> list[Finding]:
    """Return hosts whose clock differs from that of rank 0's host by more than CLOCK_S, beyond doubt."""
    return [
        Finding("warning", f"the clock of {host} is {clock:+.2f} s from that of {ranks[0].host} (to {error:.3f} s)")
        for host, (clock, error) in clock_offsets(links, ranks).items()
        if abs(clock) - error > CLOCK_S
    ]


def clock_offsets(links: Sequence[Link], ranks: Mapping[int, RankFacts]) -> dict[str, tuple[float, float]]:
    """Return the clock offset of each host from rank 0's host, and its uncertainty, both in seconds.

    They are those of the host's fastest link to rank 0.
    """
    best: dict[str, tuple[float, float]] = {}
    for link in links:
        if link.a == 0 and not link.error and (host := ranks[link.b].host) != ranks[0].host:
            read = link.clock_s, link.clock_error_s
            best[host] = min(best.get(host, read), read, key=lambda offset: offset[1])
    return best


def others_median(figures: Mapping[int, float]) -> dict[int, float]:
    """Return for each key the median of all other figures; nothing for fewer than two figures."""
    if len(figures) < 2:
        return {}
    return {key: statistics.median(figure for other, figure in figures.items() if other != key) for key in figures}


def _level(share: float) -> Literal["error", "warning"]:
    """Return how bad a share of the median is."""
    return "error" if share < VERY_SLOW else "warning"


def slow_ranks(rates: Mapping[int, float], ranks: Mapping[int, RankFacts], what: str) -> list[Finding]:
    """Return ranks whose rate is far below that of the others. what: words before the share."""
    return [
        Finding(
            _level(rates[rank] / usual), f"{ranks[rank].name}: {what} {rates[rank] / usual:.0%} of the others' median"
        )
        for rank, usual in others_median(rates).items()
        if rates[rank] < SLOW * usual
    ]


def classes(links: Sequence[Link], ranks: Mapping[int, RankFacts]) -> dict[str, list[Link]]:
    """Return the links within hosts and those between hosts, which cannot be compared with each other."""
    found: dict[str, list[Link]] = {}
    for link in links:
        same = ranks[link.a].host == ranks[link.b].host
        found.setdefault("within a host" if same else "between hosts", []).append(link)
    return found


def wrong_links(links: Sequence[Link], ranks: Mapping[int, RankFacts]) -> list[Finding]:
    """Return pairs that could not exchange anything."""
    return [Finding("error", f"{_pair(link, ranks)}: {link.error}") for link in links if link.error]


def slow_links(links: Sequence[Link], ranks: Mapping[int, RankFacts], title: str) -> list[Finding]:
    """Return links far below the others of their class.

    Where most links of a rank are slow, the rank is named instead of each link. title: name of the class.
    """
    rates = {number: link.bandwidth for number, link in enumerate(links) if not link.error}
    usual = others_median(rates)
    shares = {number: rates[number] / usual[number] for number in usual}
    slow = {number for number, share in shares.items() if share < SLOW}
    # how many links each rank has, and how many of them are slow
    all_of = Counter(rank for number in shares for rank in (links[number].a, links[number].b))
    slow_of = Counter(rank for number in slow for rank in (links[number].a, links[number].b))
    found, explained = [], set()
    for rank, count in slow_of.items():
        mine = [number for number in slow if rank in (links[number].a, links[number].b)]
        # with three ranks each link is half of two ranks' links: then neither rank is to blame
        if count >= 2 and count > 2 / 3 * all_of[rank] and all_of[rank] < len(shares):
            share = statistics.median(shares[number] for number in mine)
            line = f"{ranks[rank].name}: {count} of its {all_of[rank]} links {title} run at {share:.0%} of the others'"
            found.append(Finding(_level(share), f"{line} median"))
            explained.update(mine)
    slow -= explained
    for number in sorted(slow, key=lambda number: shares[number])[:LISTED]:
        line = f"{_pair(links[number], ranks)}: the link runs at {shares[number]:.0%} of the median {title}"
        found.append(Finding(_level(shares[number]), line))
    if len(slow) > LISTED:
        found.append(Finding("warning", f"{len(slow) - LISTED} more links {title} are below {SLOW:.0%} of the median"))
    return found


def _pair(link: Link, ranks: Mapping[int, RankFacts]) -> str:
    """Return the names of a link's ranks."""
    return f"{ranks[link.a].name} and {ranks[link.b].name}"


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
