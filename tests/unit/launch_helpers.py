"""A small run, and what `megamem launch` writes for it."""

from __future__ import annotations

from pathlib import Path

from launchers.launch import load_launch
from megamem.config.load import dump_yaml
from tests.integration.commands import run_tree, write_config


def small_run(data: Path, folder: Path) -> Path:
    """Configuration file of a run of 8 sequences a step, two rows at once."""
    training = {"batch_tokens": 1024, "micro_batch_size": 2}
    return write_config(folder / "run.yaml", run_tree(data, folder / "runs", training=training))


def script(config, on, *overrides, cluster=None):
    """Text of what is written for a target."""
    launch = load_launch(config, overrides, cluster, on)
    (text,) = launch.target.files(launch.job, dump_yaml(launch.config)).values()
    return text


def option(words, name):
    return words[words.index(name) + 1]
