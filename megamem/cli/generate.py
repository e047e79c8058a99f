"""`megamem generate`: continue a text with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megamem.cli.compute import compute_device, compute_dtype
from megamem.cli.options import Device, Precision, TrainedModel
from megamem.cli.output import read_text
from megamem.errors import ConfigError, DataError


def generate(
    model: TrainedModel,
    prompt: Annotated[str | None, typer.Option(help="text to continue")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file with the text, of any length; - for stdin")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    seed: int = 0,
    dtype: Precision = "fp32",
    device: Device = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer folder; the run's if not given")] = None,
) -> None:
    """Continue a text, printed as it is made; the memory reads prompts of any length."""
    text = _prompt(prompt, prompt_file)
    if top_p == 0:
        raise ConfigError("--top-p 0: leaves no token; give more than 0")
    from megamem.evaluation.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    torch_dtype, torch_device = compute_dtype(dtype), compute_device(device)
    from megamem.hf.trained import is_exported

    if is_exported(model):
        if tokenizer is not None:
            raise ConfigError(f"--tokenizer {tokenizer}: is for checkpoints; an export brings its own")
        from megamem.hf.exported import stream_from_export

        stream_from_export(model, text, max_new_tokens, sampling, torch_dtype, torch_device)
        return
    from checkpoints.trained import open_run
    from megamem.evaluation.evaluator import Evaluator
    from megamem.evaluation.stream_text import stream_text, trained_tokenizer

    run = open_run(model)
    words = trained_tokenizer(run.config, str(model), tokenizer)
    evaluator = Evaluator(run.load(torch_dtype, torch_device))
    stream_text(evaluator, words, text, max_new_tokens, sampling, _show)
    _show("\n")


def _prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text to continue. Raises ConfigError or DataError."""
    if prompt is not None and file is None:
        text = prompt
    elif file is not None and prompt is None:
        text = sys.stdin.read() if str(file) == "-" else read_text(file)
    else:
        raise ConfigError("generate: give either --prompt or --prompt-file")
    if not text:
        raise DataError("generate: the prompt is empty")
    return text


def _show(text: str) -> None:
    """Write text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
