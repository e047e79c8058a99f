"""The command as a user types it, and configurations of a few steps on a tiny corpus."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from megamem.config.load import merge

VOCABULARY, CHUNK, LENGTH = 320, 32, 128


def run_tree(corpus: Path, runs: Path, **sections: Any) -> dict[str, Any]:
    """A run of 6 steps: two layers, one of them with a memory; `sections` are merged over it."""
    tree = {
        "name": "run",
        "runs_folder": str(runs),
        "model": {
            "layers": 2,
            "hidden_size": 32,
            "heads": 4,
            "vocab_size": VOCABULARY,
            "chunk_size": CHUNK,
            "memory": [{"layers": [1], "mixer": {"kind": "elastic_memory", "order": 8, "block": 8}}],
        },
        "data": {
            "sources": [str(corpus / "train")],
            "validation": [str(corpus / "validation")],
            "tokenizer": str(corpus / "tokenizer"),
            "sequence_length": LENGTH,
            "documents": "drop",
        },
        "training": {"steps": 6, "batch_tokens": 4 * LENGTH, "micro_batch_size": 2, "precision": "fp32"},
        "parallel": {"device": "cpu", "timeout_s": 180, "stall_timeout_s": 150},
        "evaluation": {"every": 3, "max_tokens": 256, "final_max_tokens": 512, "sliding_max_tokens": 128},
        "logging": {"every": 2, "wandb": {"mode": "disabled"}},
    }
    return merge(tree, sections)


def write_config(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def environment() -> dict[str, str]:
    """Of a user's shell, with one thread per process and no settings of a job around it."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def megamem(*arguments: str, launcher: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
    """The running command; with `launcher`, its module and arguments before it."""
    words = [sys.executable, *(("-m", *launcher) if launcher else ()), "-m", "megamem", *arguments]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()} | options
    return subprocess.Popen(words, text=True, **settings)


def torchrun(processes: int) -> tuple[str, ...]:
    return ("torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


def finish(process: subprocess.Popen[str], timeout_s: float = 600) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); a command that takes longer is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not done in {timeout_s} s\n{out}\n{err}") from None
    return process.returncode, out, err
