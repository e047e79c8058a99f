"""The part of one node in a job: `Node`, which agent and rendezvous read."""

from __future__ import annotations

from dataclasses import dataclass, field

from megamem.errors import ConfigError

TOKEN = "MEGAMEM_JOB_TOKEN"
"""The environment variable with the token of a job of several nodes; see `Node.token`."""


@dataclass(frozen=True)
class Node:
    """How a node takes part in a job."""

    processes: int
    """Ranks on this node."""
    job: str
    """A name that the nodes of one job share."""
    token: str = field(default="", repr=False)
    """Random text that the nodes of the job alone know, with which they sign what they tell one another. One that is
    alone needs none."""
    node_counts: tuple[int, ...] = (1,)
    """Numbers of nodes that batch and layout fit, ascending. The last is how many are expected."""
    head: str = "127.0.0.1"
    """Name or address of the head node."""
    port: int = 0
    """Port of the rendezvous on the head node; any free one if 0."""
    is_head: bool = True
    """Whether this is the head node, which must outlive the others."""
    address: str | None = None
    """The address at which the other nodes reach this one; the host's full name if not given."""
    max_restarts: int = 0
    """How often ranks that failed for a reason that may pass are started again."""
    join_s: int = 600
    """Seconds that nodes wait for one another."""
    stop_s: int = 30
    """Seconds that ranks have to end after a signal."""

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other node, now or later."""
        return self.node_counts[-1] == 1


def parse_node_counts(text: str) -> tuple[int, ...]:
    """Return the numbers in a text such as `2,4`. Raises ConfigError unless they are positive and ascending."""
    numbers = [int(number) for number in text.split(",") if number.isdecimal()]
    if not numbers or ",".join(map(str, sorted({*numbers} - {0}))) != text:
        raise ConfigError(f"--nodes {text}: expected numbers in ascending order, such as 2,4")
    return tuple(numbers)
