"""The Makefile where paths hold spaces and letters beyond ASCII, with programs that only write down their arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = '#!/bin/sh\necho "$(basename "$0"): $*"\n'


def environment_at(folder: Path) -> None:
    """What `make install` leaves there, newer than what it is made from."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "megamem"):
        (folder / "bin" / name).write_text(PROGRAM)
        (folder / "bin" / name).chmod(0o755)
    (folder / ".megamem-installed").touch()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "my möbel folder"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "tests").mkdir()
    for name, mark in (("test_one.py", "distributed"), ("test_two.py", "alone")):
        (folder / "tests" / name).write_text(f"import pytest\n\npytestmark = pytest.mark.{mark}\n")
    return folder


def make(checkout: Path, *words: str, **variables: str) -> list[str]:
    """The lines that `make` leaves; those that it begins with `-` are left out."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")}
    ran = subprocess.run(
        ["make", "--silent", *words], cwd=checkout, env=kept | variables, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_commands_of_the_readme(checkout: Path) -> None:
    environment_at(checkout / ".venv")
    assert make(checkout, "demo") == ["megamem: demo"]
    assert make(checkout, "demo", "OVERRIDES=training.steps=2 seed=3") == ["megamem: demo training.steps=2 seed=3"]
    first, second = make(checkout, "test")
    assert first.startswith("python: -m pytest -m not slow and not gpu and not alone -n 3")
    assert second == "python: -m pytest -m not slow and not gpu and alone tests/test_two.py"


def test_an_active_environment_is_used(checkout: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "another  möbel folder" / "venv"
    environment_at(elsewhere)
    assert make(checkout, "demo", VIRTUAL_ENV=str(elsewhere)) == ["megamem: demo"]
    assert not (checkout / ".venv").exists()


def test_what_is_not_installed_yet_is_installed_once(checkout: Path) -> None:
    environment_at(checkout / ".venv")
    (checkout / ".venv/.megamem-installed").unlink()
    said = make(checkout, "install", "TORCH=torch")
    assert said[0] == f"Installing into {checkout}/.venv: one to two minutes, without a compiler"
    assert "-c constraints.txt torch" in said[1]
    assert said[2].endswith("-e .[dev]")
    assert (checkout / ".venv/.megamem-installed").exists()
    assert make(checkout, "install") == []
