"""The wheel: what is in it, and that it works in an empty virtual environment, far from the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.package

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megamem", "tokenization", "checkpoints", "launchers")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
KINDS = (".py", ".html", ".typed", ".yaml")
"""Endings of all that the packages consist of."""


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this checkout and the wheel made of that sdist, as `make dist` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], check=True)
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("megamem-*-py3-none-any.whl")
    return path


def checkout() -> dict[str, bytes]:
    """The files of the packages by their installed name, those of `configs` below `megamem` among them."""
    found = {}
    for folder, name in [*((ROOT / name, name) for name in PACKAGES), (ROOT / "configs", "megamem/configs")]:
        for path in folder.rglob("*"):
            inside = path.relative_to(folder).as_posix()
            if path.is_file() and "__pycache__" not in inside and not inside.startswith("configs/"):
                found[f"{name}/{inside}"] = path.read_bytes()
    return found


def test_the_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    """Code, shipped configurations, the page of study reports and the mark of a typed package, byte for byte."""
    expected = checkout()
    assert {Path(name).suffix for name in expected} == set(KINDS)
    assert {"megamem/py.typed", "megamem/study/page.html", "megamem/configs/recipes/demo.yaml"} <= expected.keys()
    with zipfile.ZipFile(wheel) as file:
        inside = {name: file.read(name) for name in file.namelist() if ".dist-info/" not in name}
        about = {name.partition("/")[2] for name in file.namelist() if ".dist-info/" in name}
    assert inside.keys() == expected.keys()
    assert [name for name in inside if inside[name] != expected[name]] == []
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= about


def test_the_sdist_has_no_more_than_it_takes_to_build_the_wheel(dist: Path) -> None:
    (path,) = dist.glob("megamem-*.tar.gz")
    with tarfile.open(path) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}
        assert not [member.name for member in file.getmembers() if member.issym() or member.islnk()]
    rest = {name for name in names - checkout().keys() if not name.startswith("megamem.egg-info/")}
    assert names >= checkout().keys()
    assert rest == {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml", "setup.cfg"}


class Environment:
    """A virtual environment with nothing but the wheel and what it requires, and a working folder of its own."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self._install("--upgrade", "pip")  # older ones take twice as long to resolve
        torch = f"torch=={importlib.metadata.version('torch')}"
        # the CPU build is in an index of its own where the usual one has none
        if self._install(torch, check=False):
            self._install("--extra-index-url", CPU_INDEX, torch)
        self._install(str(wheel))

    def _install(self, *what: str, check: bool = True) -> int:
        pip = [self.bin / "python", "-m", "pip", "install", "-qq", "--no-compile", "-c", ROOT / "constraints.txt"]
        return subprocess.run([*pip, *what], cwd=self.work, env=self._variables(), check=check).returncode

    def _variables(self) -> dict[str, str]:
        left_out = {"VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME"}
        return {name: value for name, value in os.environ.items() if name not in left_out}

    def run(self, command: str, *arguments: str) -> str:
        """Run a program of the environment; returns its standard output."""
        words = [str(self.bin / command), *arguments]
        done = subprocess.run(
            words, cwd=self.work, env=self._variables(), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def environment(wheel: Path) -> Iterator[Environment]:
    with tempfile.TemporaryDirectory() as folder:  # a gigabyte, which pytest would keep
        yield Environment(Path(folder), wheel)


def test_requirements_are_met(environment: Environment) -> None:
    environment.run("python", "-m", "pip", "check")
    findings = json.loads(environment.run("megamem", "doctor", "--json"))
    assert "megatron-core" in json.dumps(findings)


LIBRARY = """
import torch, megamem
assert megamem.__file__.startswith({prefix!r}), megamem.__file__

{readme}
block = Block(64)
hidden, state = block(torch.randn(2, 300, 64))
hidden, state = block(hidden, state)
hidden.square().mean().backward()
assert all(parameter.grad is not None for parameter in block.parameters())

from megamem.memory.base import Chunk
config = megamem.load_config("configs/recipes/demo.yaml", ["model.layers=2", "model.memory.0.layers=[1]"])
model = megamem.build_model(config, seed=1)
states = model.initial_states(2, torch.device("cpu"), torch.float32)
tokens = torch.randint(4096, (256, 2))
for number in range(2):
    hidden, states, _ = model.read_chunk(tokens, states, Chunk((256 * number,) * 2))
torch.nn.functional.cross_entropy(model.logits(hidden).flatten(0, 1), tokens.flatten()).backward()
norms = {{name: float(parameter.grad.norm()) for name, parameter in model.named_parameters()}}
assert all(0 < norm < float("inf") for norm in norms.values()), norms
print("done")
"""


def test_the_library(environment: Environment) -> None:
    """The README's lines, and a shipped model: gradients of two chunks reach every parameter."""
    section = (ROOT / "README.md").read_text().partition("\n## As a library\n")[2].partition("\n## ")[0]
    (readme,) = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    code = LIBRARY.format(prefix=str(environment.bin.parent), readme=readme)
    assert environment.run("python", "-c", code).endswith("done\n")


def test_the_command(environment: Environment) -> None:
    """Every mechanism is there; a shipped recipe is planned by the path that a checkout has."""
    assert "start-from" in environment.run("megamem", "--help")
    listed = environment.run("megamem", "mechanisms")
    for kind in ("elastic_memory", "titans", "log_linear", "local_attention"):
        assert kind in listed
    recipe, model = "configs/recipes/elastic_memory.yaml", "configs/models/elastic_memory/elastic-100m.yaml"
    plan = environment.run("megamem", "plan", recipe, "--model", model, "--devices", "8", "--json")
    assert json.loads(plan)["name"] == "elastic-100m"


def test_a_training(environment: Environment) -> None:
    """Two steps of a shipped run on shipped tasks, with DeepSpeed; evaluated and saved."""
    run = "configs/studies/caching/mqar_small.yaml"
    environment.run("megamem", "train", run, "training.steps=2", "evaluation.final_max_tokens=2048")
    assert (environment.work / "runs" / "mqar" / "result.json").is_file()
