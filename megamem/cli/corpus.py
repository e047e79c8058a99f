"""`megamem corpus`: text to train on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from megamem.cli.output import console, progress_bar

corpus_app = typer.Typer(help="Fetch free text to train on, or split yours.", no_args_is_help=True)

CorpusName = Annotated[
    str, typer.Option("--corpus", help="books, speeches, proofs, or default, which is books and speeches")
]


@corpus_app.command("fetch")
def fetch(
    folder: Annotated[Path, typer.Argument(help="folder to write train/, validation/ and test/ to")],
    name: CorpusName = "default",
) -> None:
    """Download, check, clean and split a corpus. A folder that holds it already is verified."""
    from tokenization import corpus

    corpus.fetch(folder, name)
    _describe(folder)


@corpus_app.command("prepare")
def prepare(
    folder: Annotated[Path, typer.Argument(help="folder to write corpus/, tokenizer/ and shards/ to")],
    name: CorpusName = "default",
    vocab_size: Annotated[int, typer.Option(help="tokens of its byte-level BPE")] = 4096,
    workers: Annotated[int, typer.Option(min=1, help="processes")] = os.cpu_count() or 1,
) -> None:
    """Fetch a corpus, train a tokenizer on its training part, write token shards. What is there is checked and kept."""
    from megamem.cli.shards import describe_shards
    from megamem.cli.tokenizer import describe_tokenizer
    from tokenization import prepare as preparing

    describe = {"corpus": _describe, "tokenizer": describe_tokenizer, "shards": describe_shards}
    for part, path in preparing.prepare(folder, name, vocab_size, workers, progress_bar):
        describe[part](path)


@corpus_app.command("split")
def split(
    source: Annotated[Path, typer.Argument(help="enwik8 or text8, as it is or as .zip")],
    folder: Annotated[Path, typer.Argument(help="folder to write train/, validation/ and test/ to")],
    without_line_ends: Annotated[
        bool,
        typer.Option("--without-line-ends", help="leave line breaks out, as published figures of enwik8 often do"),
    ] = False,
) -> None:
    """Split a local copy of enwik8 or text8 as is usual: the first 90 million bytes, the next five, the last five."""
    from tokenization import enwik8

    table = Table("split", "bytes", "characters")
    for name, size in enwik8.split(source, folder, line_ends=not without_line_ends).items():
        table.add_row(name, f"{size.bytes:,}", f"{size.characters:,}")
    console.print(table)


def _describe(folder: Path) -> None:
    """Print what each split of a corpus holds."""
    from megamem.files import read_json
    from tokenization.corpus import MANIFEST

    table = Table("split", "documents", "bytes")
    for split, totals in read_json(folder / MANIFEST)["splits"].items():
        table.add_row(split, f"{totals['documents']:,}", f"{totals['bytes']:,}")
    console.print(table)
