"""`megamem shards`: write, merge, verify and describe token shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamem.cli.options import TextField, TextInputs
from megamem.cli.output import print_facts, progress_bar, write_line
from megamem.errors import DataError

if TYPE_CHECKING:
    from tokenization.shard_format import ShardIndex

shards_app = typer.Typer(help="Write, merge, verify and describe token shards.", no_args_is_help=True)

ShardFolder = Annotated[Path, typer.Argument(help="folder of token shards")]


@shards_app.command("write")
def write(
    inputs: TextInputs,
    tokenizer: Annotated[Path, typer.Option("--tokenizer", "-t", help="tokenizer folder")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder to write the shards to")],
    workers: Annotated[int, typer.Option(min=1, help="processes")] = os.cpu_count() or 1,
    shard_mib: Annotated[
        float | None,
        typer.Option(min=0.001, help="MiB of text that close a shard; 1/64 of the inputs, 1 to 32, if not given"),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help="K/N: only the K-th of N shares of the input files, into a folder inside; then `merge`"),
    ] = None,
    text_field: TextField = "text",
) -> None:
    """Tokenize documents into shards. Run the same command again to continue after an interruption."""
    from tokenization.parts import Part
    from tokenization.prepare import write_from_files

    shard_text_bytes = int(shard_mib * 2**20) if shard_mib else None
    share = Part.parse(part) if part else None
    write_from_files(inputs, tokenizer, output, progress_bar, workers, shard_text_bytes, share, text_field)
    describe_shards(output / share.folder if share else output)


@shards_app.command("merge")
def merge(folder: Annotated[Path, typer.Argument(help="folder that holds all parts")]) -> None:
    """Write one index over the parts of a folder, so that it reads like any other. No shard is copied."""
    from tokenization.parts import merge_parts

    merge_parts(folder)
    describe_shards(folder)


@shards_app.command("verify")
def verify(folder: ShardFolder) -> None:
    """Read every shard and check its hash, token ids and document ends."""
    from megamem.data.verify import verify_shards

    index = _index(folder)
    with progress_bar("verifying", sum(record.size for record in index.shards)) as advance:
        verify_shards(folder, advance)
    write_line(f"{folder}: {len(index.shards)} shards are whole")


@shards_app.command("info")
def info(folder: ShardFolder) -> None:
    """Print counts, sizes and tokenizer of a shard folder."""
    describe_shards(folder)


def _index(folder: Path) -> ShardIndex:
    """Return the index of a finished folder of shards. Raises DataError."""
    from tokenization.shard_format import INDEX_FILE, ShardIndex

    path = folder / INDEX_FILE
    if not path.is_file():
        raise DataError(f"{path}: missing; not a finished folder of token shards")
    return ShardIndex.parse(path.read_bytes(), str(path))


def describe_shards(folder: Path) -> None:
    """Print what a folder of shards holds. Raises DataError."""
    index = _index(folder)
    print_facts(
        [
            ("folder", folder),
            ("shards", f"{len(index.shards):,} ({sum(record.size for record in index.shards):,} bytes)"),
            ("documents", f"{index.documents:,}"),
            ("tokens", f"{index.tokens:,} ({index.header.dtype})"),
            ("text", f"{index.text_bytes:,} bytes ({index.text_bytes / max(index.tokens, 1):.3f} a token)"),
            ("vocabulary", f"{index.header.vocab_size:,}"),
            ("tokenizer", index.header.tokenizer_sha256),
        ]
    )
