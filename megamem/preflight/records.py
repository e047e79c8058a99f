"""The measurements of a preflight, as plain data."""

from __future__ import annotations

from pydantic import BaseModel


class RankFacts(BaseModel):
    """The measurements that a rank makes of itself and its host."""

    rank: int
    host: str
    device: str
    """Name of its device."""
    versions: dict[str, str]
    """Versions by package; `revision` is that of megamem's code, `driver` that of the device."""
    bf16: float
    """FLOP/s of BF16 matrix products while all ranks compute at the same time, median."""
    fp32: float
    """FLOP/s of FP32 matrix products, likewise."""
    memory: int
    """Free bytes of the device, or of the host for the CPU."""
    disk: int | None
    """Free bytes where runs are written; None where they cannot be read."""
    folder: str | None
    """Problem with the folder where runs are written; None without one."""

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"rank {self.rank} ({self.host})"


class Link(BaseModel):
    """A pair of ranks that exchanged tensors, `a` < `b`."""

    a: int
    b: int
    latency_s: float = 0.0
    """Seconds one way."""
    bandwidth: float = 0.0
    """Bytes per second, one way, while other pairs exchange too."""
    clock_s: float = 0.0
    """The clock of `b` less that of `a`."""
    clock_error_s: float = 0.0
    """Uncertainty of `clock_s`: half of the round trip in which it was read."""
    error: str | None = None
    """What went wrong; there are no figures then."""


class Reduction(BaseModel):
    """An all-reduce over all ranks."""

    bytes: int
    seconds: float
    bandwidth: float
    """Bytes per second that each rank sends and receives if the reduction is a ring: 2 (n - 1) / n times the size."""


class Record(BaseModel):
    """All measurements, as rank 0 has them in the end."""

    world: int
    folder: str
    ranks: list[RankFacts]
    links: list[Link] = []
    reductions: list[Reduction] = []
    errors: list[str] = []
    """Lines that say what kept the check itself from going on."""
    seconds: float = 0.0
