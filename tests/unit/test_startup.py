"""What starting costs and says: `import megamem` and `megamem --help` load nothing heavy, libraries make no noise."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "torch", "numpy", "pydantic", "yaml", "deepspeed", "megatron", "transformers", "pyarrow", "fsspec", "tokenizers",
    "sentencepiece", "safetensors", "matplotlib", "scipy", "wandb", "plotly", "zstandard", "multiprocessing",
}  # fmt: skip
GENEROUS_S = 15
"""Bound of a start on a busy machine; a quiet one takes a third of a second."""


def loaded(code: str) -> tuple[set[str], float]:
    """The packages that a new process has loaded after `code`, and its seconds."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", f"{code}\nimport sys\nsys.stderr.write(' '.join(sys.modules))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}, time.perf_counter() - begin


HELP = """
from megamem.cli.main import app
app({arguments}, standalone_mode=False)
"""


@pytest.mark.parametrize("code", ["import megamem", HELP.format(arguments=["--help"])], ids=["import", "help"])
def test_nothing_heavy_is_loaded(code: str) -> None:
    packages, seconds = loaded(code)
    assert not packages & HEAVY
    assert seconds < GENEROUS_S


@pytest.mark.parametrize("verb", ["train", "plan", "shards", "evaluate", "study"])
def test_help_of_a_verb_loads_nothing_heavy_either(verb: str) -> None:
    """Newer releases of typer load pydantic for any verb themselves."""
    packages, seconds = loaded(HELP.format(arguments=[verb, "--help"]))
    assert not packages & (HEAVY - {"pydantic"})
    assert seconds < GENEROUS_S


def test_the_package_alone_loads_little() -> None:
    assert not loaded("import megamem")[0] & {"typer", "rich", "launchers", "checkpoints", "tokenization"}


def test_the_test_sees_what_is_loaded() -> None:
    assert "yaml" in loaded("import megamem.config.load")[0]


def test_a_home_that_cannot_be_written_is_no_news(tmp_path: Path) -> None:
    """matplotlib would say so, and that it looks for fonts."""
    (tmp_path / "file").touch()
    code = "import megamem.cli.main as cli\ncli.app = lambda **_: __import__('matplotlib.font_manager')\ncli.main()"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "XDG_"))}
    command = [sys.executable, "-c", code]
    home = {"HOME": str(tmp_path / "file" / "home")}
    done = subprocess.run(command, cwd=ROOT, env=kept | home, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
