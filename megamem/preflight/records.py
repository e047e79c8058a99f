"""What a preflight measures, as plain data."""

from __future__ import annotations

from pydantic import BaseModel


class RankFacts(BaseModel):
    """What a rank says of itself and its host."""

    rank: int
    host: str
    device: str
    """Its name."""
    versions: dict[str, str]
    """By package; `revision` is that of megamem's code, `driver` that of the device."""
    bf16: float
    """FLOP/s of matrix products while all ranks compute at the same time, median."""
    fp32: float
    memory: int
    """Free bytes, of the device where it has memory of its own, else of the host."""
    disk: int | None
    """Free bytes where runs are written; None where that could not be asked."""
    folder: str | None
    """What is wrong with the folder where runs are written; None if nothing is."""

    @property
    def name(self) -> str:
        """In messages."""
        return f"rank {self.rank} ({self.host})"


class Link(BaseModel):
    """A pair of ranks that exchanged tensors, `a` < `b`."""

    a: int
    b: int
    latency_s: float = 0.0
    """One way."""
    bandwidth: float = 0.0
    """Bytes per second, one way, while other pairs exchange too."""
    clock_s: float = 0.0
    """The clock of `b` less that of `a`."""
    clock_error_s: float = 0.0
    """How far `clock_s` may be off: half the round trip it was read in."""
    error: str | None = None
    """What went wrong; then there are no figures."""


class Reduction(BaseModel):
    """An all-reduce over all ranks."""

    bytes: int
    seconds: float
    bandwidth: float
    """Bytes per second that each rank sends and receives if the reduction is a ring: 2 (n - 1) / n times the size."""


class Record(BaseModel):
    """All of it, as rank 0 has it in the end."""

    world: int
    folder: str
    ranks: list[RankFacts]
    links: list[Link] = []
    reductions: list[Reduction] = []
    errors: list[str] = []
    """What kept the check itself from going on, a line each."""
    seconds: float = 0.0
