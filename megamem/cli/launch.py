"""`megamem launch`: a run's job on this machine, by ssh, on SLURM or on Kubernetes; and one node of it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from megamem.errors import STOPPED, ConfigError

if TYPE_CHECKING:
    from launchers.config import LaunchConfig
    from launchers.job import Job
    from megamem.config.run import RunConfig
    from megamem.study.config import StudyConfig
    from megamem.study.states import RunState
    from megamem.study.submit import Options

Target = Literal["local", "slurm", "kubernetes", "ssh"]
console = Console(soft_wrap=True)


def launch(
    config: Annotated[Path, typer.Argument(help="YAML file of the run")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="overrides of the run or the cluster: section.key=value")
    ] = None,
    on: Annotated[Target, typer.Option(help="where it runs")] = "local",
    cluster: Annotated[Path | None, typer.Option(help="YAML file of the cluster, as in configs/clusters/")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be written; write and start nothing")
    ] = False,
    submit: Annotated[
        bool, typer.Option("--submit", help="hand the job to SLURM or Kubernetes; local and ssh always start it")
    ] = False,
) -> None:
    """Write the job of a run on one or many nodes to its run folder, and start it."""
    from launchers.snapshot import write_snapshot
    from megamem.config.load import dump_yaml

    settings, nodes = _load(config, overrides or [], cluster)
    job = _job(settings, nodes, on)
    files = {"config.yaml": dump_yaml(settings), "cluster.yaml": dump_yaml(nodes), **_script(job, settings, on)}
    if dry_run:
        for name, text in files.items():
            console.print(f"# {job.folder / name}\n{text}", highlight=False, markup=False)
        return
    _check_files(settings, job, on)
    write_snapshot(job.folder, files)
    console.print(f"{job.folder}: configuration, code version and command", highlight=False)
    raise typer.Exit(_start(job, on, submit))


def _load(config: Path, overrides: list[str], cluster: Path | None) -> tuple[RunConfig, LaunchConfig]:
    """The run and the cluster."""
    from megamem.config.load import load_config
    from megamem.config.run import RunConfig

    nodes, rest = load_cluster(overrides, cluster)
    return load_config(RunConfig, config, rest), nodes


def load_cluster(overrides: list[str], path: Path | None) -> tuple[LaunchConfig, list[str]]:
    """The cluster, and the overrides that are not its own: an override belongs to what has its first key."""
    from launchers.config import LaunchConfig
    from megamem.config.load import apply_override, parse_config, read_yaml

    keys = LaunchConfig.__pydantic_fields__
    ours = [override for override in overrides if override.partition("=")[0].strip().partition(".")[0] in keys]
    tree = read_yaml(path) if path else {}
    for override in ours:
        tree = apply_override(tree, override)
    rest = [override for override in overrides if override not in ours]
    return parse_config(LaunchConfig, tree, str(path or "cluster")), rest


def run_as_job(study: StudyConfig, cluster: LaunchConfig, state: RunState, options: Options) -> Callable[[], str]:
    """A run of a study as a job of SLURM, readings after it, checked: what hands it over and says what sbatch said.

    Where only readings are left it takes one node. options: of sbatch, besides the cluster's.
    """
    import yaml

    from launchers.slurm_jobs import submit
    from launchers.snapshot import write_snapshot
    from megamem.config.load import dump_yaml
    from megamem.runs.result import RESULT
    from megamem.study.submit import CONFIG, READINGS
    from megamem.study.tasks import changes_of, plain

    settings, given = state.run.config, cluster.slurm.sbatch
    sbatch = {**given, **options}
    if "dependency" in given and "dependency" in options:
        sbatch["dependency"] = f"{given['dependency']},{options['dependency']}"
    cluster = cluster.model_copy(update={"slurm": cluster.slurm.model_copy(update={"sbatch": sbatch})})
    job = _job(settings, cluster, "slurm")
    if readings := plain(changes_of(study, state.run)):
        job = replace(job, then=("study", "read", str(job.folder)), result=settings.run_folder / RESULT)
    if state.trained:
        alone = cluster.model_copy(update={"nodes": 1, "min_nodes": None})
        job = replace(job, cluster=alone, processes=1, fits=(1,))
    else:
        _check_files(settings, job, "slurm")
    files = {CONFIG: dump_yaml(settings), "cluster.yaml": dump_yaml(job.cluster), **_script(job, settings, "slurm")}
    files |= {READINGS: yaml.safe_dump(readings, sort_keys=False)}

    def hand_over() -> str:
        write_snapshot(job.folder, files)
        return submit(job.folder)

    return hand_over


def _job(settings: RunConfig, cluster: LaunchConfig, on: Target) -> Job:
    """The job, its layout checked. Raises ConfigError."""
    from launchers.job import Job
    from launchers.snapshot import snapshot_folder

    _check_target(cluster, on)
    _check_resume(settings, cluster, on)
    folder, work = snapshot_folder(settings.run_folder), Path.cwd()
    if on == "slurm":
        folder = folder.absolute()
    if on == "ssh" and cluster.ssh.folder:
        if not folder.is_absolute() and cluster.ssh.folder != work:
            raise ConfigError(
                f"runs_folder: {settings.runs_folder} is another folder on the hosts, where ssh.folder is "
                f"{cluster.ssh.folder}, than here; give an absolute path that all see"
            )
        work = cluster.ssh.folder
    processes = _processes(settings, cluster)
    fits = _fits(settings, cluster, processes)
    return Job(settings.name, cluster, processes, fits, folder, work, again=settings.training.stop_after is None)


def _check_target(cluster: LaunchConfig, on: Target) -> None:
    hosts = cluster.ssh.hosts
    if on == "local" and cluster.nodes > 1:
        raise ConfigError(
            f"nodes: {cluster.nodes} do not go with --on local, which is this machine; use slurm, ssh ..."
        )
    if on == "ssh" and len(hosts) != cluster.nodes:
        raise ConfigError(f"ssh.hosts: {len(hosts)} given, but nodes is {cluster.nodes}; list one host per node")
    if on == "ssh" and len(set(hosts)) != len(hosts):
        raise ConfigError(f"ssh.hosts: {', '.join(hosts)} names a host twice")
    if on == "kubernetes" and cluster.kubernetes.image is None:
        raise ConfigError("kubernetes.image: required, but not given; name a container image that has megamem")


def _check_resume(settings: RunConfig, cluster: LaunchConfig, on: Target) -> None:
    """Raise ConfigError if the job may be started again, but its run would not go on."""
    if settings.checkpoint.resume != "none":
        return
    if cluster.max_restarts:
        again = f"max_restarts {cluster.max_restarts}, which starts the run again"
    elif cluster.fewest_nodes < cluster.nodes:
        again = f"min_nodes {cluster.min_nodes}, with which a node that comes back starts the run again"
    elif on in ("slurm", "kubernetes") and settings.training.stop_after is None:
        again = f"--on {on}, which starts a stopped job again"
    else:
        return
    raise ConfigError(
        f"checkpoint.resume: none does not go with {again}; use auto, which starts afresh in a new run folder"
    )


def _processes(settings: RunConfig, cluster: LaunchConfig) -> int:
    if cluster.processes_per_node is not None:
        return cluster.processes_per_node
    parallel = settings.parallel
    ranks = parallel.pp * parallel.tp * (parallel.dp or 1)
    if ranks % cluster.nodes:
        raise ConfigError(
            f"processes_per_node: not given, and PP {parallel.pp} x TP {parallel.tp} x DP {parallel.dp or 1} = {ranks} "
            f"ranks cannot be spread over nodes {cluster.nodes}; give it"
        )
    return ranks // cluster.nodes


def _fits(settings: RunConfig, cluster: LaunchConfig, processes: int) -> tuple[int, ...]:
    """Numbers of nodes that batch and layout fit, from min_nodes to nodes. Raises ConfigError if an end does not."""
    from megamem.training.checks import check_layout

    fits = []
    for nodes in range(cluster.fewest_nodes, cluster.nodes + 1):
        try:
            check_layout(settings, nodes * processes)
        except ConfigError as error:
            if nodes in (cluster.fewest_nodes, cluster.nodes):
                field = "nodes" if nodes == cluster.nodes else "min_nodes"
                raise ConfigError(f"{field} {nodes} x processes_per_node {processes}: {error}") from None
        else:
            fits.append(nodes)
    return tuple(fits)


def _script(job: Job, settings: RunConfig, on: Target) -> dict[str, str]:
    """File name and text of what starts the job."""
    from launchers.kubernetes import manifest_text
    from launchers.slurm import batch_script
    from launchers.ssh import commands
    from megamem.config.load import dump_yaml

    if on == "slurm":
        return {"job.sh": batch_script(job)}
    if on == "kubernetes":
        return {"job.yaml": manifest_text(job, dump_yaml(settings))}
    if on == "ssh":
        lines = [shlex.join(command) for command in commands(job, "JOB").values()]
        return {"commands.txt": "\n".join(lines) + "\n"}
    return {"commands.txt": shlex.join([*job.agent(), "--", *job.train()]) + "\n"}


def _check_files(settings: RunConfig, job: Job, on: Target) -> None:
    """Data and run folder where this machine sees them as the nodes do; pods have their own. Kernels where it runs."""
    from megamem.training.checks import check_kernels, check_run

    if on == "local":
        check_kernels(settings)
    if on in ("local", "slurm"):
        check_run(settings, job.cluster.nodes * job.processes)


def _start(job: Job, on: Target, submit: bool) -> int:
    if on == "local":
        from launchers.local import run_local

        os.environ.update(job.environment)
        return run_local(job.processes, job.train(), job.cluster.max_restarts, job.cluster.stop_seconds)
    if on == "ssh":
        from launchers.ssh import run_ssh

        return run_ssh(job)
    script = job.folder / ("job.sh" if on == "slurm" else "job.yaml")
    command = ["sbatch", str(script)] if on == "slurm" else ["kubectl", "apply", "-f", str(script)]
    if submit:
        from launchers.slurm_jobs import call
        from launchers.slurm_jobs import submit as submit_job

        said = submit_job(job.folder) if on == "slurm" else call(command)
    else:
        said = f"to start it: {shlex.join(command)}, or megamem launch ... --submit"
    console.print(said, highlight=False)
    return 0


def agent(
    command: Annotated[list[str], typer.Argument(help="verb of megamem and its arguments, after --")],
    nodes: Annotated[str, typer.Option(help="numbers of nodes the job fits, ascending: 2 or 2,4")] = "1",
    processes: Annotated[int, typer.Option(min=1, help="ranks on this node")] = 1,
    job: Annotated[str, typer.Option(help="what the nodes of one job have in common")] = "megamem",
    head: Annotated[str, typer.Option(help="name or address of the head node")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="of the rendezvous on the head node")] = 29_400,
    node_rank: Annotated[int, typer.Option(min=0, help="0 on the head node")] = 0,
    address: Annotated[str | None, typer.Option(help="by which other nodes reach this one")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="after failures that may pass")] = 0,
    join_seconds: Annotated[int, typer.Option(min=1, help="how long nodes wait for one another")] = 600,
    stop_seconds: Annotated[int, typer.Option(min=1, help="what ranks get to end after a signal")] = 120,
    listen: Annotated[
        bool, typer.Option("--listen", help="take names of signals from standard input, its end for SIGTERM")
    ] = False,
) -> None:
    """One node of a job: start its ranks together with the other nodes. `megamem launch` writes this command."""
    from launchers.local import COMMAND, quiet_torch
    from launchers.signals import heeded

    for number in heeded():  # until the agent takes them
        signal.signal(number, lambda *_: sys.exit(STOPPED))
    if listen:
        threading.Thread(target=_listen, name="signals", daemon=True).start()
    with quiet_torch():
        from launchers.agent import run_agent
        from launchers.rendezvous import Node
    numbers = [int(number) for number in nodes.split(",") if number.isdigit()]
    if not numbers or ",".join(map(str, sorted({*numbers} - {0}))) != nodes:
        raise ConfigError(f"--nodes {nodes}: expected numbers in ascending order, such as 2,4")
    node = Node(
        processes=processes,
        job=job,
        fits=tuple(numbers),
        head=head,
        port=port,
        is_head=node_rank == 0,
        address=address,
        max_restarts=max_restarts,
        join_s=join_seconds,
        stop_s=stop_seconds,
    )
    raise typer.Exit(run_agent(node, [*COMMAND, *command]))


def _listen() -> None:
    """Signals by name from whoever started this process, which may be unable to send them."""
    from launchers.signals import STOPS

    names = {number.name: number for number in STOPS}
    for line in sys.stdin:
        if (number := names.get(line.strip())) is not None:
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
