"""`megamem tokenizer`: train or import a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megamem.cli.options import OptionalTextInputs, TextField
from megamem.cli.output import print_facts, progress_bar, write_line

tokenizer_app = typer.Typer(help="Train or import a tokenizer.", no_args_is_help=True)

OutputFolder = Annotated[Path, typer.Option("--output", "-o", help="folder to write the tokenizer to")]


@tokenizer_app.command("train")
def train(
    output: OutputFolder,
    inputs: OptionalTextInputs = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="tokens of a BPE or of words, special ones included; 32000 and all words if not given"),
    ] = None,
    text_field: TextField = "text",
    kind: Annotated[
        Literal["bpe", "word", "character", "byte"],
        typer.Option(
            help="byte-level BPE, the words between white space, the characters, or the 256 bytes (no INPUTS)"
        ),
    ] = "bpe",
    min_count: Annotated[
        int | None, typer.Option(min=1, help="times that a word or character must occur; 1 if not given")
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer, or make one of words, characters or bytes."""
    from tokenization.prepare import BPE_TOKENS, train_on_files

    tokenizer = train_on_files(inputs or [], output, vocab_size, progress_bar, text_field, kind, min_count)
    describe_tokenizer(output)
    asked = BPE_TOKENS if vocab_size is None and kind == "bpe" else vocab_size
    if asked is not None and tokenizer.vocab_size < asked:
        what = "pairs" if kind == "bpe" else "words"
        write_line(f"The text holds {what} for {tokenizer.vocab_size:,} tokens only, not for {asked:,}.")


@tokenizer_app.command("import")
def import_tokenizer(
    source: Annotated[
        Path,
        typer.Argument(help="tokenizer.json, a folder with it, GPT-2's two files, or a SentencePiece .model"),
    ],
    output: OutputFolder,
    eos: Annotated[str | None, typer.Option(help="token that ends documents, if the source does not say")] = None,
) -> None:
    """Import a Hugging Face or SentencePiece tokenizer."""
    from megamem.files import require_space
    from tokenization import importing
    from tokenization.prepare import TOKENIZER_BYTES

    require_space(output, TOKENIZER_BYTES)
    importing.import_tokenizer(source, output, eos)
    describe_tokenizer(output)


def describe_tokenizer(folder: Path) -> None:
    """Print what a tokenizer's folder holds."""
    from tokenization.tokenizer import load_meta

    meta = load_meta(folder)
    print_facts(
        [
            ("folder", folder),
            ("kind", meta.kind),
            ("tokens", f"{meta.vocab_size:,}"),
            ("end of document", meta.eos_id),
            ("SHA-256", meta.sha256),
        ]
    )
