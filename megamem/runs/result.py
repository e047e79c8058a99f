"""The result of a run: what `result.json` holds, and what `megamem train` prints as its last line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megamem.files import write_bytes

RESULT = "result.json"
"""Name of the file in the run folder."""
Figure = float | str | None
"""One figure of an evaluation. Figures that were not finite are None, as JSON has no word for them."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run found."""

    run_dir: str
    """The run folder."""
    steps: int
    """Finished optimizer steps."""
    tokens: int
    """Tokens trained on, without padding."""
    tokens_per_second: float
    """Training speed over all ranks: the median over log lines."""
    memory_gib_by_rank: tuple[float, ...]
    """Peak memory of each rank in GiB: of the device's allocator on CUDA, else of the process."""
    evaluation: Mapping[str, Figure] = field(default_factory=dict)
    """Figures of the final evaluation by name (docs/evaluation.md); empty without held-out text."""

    def to_dict(self) -> dict[str, object]:
        """Return one flat mapping for JSON, the evaluation's figures beside the others."""
        return {
            "run_dir": self.run_dir,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "memory_gib_by_rank": list(self.memory_gib_by_rank),
            **self.evaluation,
        }

    @staticmethod
    def from_dict(value: Mapping[str, object]) -> RunResult:
        """Return the result that `to_dict` gave as `value`.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        fields = ("run_dir", "steps", "tokens", "tokens_per_second", "memory_gib_by_rank")
        if missing := [name for name in fields if name not in value]:
            raise ValueError(f"{missing[0]}: missing from the result of a run")
        run_dir, steps, tokens, tokens_per_second, memory = (value[name] for name in fields)
        if not isinstance(run_dir, str):
            raise ValueError(f"run_dir: {run_dir!r} is no path")
        if not isinstance(steps, int):
            raise ValueError(f"steps: {steps!r} is no integer")
        if not isinstance(tokens, int):
            raise ValueError(f"tokens: {tokens!r} is no integer")
        if not isinstance(tokens_per_second, int | float):
            raise ValueError(f"tokens_per_second: {tokens_per_second!r} is no number")
        if not isinstance(memory, list) or not all(isinstance(gib, int | float) for gib in memory):
            raise ValueError(f"memory_gib_by_rank: {memory!r} is no list of numbers")
        figures: dict[str, Figure] = {}
        for name in value.keys() - set(fields):
            figure = value[name]
            if figure is not None and not isinstance(figure, int | float | str):
                raise ValueError(f"{name}: {figure!r} is neither a number nor text")
            figures[name] = figure
        ordered = {name: figures[name] for name in value if name in figures}
        return RunResult(run_dir, steps, tokens, float(tokens_per_second), tuple(memory), ordered)


def write_result(folder: Path, result: RunResult) -> None:
    """Write `result.json` into a run folder, whole or not at all."""
    write_bytes(folder / RESULT, (json.dumps(result.to_dict(), indent=2) + "\n").encode())


def read_result(folder: Path) -> RunResult | None:
    """Return the result in a run folder; None if there is none yet or it is damaged."""
    try:
        value = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return RunResult.from_dict(value) if isinstance(value, dict) else None
    except (OSError, ValueError):
        return None
