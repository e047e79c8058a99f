"""The `megamem` command. Verbs import what they need when they run, so that `--help` is instant."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from launchers.local_ranks import inside_job, run_local
from megamem.cli.checkpoint import checkpoint_app
from megamem.cli.data import corpus_app, shards_app, tokenizer_app
from megamem.cli.launch import agent, launch
from megamem.cli.models import convert_app, evaluate, generate
from megamem.cli.options import ModelFile, Overrides, RecipePath
from megamem.cli.plan import plan
from megamem.cli.preflight import preflight
from megamem.cli.status import runs, status
from megamem.cli.study import study_app
from megamem.cli.wandb import wandb_app
from megamem.errors import STOPPED, CheckpointError, ConfigError, MegamemError, NonFiniteError, RunFolderError

if TYPE_CHECKING:
    from megamem.config.run import RunConfig

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(corpus_app, name="corpus")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(shards_app, name="shards")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(convert_app, name="convert")
app.add_typer(study_app, name="study")
app.add_typer(wandb_app, name="wandb")
app.command()(plan)
app.command()(generate)
app.command()(evaluate)
app.command()(status)
app.command()(runs)
app.command()(preflight)
app.command()(launch)
app.command(hidden=True)(agent)
console = Console(soft_wrap=True)


@app.command()
def train(
    config: RecipePath,
    overrides: Overrides = None,
    model: ModelFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print everything, run one mock step, write nothing")
    ] = False,
    processes: Annotated[int | None, typer.Option(help="local processes; PP x TP x DP if not given")] = None,
    resume: Annotated[str | None, typer.Option(help="auto, none or a checkpoint; as checkpoint.resume")] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="skip damaged checkpoints; as checkpoint.fallback")
    ] = False,
) -> None:
    """Train a model. Under torchrun this is one rank; otherwise the local processes are started for you."""
    from megamem.config.recipe import load_run
    from megamem.training.checks import check_kernels, check_layout, check_run

    overrides = [
        *(overrides or []),
        *([f"checkpoint.resume={resume}"] if resume else []),
        *(["checkpoint.fallback=true"] if fallback else []),
    ]
    settings = load_run(config, overrides, model)
    if inside_job():
        count = int(os.environ["WORLD_SIZE"])
    else:
        count = processes or settings.parallel.tp * settings.parallel.pp * (settings.parallel.dp or 1)
    if os.environ.get("RANK", "0") == "0":  # the others wait for rank 0 to join, and end with it
        check_kernels(settings)
        (check_layout if dry_run else check_run)(settings, count)
    _prepare_processor(settings.training.precision)
    if inside_job() or count == 1:
        _rank(settings, dry_run)
        return
    flags = [*(["--model", str(model)] if model else []), *(["--dry-run"] if dry_run else [])]
    raise typer.Exit(run_local(count, ["train", str(config), *overrides, *flags]))


def _stopped(settings: RunConfig) -> str:
    """What is said of a run that ended before its last step."""
    cause = "as training.stop_after says" if settings.training.stop_after else "by a signal at a step border"
    again = "the same command goes on" if settings.checkpoint.resume == "auto" else "checkpoint.resume=auto goes on"
    return f"stopped {cause}; the checkpoint is saved, and {again}"


def _prepare_processor(precision: str) -> None:
    from megamem.hardware import avoid_broken_amx

    if precision == "bf16" and (line := avoid_broken_amx()) and os.environ.get("LOCAL_RANK", "0") == "0":
        console.print(line, highlight=False)


def _rank(settings: object, dry: bool) -> None:
    from megamem.config.run import RunConfig
    from megamem.training.dry_run import dry_run
    from megamem.training.train import train as train_rank

    assert isinstance(settings, RunConfig)
    if dry:
        dry_run(settings, console)
        return
    result = train_rank(settings, console)
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if result is None:
        if is_rank_0:
            console.print(_stopped(settings))
        raise typer.Exit(STOPPED)
    if is_rank_0:
        console.file.write(json.dumps(result.to_dict()) + "\n")
        console.file.flush()


@app.command("start-from")
def start_from(
    weights: Annotated[Path, typer.Argument(help="safetensors file of a run's weights")],
    config: RecipePath,
    overrides: Overrides = None,
    model: ModelFile = None,
    processes: Annotated[int | None, typer.Option(help="local processes; PP x TP x DP if not given")] = None,
) -> None:
    """Train from given weights instead of random ones: a new run, with its own data, schedule and optimizer state."""
    if not weights.is_file():
        raise CheckpointError(f"{weights}: no such weights file; megamem checkpoint merge makes one from a checkpoint")
    train(config, [*(overrides or []), f"training.init_from={weights}"], model, processes=processes)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="where corpus, tokenizer and shards go")] = Path("runs/demo-data"),
    config: Annotated[Path, typer.Option(help="the run")] = Path("configs/recipes/demo.yaml"),
    overrides: Overrides = None,
) -> None:
    """From nothing to a trained model on real books: fetch, tokenize, shard, train on two processes, evaluate."""
    from megamem.cli.demo import run_demo

    raise typer.Exit(run_demo(folder, config, overrides or [], console))


@app.command("verify-resume")
def verify_resume(
    config: RecipePath,
    overrides: Overrides = None,
    model: ModelFile = None,
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps of each run; even")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Train some steps straight and in two halves with fresh processes; exit code 0 only if they agree bit for bit."""
    import subprocess

    from megamem.cli.verify_resume import verify_resume as check
    from megamem.config.recipe import load_run

    if steps % 2:
        raise ConfigError(f"verify-resume: --steps {steps} has no half; give an even number")
    settings = load_run(config, overrides or [], model)

    def run(arguments: list[str]) -> int:
        command = [sys.executable, "-m", "megamem", *arguments]
        return subprocess.run(command, stdout=sys.stderr if as_json else None, check=False).returncode

    arguments = [str(config), *(["--model", str(model)] if model else []), *(overrides or [])]
    report = check(arguments, settings, steps, run)
    if as_json:
        found = {"bitwise_equal": report.bitwise_equal, "tensors_compared": report.tensors_compared}
        console.file.write(json.dumps({**found, "steps": steps, "differences": report.differences}) + "\n")
    else:
        for line in report.differences:
            console.print(line, highlight=False)
        equal = "equal, bit for bit" if report.bitwise_equal else "NOT EQUAL"
        console.print(f"{report.tensors_compared} tensors after {steps} steps: {equal}", highlight=False)
    raise typer.Exit(int(not report.bitwise_equal))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False) -> None:
    """Versions, devices, what is missing and what that costs, and a two-process self-test."""
    from megamem.cli.doctor import run_doctor

    raise typer.Exit(0 if run_doctor(console, as_json) else 1)


@app.command()
def mechanisms() -> None:
    """List every registered mixer with its fields."""
    from megamem.config.model import MIXERS

    for kind, config in MIXERS.kinds().items():
        console.print(f"[bold]{kind}[/bold]  {(config.__doc__ or '').splitlines()[0]}", highlight=False)
        for name, field in config.__pydantic_fields__.items():
            if name != "kind":
                console.print(f"    {name} = {field.default}: {field.description}", highlight=False, markup=False)


def main() -> None:
    """Entry point: a MegamemError becomes one line on stderr and its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app(standalone_mode=True)
    except MegamemError as error:
        if line := _line(error):
            sys.stderr.write(line)
            sys.stderr.flush()
        _leave(error.exit_code)
    except RuntimeError as error:
        if not inside_job() or "by peer" not in str(error):
            raise
        sys.stderr.write(f"megamem: rank {os.environ['RANK']}: lost its connection to another rank, which has ended\n")
        _leave(MegamemError.exit_code)


def _line(error: MegamemError) -> str | None:
    """What this process says of an error; of what all ranks of a job find, the first speaks for all."""
    rank = os.environ.get("RANK", "0") if inside_job() else "0"
    if isinstance(error, ConfigError | NonFiniteError | CheckpointError | RunFolderError):
        return f"megamem: {error}\n" if os.environ.get("LOCAL_RANK", "0") == "0" else None
    named = rank == "0" or str(error).startswith("rank ")
    return f"megamem: {error}\n" if named else f"megamem: rank {rank}: {error}\n"


def _leave(code: int) -> None:
    """End this rank now: its peers may sit in a collective that will never complete."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if inside_job():
        os._exit(code)
    sys.exit(code)
