"""`megamem preflight`: check a job's ranks, hosts and links before a long run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from launchers.local_ranks import inside_job, run_local
from megamem.cli.options import Device, Json
from megamem.cli.output import console, write_json


def preflight(
    folder: Annotated[Path, typer.Option(help="where runs are to be written, on all hosts")] = Path("runs"),
    processes: Annotated[
        int | None, typer.Option(min=1, help="local processes; one for each CUDA device if not given")
    ] = None,
    device: Device = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds a pair or an all-reduce may take")] = 10.0,
    as_json: Json = False,
) -> None:
    """Check versions, clocks, the folder of runs, every link and every rank's speed.

    Under torchrun this is one rank; otherwise the local processes are started for you. Exit code 0 only if there is no
    error.
    """
    from megamem.errors import ConfigError
    from megamem.hardware import avoid_broken_amx

    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {device}: give cpu or cuda")
    avoid_broken_amx()
    if not inside_job():
        import torch

        count = processes or (1 if device == "cpu" else max(1, torch.cuda.device_count()))
        if count > 1:
            options = ["--folder", str(folder), "--timeout", str(timeout)]
            options += ["--device", device] if device else []
            raise typer.Exit(run_local(count, ["preflight", *options, *(["--json"] if as_json else [])]))
    _rank(folder, device, timeout, as_json)


def _rank(folder: Path, device: str | None, timeout: float, as_json: bool) -> NoReturn:
    """Take part in the check as this rank, and end the process."""
    from dataclasses import asdict

    from megamem.preflight.findings import findings, healthy
    from megamem.preflight.records import Record
    from megamem.preflight.report import lines, tables
    from megamem.preflight.run import preflight as check

    def report(record: Record) -> None:
        found = findings(record)
        if as_json:
            shown = {"ok": healthy(found), "findings": [asdict(finding) for finding in found], **record.model_dump()}
            write_json(shown)
        else:
            for part in (*tables(record), *lines(record, found)):
                console.print(part, highlight=False)
        console.file.flush()

    record = check(folder, device, timeout, report)
    # a thread that hangs in a backend would keep the process
    os._exit(0 if healthy(findings(record)) else 1)
