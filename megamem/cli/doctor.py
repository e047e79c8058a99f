"""`megamem doctor`: what is installed, what this machine can do, what is missing and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from megamem.cli.options import Json
from megamem.cli.output import console, write_json

if TYPE_CHECKING:
    from megamem.doctor.checks import Finding, Status

_STYLES: dict[Status, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "red"}


def doctor(as_json: Json = False) -> None:
    """Report versions, devices, what is missing and what that costs, and test collectives with two processes."""
    from megamem.doctor.checks import examine, healthy

    if as_json:
        findings = examine()
        write_json({"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}, indent=2)
    else:
        with console.status("examining this machine"):
            findings = examine()
        _print(findings)
    raise typer.Exit(int(not healthy(findings)))


def _print(findings: list[Finding]) -> None:
    """Print findings by section, and what keeps megamem from working."""
    for section in dict.fromkeys(finding.section for finding in findings):
        console.print(section, style="bold", highlight=False)
        console.print(_table(finding for finding in findings if finding.section == section))
    failed = [finding for finding in findings if finding.status == "failed"]
    if failed:
        names = ", ".join(f"{finding.section}/{finding.name}" for finding in failed)
        console.print(f"megamem cannot work here: {names}", style="red", highlight=False)
    else:
        console.print("megamem can work here", style="green", highlight=False)


def _table(findings: Iterable[Finding]) -> Table:
    """Return the findings of a section as a table."""
    table = Table.grid(padding=(0, 2))
    for column in ("status", "name"):
        table.add_column(column, no_wrap=True)
    table.add_column("detail", overflow="fold")
    for finding in findings:
        table.add_row(Text(f"  {finding.status}", _STYLES[finding.status]), finding.name, finding.detail)
    return table
