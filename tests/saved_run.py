"""What checkpoints of tests say of their runs."""

from __future__ import annotations

from typing import Any

MODEL = {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4}


def saved_run(step: int, **changes: Any) -> dict[str, Any]:
    """The contents of run.json after a step."""
    return {
        "step": step, "tokens": 64 * step, "samples": 4 * step, "optimizer_steps": step,
        "bad_steps": {"total": 0, "streak": []}, "val_loss": None,
        "layout": {"pp": 1, "dp": 1, "tp": 1}, "placement": [1],
        "model": MODEL, "data_fingerprint": "abc", "tokenizer_sha256": None, "batch_tokens": 64, "sequence_length": 16,
        "phases": [], "config": {"checkpoint": {"resume": "auto"}, "training": {"steps": 9}}, "megamem": "0",
        **changes,
    }  # fmt: skip
