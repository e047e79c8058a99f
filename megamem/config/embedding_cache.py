"""The runs that may take what a frozen encoder makes from a cache (`training.embedding_cache`)."""

from __future__ import annotations

from megamem.config.data import DataConfig
from megamem.config.model import ModelConfig
from megamem.config.parallel import ParallelConfig
from megamem.config.training import TrainingConfig


def check_embedding_cache(
    model: ModelConfig, data: DataConfig, training: TrainingConfig, parallel: ParallelConfig
) -> None:
    """Raise ValueError where a run names a cache that it cannot use: chunks must be encoded whole, side by side."""
    if training.embedding_cache is None:
        return
    dropout = max(model.dropout, model.attention_dropout)
    wrong = {
        f"model.architecture {model.architecture.kind}": model.architecture.kind != "memory_model",
        f"parallel.pp {parallel.pp}": parallel.pp > 1,
        f"parallel.zero_stage {parallel.zero_stage}": parallel.zero_stage == 3,
        f"dropout {dropout:g}": dropout > 0,
        f"data.reset {data.reset}": data.reset == "exact",
    }
    if found := next((name for name, is_wrong in wrong.items() if is_wrong), None):
        raise ValueError(
            f"training.embedding_cache does not go with {found}; it needs a memory_model without a pipeline, "
            "zero_stage 2 or less, no dropout, and documents that begin at chunk borders"
        )
