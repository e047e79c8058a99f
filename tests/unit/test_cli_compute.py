"""The options --dtype and --device, and paths that are printed as they are."""

import pytest
import torch
from typer.testing import CliRunner

from megamem.cli.compute import compute_device, compute_dtype
from megamem.cli.main import app
from megamem.errors import ConfigError, LayoutError
from megamem.parallel.topology import _device as topology_device


def test_types_by_name():
    assert (compute_dtype("fp32"), compute_dtype("bf16")) == (torch.float32, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"^--dtype fp16: give fp32 or bf16$"):
        compute_dtype("fp16")


@pytest.mark.parametrize(("there", "chosen"), [(False, "cpu"), (True, "cuda")])
def test_a_device_is_used_where_there_is_one(monkeypatch, there, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert compute_device(None) == torch.device(chosen)
    assert compute_device("cpu") == torch.device("cpu")


def test_devices_that_are_none(monkeypatch):
    """Torch's own errors are long, and no errors for people."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compute_device("cuda:1") == torch.device("cuda", 1)
    for name in ("gpu", "cuda:first", "CUDA"):
        with pytest.raises(ConfigError, match=rf"^--device {name}: give cpu, cuda or the number of one, as cuda:1$"):
            compute_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^--device cuda:1: torch finds no CUDA device; give cpu$"):
        compute_device("cuda:1")


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_verbs_refuse_them_before_they_read_anything(tmp_path, verb):
    options = ["--prompt", "a"] if verb == "generate" else []
    result = CliRunner().invoke(app, [verb, str(tmp_path / "nowhere"), "--device", "gpu", *options])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("--device gpu: ")


def test_a_path_with_brackets_is_printed_as_it_is(tmp_path):
    """Rich would take them for markup."""
    path = tmp_path / "[bold]draft[" / "a.png"
    sizes = ["--stages", "2", "--micro-batches", "1", "--chunks", "2"]
    result = CliRunner().invoke(app, ["plan", *sizes, "--draw-schedule", str(path)])
    assert result.exit_code == 0, result.output
    assert f"picture: {path}" in result.output.replace("\n", "")
    assert path.is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "20"], "--limit: is for --suite and --tasks, not for held-out losses"),
        (["--rows", "2"], "--rows: is for --suite and --tasks, not for held-out losses"),
        (["--transformers"], "--transformers: is for --suite and --tasks, not for held-out losses"),
        (["--only", "arc"], "--only: is for --suite, not for held-out losses"),
        (["--tasks", "piqa", "--lengths", "512"], "--lengths: is for --suite, not for --tasks"),
        (["--tasks", "piqa", "--data", "."], "--data: is for --suite, not for --tasks"),
        (["--suite", "ruler", "--include-path", "."], "--include-path: is for --tasks, not for --suite"),
        (["--suite", "ruler", "--out", "x"], "--out: is for held-out losses, not for --suite"),
        (["--suite", "ruler", "--tasks", "piqa"], "--suite and --tasks: give one of them"),
        (["a.b=1", "--suite", "ruler"], "a.b=1: overrides are for held-out losses, not for --suite and --tasks"),
    ],
)
def test_options_that_say_nothing_are_refused(tmp_path, options, message):
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "nowhere"), *options])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == message


@pytest.mark.parametrize(
    ("wanted", "ranks", "number"), [("cuda:1", 1, 1), ("cuda", 1, 0), (None, 1, 0), ("cuda:1", 2, 0), ("cuda", 2, 0)]
)
def test_the_number_of_a_device_counts_in_a_process_by_itself(monkeypatch, wanted, ranks, number):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert topology_device(wanted) == torch.device("cuda", number)
    assert chosen == [number]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(LayoutError, match=r"parallel\.device: cuda:2: there are 2 CUDA device\(s\)"):
        topology_device("cuda:2")


def test_the_demo_names_its_runs_itself(tmp_path):
    """Both runs would have the one name that is given; said before anything is fetched."""
    result = CliRunner().invoke(app, ["demo", "--folder", str(tmp_path / "data"), "name=mine"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("name=mine: the demo's two runs have names of their own")
    assert not (tmp_path / "data").exists()
