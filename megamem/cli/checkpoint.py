"""`megamem checkpoint`: list, show, verify, compare, prune and merge checkpoints, all without a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from megamem.cli.options import Json
from megamem.cli.output import console, write_json, write_line
from megamem.errors import CheckpointError

if TYPE_CHECKING:
    from checkpoints.folder import Checkpoint
    from checkpoints.records import SavedRun

checkpoint_app = typer.Typer(no_args_is_help=True, help="List, check, compare, thin out and merge checkpoints.")

RunFolder = Annotated[str, typer.Argument(help="run folder, or the folder or URL of its checkpoints")]
OnePath = Annotated[
    str, typer.Argument(help="folder or URL of a checkpoint (step-NNNNNNNN), or of a run for its newest")
]


@checkpoint_app.command("ls")
def ls(run: RunFolder, as_json: Json = False) -> None:
    """List the checkpoints of a run, oldest first."""
    from checkpoints.find import checkpoints_folder
    from checkpoints.folder import checkpoints_in

    found: list[tuple[Checkpoint, SavedRun | None, str]] = []
    for one in checkpoints_in(checkpoints_folder(run), True):
        if not one.complete:
            found.append((one, None, "not written to its end"))
            continue
        try:
            found.append((one, one.run(), "complete"))
        except CheckpointError:
            found.append((one, None, "cannot be read"))
    if as_json:
        write_json(
            [
                {
                    "path": str(checkpoint.path),
                    "step": checkpoint.step,
                    "complete": checkpoint.complete,
                    "bytes": checkpoint.bytes,
                    "tokens": saved and saved["tokens"],
                    "val_loss": saved and saved["val_loss"],
                    "layout": saved and saved["layout"],
                }
                for checkpoint, saved, _ in found
            ]
        )
        return
    table = Table()
    for column in ("step", "tokens", "validation loss", "layout", "MB", "state"):
        table.add_column(column, justify="right" if column in ("step", "tokens", "MB") else "left")
    for checkpoint, saved, state in found:
        described = ("", "", "")
        if saved is not None:
            loss, layout = saved["val_loss"], saved["layout"]
            described = (
                f"{saved['tokens']:,}",
                "" if loss is None else f"{loss:.4f}",
                " x ".join(f"{name.upper()} {size}" for name, size in layout.items()),
            )
        table.add_row(f"{checkpoint.step:,}", *described, f"{checkpoint.bytes / 1e6:,.1f}", state)
    console.print(table)


@checkpoint_app.command("show")
def show(path: OnePath, as_json: Json = False) -> None:
    """Show what a checkpoint holds: counters, its run, and every tensor's shape."""
    from checkpoints.find import find_checkpoint
    from checkpoints.storage import read_index

    checkpoint = find_checkpoint(path)
    facts, index = checkpoint.run(), read_index(checkpoint.path)
    tensors = {name: {"shape": entry["shape"], "dtype": entry["dtype"]} for name, entry in index.items()}
    counters = {key: value for key, value in facts.items() if key not in ("config", "model")}
    if as_json:
        write_json({"path": str(checkpoint.path), "bytes": checkpoint.bytes, **facts, "tensors": tensors})
        return
    for key, value in counters.items():
        write_line(f"{key}: {value}")
    table = Table(title=f"{len(tensors)} tensors, {checkpoint.bytes / 1e6:,.1f} MB")
    for column in ("tensor", "shape", "dtype"):
        table.add_column(column)
    for name, entry in sorted(index.items()):
        table.add_row(name, " x ".join(map(str, entry["shape"])), entry["dtype"])
    console.print(table)


@checkpoint_app.command("verify")
def verify(path: RunFolder, as_json: Json = False) -> None:
    """Check a checkpoint, or all of a run, against their manifests; exit code 8 if one is damaged."""
    from checkpoints.find import checkpoints_folder, is_checkpoint
    from checkpoints.folder import checkpoints_in, open_checkpoint
    from checkpoints.verify import verify as check

    found = [open_checkpoint(path)] if is_checkpoint(path) else checkpoints_in(checkpoints_folder(path))
    if not found:
        raise CheckpointError(f"{path}: no checkpoint in it")
    errors: dict[str, str | None] = {}
    for checkpoint in found:
        errors[str(checkpoint.path)] = None
        try:
            check(checkpoint)
        except CheckpointError as caught:
            errors[str(checkpoint.path)] = str(caught)
    if as_json:
        write_json([{"path": name, "intact": error is None, "error": error} for name, error in errors.items()])
    else:
        for name, error in errors.items():
            write_line(error or f"{name}: intact")
    if bad := [error for error in errors.values() if error is not None]:
        raise CheckpointError(f"{len(bad)} of {len(errors)} checkpoint(s) cannot be used")


@checkpoint_app.command("diff")
def diff(
    first: OnePath,
    second: OnePath,
    limit: Annotated[int, typer.Option(min=1, help="differences shown")] = 20,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, bit by bit, whatever layouts saved them; exit code 1 if they differ."""
    from checkpoints.find import find_checkpoint
    from checkpoints.read import compare

    count, differences = compare(find_checkpoint(first), find_checkpoint(second))
    found = [str(difference) for difference in differences]
    if as_json:
        write_json({"bitwise_equal": not found, "tensors_compared": count, "differences": found[:limit]})
    else:
        for line in found[:limit]:
            write_line(line)
        equal = "all equal, bit for bit" if not found else f"{len(found)} differ"
        write_line(f"{count} tensors compared: {equal}")
    raise typer.Exit(int(bool(found)))


@checkpoint_app.command("prune")
def prune(
    run: RunFolder,
    keep_last: Annotated[int, typer.Option(min=1, help="the newest that stay")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="multiples of this stay too")] = None,
    keep_best: Annotated[int, typer.Option(min=0, help="so many of lowest validation loss stay too")] = 0,
    keep_step: Annotated[list[int] | None, typer.Option(help="this step stays too; may be repeated")] = None,
    as_json: Json = False,
) -> None:
    """Remove checkpoints of a run that are not to be kept."""
    from checkpoints.find import checkpoints_folder
    from checkpoints.retention import prune as remove

    pruned = remove(checkpoints_folder(run), keep_last, keep_every, keep_best, keep_step or ())
    removed = [str(checkpoint.path) for checkpoint in pruned.removed]
    if as_json:
        write_json({"removed": removed})
    else:
        for path in removed:
            write_line(f"removed {path}")
        write_line(f"{len(removed)} removed")
    if pruned.failed:
        left, reason = next(iter(pruned.failed.items()))
        others = f", and {len(pruned.failed) - 1} more" if len(pruned.failed) > 1 else ""
        raise CheckpointError(f"{left}: cannot be removed ({reason}){others}")


@checkpoint_app.command("merge")
def merge(
    path: OnePath,
    out: Annotated[Path, typer.Option("--out", "-o", help="safetensors file to write")],
    as_json: Json = False,
) -> None:
    """Write a checkpoint's FP32 weights as one safetensors file of whole tensors, whatever layout saved them."""
    from checkpoints.find import find_checkpoint
    from checkpoints.read import merge_weights
    from checkpoints.verify import verify as check

    checkpoint = find_checkpoint(path)
    check(checkpoint, skip_extents=True)
    count = merge_weights(checkpoint, out)
    if as_json:
        write_json({"file": str(out), "tensors": count})
    else:
        write_line(f"{out}: {count} tensors")
