"""A record as tables and lines."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from megamem.preflight.findings import Finding, classes, clock_offsets
from megamem.preflight.records import Record


def tables(record: Record) -> Iterator[Table]:
    """Return the tables of ranks, links and all-reduces; those without rows are left out."""
    ranks = Table(title=f"{len(record.ranks)} of {record.world} ranks")
    for column in ("rank", "device"):
        ranks.add_column(column, overflow="fold")
    for column in ("bf16 TFLOP/s", "fp32 TFLOP/s", "free GiB", "disk GiB"):
        ranks.add_column(column, justify="right")
    for facts in record.ranks:
        rates = [f"{rate / 1e12:,.3g}" for rate in (facts.bf16, facts.fp32)]
        disk = "" if facts.disk is None else f"{facts.disk / 2**30:,.1f}"
        ranks.add_row(facts.name, facts.device, *rates, f"{facts.memory / 2**30:,.1f}", disk)
    if record.ranks:
        yield ranks
    if record.links:
        yield _links(record)
    if record.reductions:
        reductions = Table(title="all-reduce over all ranks")
        for column in ("MiB", "ms", "GB/s"):
            reductions.add_column(column, justify="right")
        for found in record.reductions:
            figures = (found.bytes / 2**20, 1000 * found.seconds, found.bandwidth / 1e9)
            reductions.add_row(*(f"{figure:,.4g}" for figure in figures))
        yield reductions


def _links(record: Record) -> Table:
    """Return the table of links by class."""
    table = Table(title="pairs of ranks: medians one way, and the slowest pair")
    table.add_column("", no_wrap=True)
    for column in ("pairs", "us", "GB/s", "slowest", "GB/s"):
        table.add_column(column, justify="right")
    ranks = {facts.rank: facts for facts in record.ranks}
    for title, links in classes(record.links, ranks).items():
        measured = [link for link in links if not link.error]
        if not measured:
            table.add_row(title, str(len(links)))
            continue
        slowest = min(measured, key=lambda link: link.bandwidth)
        table.add_row(
            title,
            str(len(links)),
            f"{1e6 * statistics.median(link.latency_s for link in measured):,.0f}",
            f"{statistics.median(link.bandwidth for link in measured) / 1e9:,.3g}",
            f"{slowest.a} - {slowest.b}",
            f"{slowest.bandwidth / 1e9:,.3g}",
        )
    return table


def lines(record: Record, found: Sequence[Finding]) -> Iterator[Text]:
    """Return lines about versions and clocks, the findings, and the verdict."""
    if record.ranks:
        versions = ", ".join(f"{name} {version}" for name, version in record.ranks[0].versions.items())
        yield Text(f"versions of rank 0: {versions}")
    offsets = clock_offsets(record.links, {facts.rank: facts for facts in record.ranks})
    for host, (clock, error) in offsets.items():
        yield Text(f"clock of {host}: {1000 * clock:+.2f} ms from rank 0's, to {1000 * error:.2f} ms")
    for finding in found:
        yield Text(f"{finding.level}: {finding.line}", style="red" if finding.level == "error" else "yellow")
    errors = sum(finding.level == "error" for finding in found)
    verdict = f"{errors} error(s), {len(found) - errors} warning(s)" if found else "nothing is wrong"
    yield Text(f"{verdict}; the check took {record.seconds:.0f} s", style="red" if errors else "green")
