"""`megamem launch`: from files and overrides to a job that is checked, written to its run folder and started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import DEFAULT_TARGET
from launchers.config import ClusterConfig
from launchers.job import Job
from launchers.snapshot import snapshot_folder, write_snapshot
from launchers.target import Report, Target, cluster_config_type, find_target
from megamem.config.load import apply_overrides, dump_yaml, parse_config, read_yaml
from megamem.config.recipe import load_run
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.planning.auto import divided
from megamem.planning.machines import machine
from megamem.training.checks import check_layout
from megamem.training.devices import local_processes, measurements, settle


@dataclass(frozen=True)
class Launch:
    """A job that fits its target, not written yet."""

    config: RunConfig
    job: Job
    target: Target

    @property
    def files(self) -> dict[str, str]:
        """The run, the cluster and what starts the job, by file name."""
        config = dump_yaml(self.config)
        files = {"config.yaml": config, "cluster.yaml": dump_yaml(self.job.cluster)}
        return {**files, **self.target.files(self.job, config)}

    def check_machine(self) -> None:
        """Check what this machine sees as the nodes do. Raises MegamemError."""
        self.target.check_machine(self.config, self.job.cluster.nodes * self.job.processes)

    def write(self, more: Mapping[str, str] | None = None) -> None:
        """Write the job's folder: its files and `more`, code version and environment. Raises RunFolderError."""
        files = {**self.files, **(more or {})}
        write_snapshot(self.job.folder, files, [name for name, text in files.items() if self.job.token in text])

    def start(self, submit: bool, report: Report) -> int:
        """Start the job once it is written, and return the exit code; see `Target.start`."""
        return self.target.start(self.job, submit, report)


def load_launch(
    config: Path, overrides: Sequence[str], cluster: Path | None, target: str, model: Path | None = None
) -> Launch:
    """Return the job that files and overrides describe, checked as far as no data is needed. Raises ConfigError."""
    settings, run_overrides = load_cluster(overrides, cluster)
    return plan_launch(load_run(config, run_overrides, model), settings, target)


def load_cluster(overrides: Sequence[str], path: Path | None) -> tuple[ClusterConfig, list[str]]:
    """Return the cluster, and the overrides that are not its own: an override belongs to what has its first key.

    Raises: ConfigError.
    """
    cluster_type = cluster_config_type()
    keys = cluster_type.__pydantic_fields__
    own = [override for override in overrides if override.partition("=")[0].strip().partition(".")[0] in keys]
    tree = apply_overrides(read_yaml(path) if path else {}, own)
    rest = [override for override in overrides if override not in own]
    return parse_config(cluster_type, tree, str(path or "cluster")), rest


def plan_launch(config: RunConfig, cluster: ClusterConfig, target: str) -> Launch:
    """Return the job of a run, its layout checked. target: the name of one. Raises ConfigError."""
    place = find_target(target, cluster)
    place.check(cluster)
    _check_resume(config, cluster, place)
    folder, work_folder = place.place(config, snapshot_folder(config.run_folder))
    processes = _processes_per_node(config, cluster, place)
    settled = _settled(config, cluster, processes)
    resumes = config.training.stop_after is None
    job = Job(config.name, cluster, processes, tuple(settled), folder, work_folder, resumes)
    return Launch(settled[cluster.nodes], job, place)


def _check_resume(config: RunConfig, cluster: ClusterConfig, target: Target) -> None:
    """Raise ConfigError if the job may be started again, but its run would not go on."""
    if config.checkpoint.resume != "none":
        return
    if cluster.max_restarts:
        reason = f"max_restarts {cluster.max_restarts}, which starts the run again"
    elif cluster.fewest_nodes < cluster.nodes:
        reason = f"min_nodes {cluster.min_nodes}, with which a node that comes back starts the run again"
    elif target.restarts_stopped_jobs and config.training.stop_after is None:
        reason = f"--on {target.name}, which starts a stopped job again"
    else:
        return
    raise ConfigError(
        f"checkpoint.resume: none does not go with {reason}; use auto, which starts afresh in a new run folder"
    )


def _processes_per_node(config: RunConfig, cluster: ClusterConfig, target: Target) -> int:
    """Return the ranks of each node: as given, or the layout's spread over the nodes. Raises ConfigError.

    A layout that is left to the planner has one rank for each device of this machine; others' must be given.
    """
    if cluster.processes_per_node is not None:
        return cluster.processes_per_node
    parallel = config.parallel
    if parallel.dp is None and {"parallel.tp", "parallel.pp"} & set(config.auto.fields):
        if target.name == DEFAULT_TARGET:
            return local_processes(config)
        raise ConfigError("processes_per_node: not given, and parallel.tp or parallel.pp is auto; give it")
    ranks = parallel.pp * parallel.tp * (parallel.dp or 1)
    if ranks % cluster.nodes:
        raise ConfigError(
            f"processes_per_node: not given, and PP {parallel.pp} x TP {parallel.tp} x DP {parallel.dp or 1} = {ranks} "
            f"ranks cannot be spread over nodes {cluster.nodes}; give it"
        )
    return ranks // cluster.nodes


def _settled(config: RunConfig, cluster: ClusterConfig, processes: int) -> dict[int, RunConfig]:
    """Return the run on each number of nodes, from min_nodes to nodes, that batch, layout and devices fit.

    Where the devices are not known, what is left to the planner still is, and the ranks compare their own.

    Raises: ConfigError if either end does not fit; a number between them is left out.
    """
    settled = {}
    device = None
    if cluster.device and config.parallel.device != "cpu":
        device = machine(cluster.device, processes).model_copy(update={"per_node": processes})
    activations = measurements(config)
    for nodes in range(cluster.fewest_nodes, cluster.nodes + 1):
        ranks = nodes * processes
        try:
            check_layout(divided(config, ranks), ranks)
            settled[nodes] = settle(config, ranks, device=device, activations=activations) if device else config
        except ConfigError as error:
            if nodes in (cluster.fewest_nodes, cluster.nodes):
                field = "nodes" if nodes == cluster.nodes else "min_nodes"
                raise ConfigError(f"{field} {nodes} x processes_per_node {processes}: {error}") from None
    return settled
