"""`megamem checkpoint ...`: look at checkpoints, check them, compare, thin out, merge. None of it needs a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megamem.errors import CheckpointError

if TYPE_CHECKING:
    from checkpoints.folder import Checkpoint

checkpoint_app = typer.Typer(no_args_is_help=True, help="List, check, compare, thin out and merge checkpoints.")
console = Console(soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="machine-readable")]
RunFolder = Annotated[Path, typer.Argument(help="run folder, or its checkpoints/ folder")]
OnePath = Annotated[Path, typer.Argument(help="a checkpoint (step-NNNNNNNN), or a run folder for its newest")]


def _write(value: Any) -> None:
    console.file.write(json.dumps(value) + "\n")


def _folder(path: Path) -> Path:
    """The folder that holds a run's checkpoints."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    from checkpoints.folder import FOLDER

    return path / FOLDER if (path / FOLDER).is_dir() else path


def one_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest complete one of a run."""
    from checkpoints.folder import at, checkpoints_in

    if path.name.startswith("step-"):
        return at(path)
    found = [checkpoint for checkpoint in checkpoints_in(_folder(path)) if checkpoint.complete]
    if not found:
        raise CheckpointError(f"{path}: no complete checkpoint in it")
    return found[-1]


@checkpoint_app.command("ls")
def ls(run: RunFolder, as_json: Json = False) -> None:
    """Checkpoints of a run, oldest first."""
    from checkpoints.folder import checkpoints_in

    rows: list[dict[str, Any]] = []
    for checkpoint in checkpoints_in(_folder(run)):
        saved = checkpoint.run() if checkpoint.complete else None
        rows.append(
            {
                "path": str(checkpoint.path),
                "step": checkpoint.step,
                "complete": checkpoint.complete,
                "bytes": checkpoint.bytes,
                "tokens": saved["tokens"] if saved else None,
                "val_loss": saved["val_loss"] if saved else None,
                "layout": saved["layout"] if saved else None,
            }
        )
    if as_json:
        _write(rows)
        return
    table = Table()
    for column in ("step", "tokens", "validation loss", "layout", "MB", "state"):
        table.add_column(column, justify="right" if column in ("step", "tokens", "MB") else "left")
    for row in rows:
        layout = row["layout"] or {}
        table.add_row(
            f"{row['step']:,}",
            "" if row["tokens"] is None else f"{row['tokens']:,}",
            "" if row["val_loss"] is None else f"{row['val_loss']:.4f}",
            " x ".join(f"{name.upper()} {size}" for name, size in layout.items()),
            f"{row['bytes'] / 1e6:,.1f}",
            "complete" if row["complete"] else "not written to its end",
        )
    console.print(table)


@checkpoint_app.command("show")
def show(path: OnePath, as_json: Json = False) -> None:
    """What a checkpoint holds: counters, its run, and every tensor's shape."""
    from checkpoints.storage import read_index

    checkpoint = one_checkpoint(path)
    facts, index = checkpoint.run(), read_index(checkpoint.path)
    tensors = {name: {"shape": entry["shape"], "dtype": entry["dtype"]} for name, entry in index.items()}
    counters = {key: value for key, value in facts.items() if key not in ("config", "model")}
    if as_json:
        _write({"path": str(checkpoint.path), "bytes": checkpoint.bytes, **facts, "tensors": tensors})
        return
    for key, value in counters.items():
        console.print(f"{key}: {value}", highlight=False)
    table = Table(title=f"{len(tensors)} tensors, {checkpoint.bytes / 1e6:,.1f} MB")
    for column in ("tensor", "shape", "dtype"):
        table.add_column(column)
    for name, entry in sorted(tensors.items()):
        table.add_row(name, " x ".join(map(str, entry["shape"])), entry["dtype"])
    console.print(table)


@checkpoint_app.command("verify")
def verify(path: RunFolder, as_json: Json = False) -> None:
    """Check a checkpoint, or all of a run, against their manifests; exit code 8 if one is damaged."""
    from checkpoints.folder import at, checkpoints_in
    from checkpoints.folder import verify as check

    found = [at(path)] if path.name.startswith("step-") else checkpoints_in(_folder(path))
    if not found:
        raise CheckpointError(f"{path}: no checkpoint in it")
    results = []
    for checkpoint in found:
        error = None
        try:
            check(checkpoint)
        except CheckpointError as caught:
            error = str(caught)
        results.append({"path": str(checkpoint.path), "intact": error is None, "error": error})
    if as_json:
        _write(results)
    else:
        for result in results:
            console.print(result["error"] or f"{result['path']}: intact", highlight=False)
    if bad := [result for result in results if not result["intact"]]:
        raise CheckpointError(f"{len(bad)} of {len(results)} checkpoint(s) cannot be used")


@checkpoint_app.command("diff")
def diff(
    first: OnePath,
    second: OnePath,
    limit: Annotated[int, typer.Option(min=1, help="differences shown")] = 20,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, bit by bit, whatever layouts saved them; exit code 1 if they differ."""
    from checkpoints.read import compare

    count, differences = compare(one_checkpoint(first), one_checkpoint(second))
    found = [str(difference) for difference in differences]
    if as_json:
        _write({"bitwise_equal": not found, "tensors_compared": count, "differences": found[:limit]})
    else:
        for line in found[:limit]:
            console.print(line, highlight=False)
        equal = "all equal, bit for bit" if not found else f"{len(found)} differ"
        console.print(f"{count} tensors compared: {equal}", highlight=False)
    raise typer.Exit(int(bool(found)))


@checkpoint_app.command("prune")
def prune(
    run: RunFolder,
    keep_last: Annotated[int, typer.Option(min=1, help="the newest that stay")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="multiples of this stay too")] = None,
    keep_best: Annotated[int, typer.Option(min=0, help="so many of lowest validation loss stay too")] = 0,
    as_json: Json = False,
) -> None:
    """Remove checkpoints of a run that are not to be kept."""
    from checkpoints.folder import prune as remove

    removed = [str(checkpoint.path) for checkpoint in remove(_folder(run), keep_last, keep_every, keep_best)]
    if as_json:
        _write({"removed": removed})
        return
    for path in removed:
        console.print(f"removed {path}", highlight=False)
    console.print(f"{len(removed)} removed", highlight=False)


@checkpoint_app.command("merge")
def merge(
    path: OnePath,
    out: Annotated[Path, typer.Option("--out", "-o", help="safetensors file to write")],
    as_json: Json = False,
) -> None:
    """Write a checkpoint's FP32 weights as one safetensors file of whole tensors, whatever layout saved them."""
    from checkpoints.folder import verify as check
    from checkpoints.read import merge as write

    checkpoint = one_checkpoint(path)
    check(checkpoint)
    count = write(checkpoint, out)
    if as_json:
        _write({"file": str(out), "tensors": count})
    else:
        console.print(f"{out}: {count} tensors", highlight=False)
