"""README.md as a new user types it: every block in the order given, verbatim, in a folder that holds some text only."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.integration.commands import environment
from tests.snippets import ROOT, run_snippets, snippets
from tests.unit.data_helpers import write_corpus

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKE, COMMANDS = (block.text for block in snippets("README.md", "bash"))


class Typed(NamedTuple):
    """What came of the README's blocks."""

    folder: Path
    commands: str
    """Standard output of the commands."""
    python: str
    """Standard output of the lines in Python."""
    names: dict[str, Any]
    """What these lines leave."""


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Typed:
    folder = tmp_path_factory.mktemp("new_user")
    write_corpus(folder / "text" / "train", (900, 700, 800))
    write_corpus(folder / "text" / "validation", (300,), seed=9)
    # `megamem` is the command that was installed beside the interpreter of the tests
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", COMMANDS], cwd=folder, env=environment() | {"PATH": path},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        names = run_snippets("README.md")
    return Typed(folder, ran.stdout, said.getvalue(), names)


def test_continuous_integration_runs_the_make_targets() -> None:
    """`make demo` trains for minutes; a few of its steps are run below."""
    assert re.findall(r"^make (\S+)", MAKE, re.MULTILINE) == ["demo", "test"]
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


def test_every_command_is_in_a_block() -> None:
    """What the table of tasks names is typed above it, but for what needs a cluster or trains several models."""
    named = set(re.findall(r"`megamem ((?:tokenizer |shards |study )?[a-z]+)", README))
    typed = set(re.findall(r"^ *megamem ((?:tokenizer |shards |study )?[a-z]+)", COMMANDS, re.MULTILINE))
    assert named - typed == {"launch", "study run"}


def test_commands_train_and_read_one_model(typed: Typed) -> None:
    result = json.loads((typed.folder / "runs/small/result.json").read_text())
    assert result["steps"] == 10
    assert "10 of 10" in typed.commands, "megamem status"
    evaluated = re.search(r"small, step 10\n.*?held-out tokens predicted\s+│\s+([\d,]+) │", typed.commands, re.DOTALL)
    assert evaluated is not None
    assert int(evaluated[1].replace(",", "")) == result["val_tokens"]
    assert "logits differ from the training model's by at most" in typed.commands


def test_transformers_continues_as_the_trained_model_does(typed: Typed) -> None:
    """Both greedy and in FP32; the command prints what is new only."""
    new = typed.python.removeprefix("It was").strip()
    assert typed.python.startswith("It was")
    assert new
    assert new in typed.commands


def test_a_loss_reaches_the_weights_of_the_block(typed: Typed) -> None:
    """In a model of somebody else's, through two calls of the memory."""
    made = typed.names["Block"](64)
    hidden, state = made(torch.randn(2, 100, 64))
    hidden, state = made(hidden, state)
    hidden.square().mean().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_the_demo_runs_from_nothing_to_a_comparison(tmp_path: Path) -> None:
    """What `make demo` calls, in an empty folder and with the real corpus, but for a few steps of its 500."""
    (called,) = re.findall(r"^demo: install.*\n\t\$\(BIN\)/(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    called = called.removesuffix(" $(OVERRIDES)")
    few = ["training.steps=2", "optimizer.warmup_ratio=0.5", "evaluation.every=2", "evaluation.max_tokens=2048"]
    ran = subprocess.run(
        [*called.split(), *few, "evaluation.final_max_tokens=4096"], cwd=tmp_path, env=environment() | {"PATH": path},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    runs = tmp_path / "runs"
    results = {}
    for which in ("without", "memory"):
        (run,) = runs.glob(f"demo-*-{which}")
        results[which] = json.loads((run / "result.json").read_text())
        assert results[which]["steps"] == 2
        # two steps leave the model near a uniform guess among 4,096 tokens
        assert results[which]["val_loss"] == pytest.approx(math.log(4096), rel=0.1)
        assert (run / "evaluation.png").stat().st_size > 0
    (compared,) = runs.glob("demo-*-comparison")
    without, memory = json.loads((compared / "comparison.json").read_text())["models"]
    assert memory["loss"] == pytest.approx(results["memory"]["beyond_first_chunk_loss"], rel=1e-12)
    assert without["memory_gain"]["value"] == 0
    (helped,) = runs.glob("demo-*-remembered")
    groups = json.loads((helped / "remembered.json").read_text())["groups"]
    # read again, by another process: sums of the same losses in another order
    assert groups[-1]["gain"] == pytest.approx(results["memory"]["memory_gain"], abs=1e-5)
    assert f"{compared.relative_to(tmp_path)}/comparison.png" in ran.stdout
