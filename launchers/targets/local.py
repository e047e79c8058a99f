"""This machine: one node, whose agent is the command itself."""

from __future__ import annotations

import os
import shlex
from typing import ClassVar

from launchers.config import ClusterConfig
from launchers.job import Job
from launchers.local_ranks import run_local
from launchers.target import Report, Target, register
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.training.checks import check_kernels, check_run


@register
class LocalTarget(Target):
    """This machine. It has no settings."""

    name: ClassVar[str] = "local"

    def check(self, cluster: ClusterConfig) -> None:
        """See `Target.check`."""
        if cluster.nodes > 1:
            raise ConfigError(
                f"nodes: {cluster.nodes} do not go with --on local, which is this machine; use slurm, ssh ..."
            )

    def check_machine(self, config: RunConfig, processes: int) -> None:
        """See `Target.check_machine`. Kernels are checked too: the run computes here."""
        check_kernels(config)
        check_run(config, processes)

    def files(self, job: Job, config: str) -> dict[str, str]:
        """See `Target.files`."""
        return {"commands.txt": shlex.join([*job.agent_command(), "--", *job.train_arguments()]) + "\n"}

    def start(self, job: Job, submit: bool, report: Report) -> int:
        """Run the job and return its exit code."""
        os.environ.update(job.environment)
        return run_local(job.processes, job.train_arguments(), job.cluster.max_restarts, job.cluster.stop_seconds)
