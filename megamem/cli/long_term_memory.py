"""`megamem long-term-memory`: what a trained model attends to in its continuous long-term memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamem.cli.compute import compute_device, compute_dtype
from megamem.cli.options import Device, Json, Precision, TrainedModel
from megamem.cli.output import read_text, write_json, write_line
from megamem.errors import ConfigError

if TYPE_CHECKING:
    from megamem.config.run import RunConfig
    from megamem.evaluation.long_term_memory.words import Decode
    from megamem.evaluation.texts import Text
    from megamem.model.stage import Stage


def long_term_memory(
    model: TrainedModel,
    out: Annotated[Path, typer.Argument(help="folder to write")],
    overrides: Annotated[list[str] | None, typer.Argument(help="of the run's configuration: key=value")] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="file with a document, several times for several; held-out text if none")
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="held-out documents that are read")] = 8,
    chunks: Annotated[int, typer.Option(min=1, help="most chunks that the memory holds at the end")] = 6,
    layer: Annotated[int | None, typer.Option(min=0, help="layer that is shown; the last one if not given")] = None,
    token: Annotated[
        int | None, typer.Option(min=1, help="token whose prediction is shown; the sharpest look if not given")
    ] = None,
    threshold: Annotated[float, typer.Option(help="share of the attention from which on a word is shaded")] = 0.05,
    by_token: Annotated[bool, typer.Option("--by-token", help="show tokens, not words")] = False,
    dtype: Precision = "fp32",
    device: Device = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer folder; the run's if not given")] = None,
    as_json: Json = False,
) -> None:
    """Show what is attended to in a long-term memory: by region, by word, and how much of it each word occupies."""
    if not 0 < threshold < 1:
        raise ConfigError(f"--threshold {threshold:g}: is no share of the attention; give a number between 0 and 1")
    from megamem.evaluation.long_term_memory.analysis import analyze
    from megamem.evaluation.long_term_memory.report import PAGE, numbers, write_analysis
    from megamem.evaluation.report import check_new
    from megamem.hf.trained import is_exported, open_trained

    check_new(out)
    torch_dtype, torch_device = compute_dtype(dtype), compute_device(device)
    exported = is_exported(model)
    if exported and (tokenizer is not None or overrides):
        raise ConfigError(f"{model}: an export brings its configuration and tokenizer; give neither")
    if exported and not text:
        raise ConfigError(f"{model}: an export has no held-out text; give --text")
    run = open_trained(model, overrides or [])
    stage = run.load(torch_dtype, torch_device)
    texts, decode = (
        _texts_of_an_export(model, text or [])
        if exported
        else _texts(model, run.config, stage, text or [], tokenizer, chunks, documents)
    )
    analysis, shown = analyze(stage, texts, decode, chunks=chunks, layer=layer, token=token, by_token=by_token)
    write_analysis(out, analysis, shown, threshold)
    if as_json:
        write_json(numbers(analysis))
        return
    attended = int((shown.attention > threshold).sum())
    write_line(
        f"{out / PAGE}: {shown.title}; when token {shown.predicted:,} is predicted, {attended:,} of the "
        f"{len(shown.attended):,} words in the memory get more than {threshold:g} of the attention"
    )


def _texts(
    model: Path,
    config: RunConfig,
    stage: Stage,
    files: Sequence[Path],
    tokenizer: Path | None,
    chunks: int,
    documents: int,
) -> tuple[list[Text], Decode | None]:
    """Return what a run's model reads, files or held-out documents, and its tokenizer's decoder if there is one."""
    from megamem.evaluation.long_term_memory.texts import held_out_texts
    from megamem.evaluation.stream_text import trained_tokenizer
    from megamem.evaluation.texts import Text
    from megamem.training.build import held_out_documents

    named = tokenizer is not None or config.data.tokenizer is not None
    words = trained_tokenizer(config, str(model), tokenizer) if files or named else None
    decode = None if words is None else words.decode
    if words is not None and files:
        return [Text(str(file), tuple(words.encode(read_text(file)).tolist())) for file in files], decode
    if not config.data.validation:
        raise ConfigError(f"{model}: its run names no held-out text; give --text, or data.validation='[SHARDS]'")
    return held_out_texts(held_out_documents(config), stage, chunks, documents), decode


def _texts_of_an_export(model: Path, files: Sequence[Path]) -> tuple[list[Text], Decode]:
    """Return the files that an export's model reads, and its tokenizer's decoder."""
    from megamem.evaluation.texts import Text
    from megamem.hf.exported import open_tokenizer

    words = open_tokenizer(model)
    texts = [Text(str(file), tuple(words(read_text(file), add_special_tokens=False)["input_ids"])) for file in files]

    def decode(ids: Sequence[int]) -> str:
        return str(words.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return texts, decode
