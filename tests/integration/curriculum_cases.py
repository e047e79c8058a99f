"""What the tests of curricula run on a rank."""

from __future__ import annotations

import gc
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

LARGE = 5000
"""Elements of a tensor that belongs to a model or its optimizer; what libraries keep is smaller."""


def elements_held(config: str, overrides: list[str]) -> tuple[list[int], list[int]]:
    """Train the lessons; return the elements of large tensors in the process at the end of each, and after it."""
    from megamem.config.curriculum import load_runs
    from megamem.pipeline.base import TrainingEngine
    from megamem.training.curriculum import train_lessons

    def elements() -> int:
        gc.collect()
        tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
        return sum(tensor.numel() for tensor in tensors if not tensor.is_meta and tensor.numel() >= LARGE)

    close, during, after = TrainingEngine.close, [], []

    def counted(engine: Any) -> None:
        during.append(elements())
        close(engine)

    TrainingEngine.close = counted  # type: ignore[method-assign]
    for result in train_lessons(load_runs(Path(config), overrides), Console(file=StringIO())):
        assert result is not None
        after.append(elements())
    return during, after
