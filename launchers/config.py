"""The part of a cluster's file that every target reads: `ClusterConfig`, nodes and how they come together."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from megamem.config.base import ConfigModel

Port = Annotated[int, Field(ge=1, le=65_535)]
Word = Annotated[str, Field(min_length=1, pattern=r"^[^\s\x00-\x1f]+$")]
_SECRET = re.compile(
    r"(?i)secret|passw|credential|jwt|bearer|(^|_)(pass|pat|auth|oauth|creds?|[a-z0-9]*(token|key|pwd)s?)($|_)"
)


def looks_secret(name: str) -> bool:
    """Return whether an environment variable of this name may hold something that must not be written down."""
    return bool(_SECRET.search(name))


class ClusterConfig(ConfigModel):
    """The nodes of a job. `launchers.target.cluster_config_type` adds a section for each registered target."""

    nodes: PositiveInt = 1
    """Machines of the job."""
    processes_per_node: PositiveInt | None = None
    """Ranks on each node; PP x TP x DP over the nodes if not given."""
    device: Literal["h100", "h200", "a100"] | None = None
    """The CUDA device of a rank, whose memory `megamem launch` compares the plan with. Where it is not given, rank 0
    compares its own when the job starts."""
    min_nodes: PositiveInt | None = None
    """The job waits while it has fewer nodes than this; with fewer than `nodes` it goes on where batch and layout fit
    their number."""
    max_restarts: NonNegativeInt = 3
    """How often a job that failed for a reason that may pass is started again. Stops by a signal do not count."""
    port: Port = 29_400
    """Port of the rendezvous on the head node; on SLURM the first of 1,000, by job number."""
    join_seconds: PositiveInt = 600
    """How long nodes wait for one another."""
    stop_seconds: PositiveInt = 120
    """The time that ranks have to end after a signal to stop, before they are killed: the longest step and a
    checkpoint must fit."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str | int] = {}
    """Environment variables of every process, such as `NCCL_SOCKET_IFNAME: ib0`. They are written down: no secrets."""

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
    def _min_nodes_fit(self) -> ClusterConfig:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes {self.min_nodes} is more than nodes {self.nodes}")
        return self

    @property
    def fewest_nodes(self) -> int:
        """`min_nodes`, or `nodes` if that is not given."""
        return self.min_nodes or self.nodes
