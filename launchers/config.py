"""What is known of a cluster: `LaunchConfig`, which `megamem launch` reads beside a run's configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from megamem.config.base import ConfigModel

Port = Annotated[int, Field(ge=1, le=65_535)]
Word = Annotated[str, Field(min_length=1, pattern=r"^[^\s\x00-\x1f]+$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
_SECRET = re.compile(r"(?i)secret|passw|credential|jwt|(^|_)(token|key)($|_)")
_OURS = {"nodes", "ntasks", "ntasks-per-node", "requeue", "no-requeue", "signal", "open-mode", "no-kill", "array"}
"""Options of sbatch that the script depends on."""
REQUEUE_S = 60
"""What a script on SLURM gets to requeue its job, besides `stop_seconds`."""


def looks_secret(name: str) -> bool:
    """Whether an environment variable of this name may hold something that must not be written down."""
    return bool(_SECRET.search(name))


class SlurmConfig(ConfigModel):
    """A SLURM cluster."""

    partition: Word | None = None
    """Partition; the cluster's default if not given."""
    account: Word | None = None
    """Account that is charged."""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$", coerce_numbers_to_str=True)] | None = None
    """Time limit as SLURM reads it (`24:00:00`, `2-12`, minutes); the partition's if not given. A run goes on then."""
    sbatch: dict[Word, str | int | None] = {}
    """More options of sbatch by their long names, such as `gpus-per-node: 8`; null for one without a value."""
    modules: tuple[Word, ...] = ()
    """Environment modules to load."""
    venv: Path | None = None
    """Virtual environment to activate on the nodes."""
    container: Word | None = None
    """Image to run in; the nodes' own software if not given."""
    container_with: Literal["pyxis", "apptainer"] = "pyxis"
    """What runs the image: `srun --container-image`, or `apptainer exec --nv`."""
    mounts: tuple[Annotated[str, Field(pattern=r"^/[^\s,:\x00-\x1f]*$")], ...] = ()
    """Folders that the container sees besides the working folder and the run folder, such as that of the data."""

    @field_validator("sbatch")
    @classmethod
    def _not_ours(cls, options: dict[str, str | int | None]) -> dict[str, str | int | None]:
        for name, value in options.items():
            if name in _OURS or name in cls.__pydantic_fields__:
                raise ValueError(f"{name!r} is set by the launcher; use its own field, or leave it out")
            if not re.fullmatch(r"[a-z][a-z-]*", name):
                raise ValueError(f"{name!r} is no long option of sbatch; give it without dashes, as gpus-per-node")
            if isinstance(value, str) and re.search(r"[\x00-\x1f]", value):
                raise ValueError(f"{name!r}: the value has a line break")
        return options

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds; None if there is none, or the partition's."""
        if self.time is None:
            return None
        days, _, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        if not days and len(parts) < 3:  # minutes, and seconds
            parts = [0, *parts]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) or None


class KubernetesConfig(ConfigModel):
    """A Kubernetes cluster."""

    image: Word | None = None
    """Container image with megamem installed."""
    namespace: Name = "default"
    """Namespace of the job."""
    kind: Literal["Job", "PyTorchJob"] = "Job"
    """`Job`: an Indexed Job of Kubernetes itself. `PyTorchJob`: of the Kubeflow training operator."""
    gpu_resource: Word = "nvidia.com/gpu"
    """Name of the GPU resource."""
    gpus: NonNegativeInt | None = None
    """GPUs of a pod; one per process if not given, 0 for none."""
    volumes: dict[Annotated[str, Field(pattern=r"^/")], Name] = {}
    """Mount path: persistent volume claim. The run folder must be on one that all pods may write to."""
    folder: Annotated[str, Field(pattern=r"^/")] = "/work"
    """Working folder of the pods, to which relative paths of the run refer."""
    service_account: Name | None = None
    """Service account of the pods."""
    env_secret: Name | None = None
    """Secret whose entries become environment variables, such as WANDB_API_KEY."""


class SshConfig(ConfigModel):
    """Machines that are reached by ssh with a key."""

    hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$")], ...] = ()
    """Names or addresses, one per node, by which the nodes reach one another too; the first is the head node."""
    user: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] | None = None
    """User on the hosts; ssh's default if not given."""
    port: Port = 22
    """Port of sshd."""
    options: tuple[Word, ...] = ()
    """Options of ssh as after -o, such as `IdentityFile=/home/me/.ssh/cluster`."""
    python: Word = "python"
    """Python on the hosts that has megamem."""
    folder: Path | None = None
    """Working folder on the hosts, to which relative paths of the run refer; that of the command if not given."""


class LaunchConfig(ConfigModel):
    """Nodes of a job and where they come from."""

    nodes: PositiveInt = 1
    """Machines of the job."""
    processes_per_node: PositiveInt | None = None
    """Ranks on each; PP x TP x DP over the nodes if not given."""
    min_nodes: PositiveInt | None = None
    """With fewer nodes than this the job waits; with fewer than `nodes` it goes on where batch and layout allow it."""
    max_restarts: NonNegativeInt = 3
    """How often a job that failed for a reason that may pass is started again. Stops by a signal do not count."""
    port: Port = 29_400
    """Port of the rendezvous on the head node; on SLURM the first of 1,000, by job number."""
    join_seconds: PositiveInt = 600
    """How long nodes wait for one another."""
    stop_seconds: PositiveInt = 120
    """From a signal to stop to the end by force: the longest step and a checkpoint must fit."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str | int] = {}
    """Environment variables of every process, such as `NCCL_SOCKET_IFNAME: ib0`. They are written down: no secrets."""
    slurm: SlurmConfig = SlurmConfig()
    """Of `--on slurm`."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Of `--on kubernetes`."""
    ssh: SshConfig = SshConfig()
    """Of `--on ssh`."""

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, variables: dict[str, str | int]) -> dict[str, str | int]:
        for name, value in variables.items():
            if looks_secret(name):
                raise ValueError(
                    f"{name} looks like a secret and would be written to the run folder; export it where the job "
                    "starts, or use kubernetes.env_secret"
                )
            if isinstance(value, str) and re.search(r"[\x00-\x1f]", value):
                raise ValueError(f"{name}: the value has a line break")
        return variables

    @model_validator(mode="after")
    def _nodes_fit(self) -> LaunchConfig:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than nodes {self.nodes}")
        return self

    @model_validator(mode="after")
    def _time_to_run(self) -> LaunchConfig:
        limit = self.slurm.time_s
        if limit is not None and self.signal_seconds >= limit:
            raise ValueError(
                f"slurm.time {self.slurm.time} is {limit} s, and a run would be stopped {self.signal_seconds} s before "
                f"that (stop_seconds {self.stop_seconds} and {REQUEUE_S}): at once; raise slurm.time"
            )
        return self

    @property
    def signal_seconds(self) -> int:
        """How long before its time limit SLURM signals a job."""
        return self.stop_seconds + REQUEUE_S

    @property
    def fewest_nodes(self) -> int:
        """`min_nodes`, or `nodes` if that is not given."""
        return self.min_nodes or self.nodes
