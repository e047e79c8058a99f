"""A trained model as lm-eval asks it: read by our own code, or by transformers for comparison."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from checkpoints.location import FOLDER
from megamem.errors import ConfigError
from megamem.hf.trained import is_exported, open_trained

if TYPE_CHECKING:
    from lm_eval.api.model import LM

    from checkpoints.trained import TrainedRun
    from megamem.evaluation.reading import Progress
    from megamem.hf.held_out import ExportedModel
    from megamem.hf.imported import ImportedModel
    from megamem.parallel.topology import Topology
    from tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class TaskModel:
    """A model with lm-eval's interface, and what is known of it."""

    model: LM
    encode: Callable[[str], Sequence[int]]
    """Token ids of a text."""
    decode: Callable[[Sequence[int]], str]
    """Text of token ids."""
    title: str
    """Its name, for people."""
    step: int | None
    """Optimizer steps it has learned for; None where nobody knows."""
    run: Path | None
    """The folder of its run; None where there is none."""


def open_task_model(
    path: Path,
    max_length: int | None,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    transformers: bool = False,
    progress: Progress | None = None,
    topology: Topology | None = None,
) -> TaskModel:
    """Open a trained model for tasks.

    Args:
        path: run, checkpoint, export, Llama or GPT-2 in transformers' form, GGUF file, or what `from-hf` wrote.
        max_length: tokens of a window; that of its training if None.
        rows: requests read side by side.
        dtype: of the weights.
        device: where they lie.
        transformers: whether lm-eval's own model for transformers reads it: a folder in transformers' form.
        progress: told how many batches of requests are done; by our own reader alone.
        topology: of data-parallel ranks that share the requests, each with the whole model; None in a single process.
    Raises: CheckpointError or ConversionError for what cannot be read, ConfigError for a model without a tokenizer.
    """
    if transformers:
        if not is_exported(path):
            raise ConfigError(f"--transformers: {path} is not in transformers' form; see `megamem convert to-hf`")
        return _read_by_transformers(path, max_length, rows, dtype, device)
    from megamem.evaluation.evaluator import Evaluator
    from megamem.evaluation.harness import HarnessModel

    trained = open_trained(path)
    words = tokenizer_of(trained)
    if words is None:
        raise ConfigError(f"{path}: names no tokenizer, which tasks need")
    length = trained.config.data.sequence_length
    evaluator = Evaluator(trained.load(dtype, device), topology, rows)
    checkpoint = getattr(trained, "checkpoint", None)
    return TaskModel(
        HarnessModel(evaluator, words, max_length or length, progress),
        lambda text: [int(token) for token in words.encode(text)],
        lambda tokens: words.decode(list(tokens)),
        trained.title,
        None if checkpoint is None else checkpoint.step,
        run_folder_of(path),
    )


def tokenizer_of(trained: TrainedRun | ExportedModel | ImportedModel) -> Tokenizer | None:
    """Return the tokenizer of a trained model; None where it names none."""
    from tokenization.importing import import_tokenizer
    from tokenization.tokenizer import Tokenizer

    # held-out text has a tokenizer of its own name (`data.tokenizer`), to whose file its shards are bound
    own = trained.config.data.tokenizer or getattr(trained, "tokenizer", None)
    if own is not None:
        return Tokenizer.load(own)
    source = getattr(trained, "source", None)
    if source is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        files = source.tokenizer(Path(scratch) / "theirs")
        return None if files is None else import_tokenizer(files, Path(scratch) / "ours")


def run_folder_of(path: Path) -> Path | None:
    """Return the folder of the run that a checkpoint lies in, or that `path` is; None where there is none."""
    for folder in (path, path.parent.parent) if path.parent.name == FOLDER else (path,):
        if (folder / "config.yaml").is_file() and (folder / "environment.json").is_file():
            return folder
    return None


def _read_by_transformers(
    path: Path, max_length: int | None, rows: int, dtype: torch.dtype, device: torch.device
) -> TaskModel:
    """Open an exported model with lm-eval's own interface for transformers."""
    from lm_eval.models.huggingface import HFLM

    from megamem.hf.exported import open_export

    opened, tokenizer = open_export(path, dtype)
    length = getattr(opened.config, "max_position_embeddings", None) or 2048
    model = HFLM(
        pretrained=opened.to(device),  # type: ignore[arg-type]  # `to` is torch's, behind a decorator
        tokenizer=tokenizer,
        max_length=max_length or length,
        batch_size=rows,
        softmax_dtype="float32",
    )

    def encode(text: str) -> list[int]:
        """Return token ids, nothing added."""
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return TaskModel(
        model, encode, lambda tokens: str(tokenizer.decode(list(tokens))), f"{path.name}, by transformers", None, None
    )
