"""`megamem launch`, which writes and starts the job of a run, and `megamem agent`, one node of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launchers import DEFAULT_TARGET, target_names
from megamem.cli.options import ModelFile, RecipePath
from megamem.cli.output import write_line


def launch(
    config: RecipePath,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="overrides of the run or the cluster: section.key=value")
    ] = None,
    on: Annotated[str, typer.Option(help=f"where it runs: {', '.join(target_names())}")] = DEFAULT_TARGET,
    cluster: Annotated[Path | None, typer.Option(help="YAML file of the cluster, as in configs/clusters/")] = None,
    model: ModelFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be written; write and start nothing")
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="hand the job to its scheduler; jobs without one are always started")
    ] = False,
) -> None:
    """Write the job of a run on one or many nodes to its run folder, and start it."""
    from launchers.launch import load_launch

    planned = load_launch(config, overrides or [], cluster, on, model)
    if dry_run:
        for name, text in planned.files.items():
            write_line(f"# {planned.job.folder / name}\n{text}")
        return
    planned.check_machine()
    planned.write()
    write_line(f"{planned.job.folder}: configuration, code version and command")
    raise typer.Exit(planned.start(submit, write_line))


def agent(
    command: Annotated[list[str], typer.Argument(help="verb of megamem and its arguments, after --")],
    nodes: Annotated[str, typer.Option(help="numbers of nodes the job fits, ascending: 2 or 2,4")] = "1",
    processes: Annotated[int, typer.Option(min=1, help="ranks on this node")] = 1,
    job: Annotated[str, typer.Option(help="what the nodes of one job have in common")] = "megamem",
    head: Annotated[str, typer.Option(help="name or address of the head node")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="port of the rendezvous on the head node")] = 29_400,
    node_rank: Annotated[int, typer.Option(min=0, help="0 on the head node")] = 0,
    address: Annotated[str | None, typer.Option(help="the address at which other nodes reach this one")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="after failures that may pass")] = 0,
    join_seconds: Annotated[int, typer.Option(min=1, help="how long nodes wait for one another")] = 600,
    stop_seconds: Annotated[int, typer.Option(min=1, help="how long ranks have to end after a signal")] = 120,
    listen: Annotated[
        bool,
        typer.Option(
            "--listen", help="take the job's token, then names of signals, from standard input, its end for SIGTERM"
        ),
    ] = False,
) -> None:
    """Run one node of a job: start its ranks together with the other nodes. `megamem launch` writes this command."""
    from launchers.local_ranks import run_node
    from launchers.node import TOKEN, Node, parse_node_counts

    node = Node(
        processes=processes,
        job=job,
        token=os.environ.get(TOKEN, ""),
        node_counts=parse_node_counts(nodes),
        head=head,
        port=port,
        is_head=node_rank == 0,
        address=address,
        max_restarts=max_restarts,
        join_s=join_seconds,
        stop_s=stop_seconds,
    )
    raise typer.Exit(run_node(node, command, listen))
