"""Commands on data: `megamem corpus`, `megamem tokenizer` and `megamem shards`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from megamem.data.verify import verify_shards
from megamem.errors import DataError
from megamem.files import read_json, require_space
from tokenization import corpus, importing, shards, sources, train
from tokenization.shard_format import INDEX_FILE, ShardIndex
from tokenization.tokenizer import Tokenizer

corpus_app = typer.Typer(help="Fetch free text to train on.", no_args_is_help=True)
tokenizer_app = typer.Typer(help="Train or import a tokenizer.", no_args_is_help=True)
shards_app = typer.Typer(help="Write, verify and describe token shards.", no_args_is_help=True)

console = Console(soft_wrap=True)

Inputs = Annotated[
    list[Path], typer.Argument(help="Files or folders of .txt, .jsonl(.gz/.zst) or .parquet with a text column.")
]
ShardFolder = Annotated[Path, typer.Argument(help="Folder of token shards.")]

TOKENIZER_BYTES = 32 << 20  # the largest tokenizers in use take about 20 MB


CorpusName = Annotated[str, typer.Option("--corpus", help=f"{', '.join(corpus.CORPORA)}; default: books, speeches")]


@corpus_app.command("fetch")
def fetch(
    folder: Annotated[Path, typer.Argument(help="Folder to write train/, validation/ and test/ to.")],
    name: CorpusName = "default",
) -> None:
    """Download, check, clean and split a corpus. A folder that holds it already is verified."""
    manifest = read_json(corpus.fetch(folder, name))
    table = Table("split", "documents", "bytes")
    for split, totals in manifest["splits"].items():
        table.add_row(split, f"{totals['documents']:,}", f"{totals['bytes']:,}")
    console.print(table)


@corpus_app.command("prepare")
def prepare(
    folder: Annotated[Path, typer.Argument(help="Folder to write corpus/, tokenizer/ and shards/ to.")],
    name: CorpusName = "default",
    vocab_size: Annotated[int, typer.Option(help="Tokens of its byte-level BPE.")] = 4096,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Fetch a corpus, train a tokenizer on its training part, write token shards. What is there is checked and kept."""
    texts, words = folder / "corpus", folder / "tokenizer"
    fetch(texts, name)
    if words.exists():
        Tokenizer.load(words)
    else:
        train_tokenizer([texts / "train"], words, vocab_size)
    for split in ("train", "validation", "test"):
        if (texts / split).is_dir():  # not every corpus has all
            write([texts / split], words, folder / "shards" / split, workers=workers, shard_mib=None)


@tokenizer_app.command("train")
def train_tokenizer(
    inputs: Inputs,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the tokenizer to.")],
    vocab_size: Annotated[int, typer.Option(help="Tokens, the 256 bytes and the end of document included.")] = 32000,
) -> None:
    """Train a byte-level BPE tokenizer."""
    files = sources.input_files(inputs)
    require_space(output, TOKENIZER_BYTES)
    with _progress("reading", sum(file.path.stat().st_size for file in files)) as advance:
        tokenizer = train.train(_texts(files, advance), vocab_size, output)
    _describe_tokenizer(output, tokenizer)
    if tokenizer.vocab_size < vocab_size:
        console.print(f"The text holds pairs for {tokenizer.vocab_size:,} tokens only, not for {vocab_size:,}.")


@tokenizer_app.command("import")
def import_tokenizer(
    source: Annotated[
        Path,
        typer.Argument(help="tokenizer.json, a folder with it, GPT-2's two files, or a SentencePiece .model."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the tokenizer to.")],
    eos: Annotated[str | None, typer.Option(help="Token that ends documents, if the source does not say.")] = None,
) -> None:
    """Import a Hugging Face or SentencePiece tokenizer."""
    require_space(output, TOKENIZER_BYTES)
    _describe_tokenizer(output, importing.import_tokenizer(source, output, eos))


@shards_app.command("write")
def write(
    inputs: Inputs,
    tokenizer: Annotated[Path, typer.Option("--tokenizer", "-t", help="Tokenizer folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the shards to.")],
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    shard_mib: Annotated[
        float | None,
        typer.Option(min=0.001, help="MiB of text that close a shard. Default: 1/64 of the inputs, 1 to 32 MiB."),
    ] = None,
) -> None:
    """Tokenize documents into shards. Run the same command again to continue after an interruption."""
    total = sum(file.path.stat().st_size for file in sources.input_files(inputs))
    with _progress("tokenizing", total) as advance:
        index = shards.write_shards(
            inputs,
            tokenizer,
            output,
            workers=workers,
            shard_text_bytes=int(shard_mib * 2**20) if shard_mib else None,
            on_progress=advance,
        )
    _describe_shards(output, index)


@shards_app.command("verify")
def verify(folder: ShardFolder) -> None:
    """Read every shard and check its hash, token ids and document ends."""
    index = _index(folder)
    with _progress("verifying", sum(record.size for record in index.shards)) as advance:
        verify_shards(folder, advance)
    console.print(f"{folder}: {len(index.shards)} shards are whole")


@shards_app.command("info")
def info(folder: ShardFolder) -> None:
    """Counts, sizes and tokenizer of a shard folder."""
    _describe_shards(folder, _index(folder))


def _index(folder: Path) -> ShardIndex:
    path = folder / INDEX_FILE
    if not path.is_file():
        raise DataError(f"{path}: missing; not a finished folder of token shards")
    return ShardIndex.parse(path.read_bytes(), str(path))


def _texts(files: list[sources.InputFile], advance: Callable[[int], None]) -> Iterator[str]:
    for document in sources.documents(files):
        yield document.text
        advance(document.source_bytes)


def _describe_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    meta = tokenizer.meta
    table = _facts()
    for name, value in (
        ("folder", folder),
        ("kind", meta.kind),
        ("tokens", f"{meta.vocab_size:,}"),
        ("end of document", meta.eos_id),
        ("SHA-256", meta.sha256),
    ):
        table.add_row(name, str(value))
    console.print(table)


def _describe_shards(folder: Path, index: ShardIndex) -> None:
    table = _facts()
    for name, value in (
        ("folder", folder),
        ("shards", f"{len(index.shards):,} ({sum(record.size for record in index.shards):,} bytes)"),
        ("documents", f"{index.documents:,}"),
        ("tokens", f"{index.tokens:,} ({index.header.dtype})"),
        ("text", f"{index.text_bytes:,} bytes ({index.text_bytes / max(index.tokens, 1):.3f} a token)"),
        ("vocabulary", f"{index.header.vocab_size:,}"),
        ("tokenizer", index.header.tokenizer_sha256),
    ):
        table.add_row(name, str(value))
    console.print(table)


def _facts() -> Table:
    """A table of names and values; long values are folded, not cut."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    return table


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over `total` bytes; gives the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.advance(task, done)
