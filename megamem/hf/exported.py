"""An exported model, opened with transformers: for reading, and to continue a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from megamem.errors import ConversionError
from megamem.evaluation.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


def open_export(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return an exported model, in evaluation mode, and its tokenizer.

    Raises: ConversionError if they cannot be read, or the files lack a tensor of the model.
    """
    try:
        # transformers declares the model alone, but gives both with output_loading_info
        loaded: tuple[PreTrainedModel, dict[str, set[str]]] = AutoModelForCausalLM.from_pretrained(  # type: ignore[assignment]
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except _UNREADABLE as error:
        raise _refusal(folder, error) from None
    model, found = loaded
    if found["missing_keys"]:
        raise ConversionError(f"{folder}: its files lack {min(found['missing_keys'])}")
    return model.eval(), open_tokenizer(folder)


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of an exported model. Raises ConversionError if it cannot be read."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except _UNREADABLE as error:
        raise _refusal(folder, error) from None
    return tokenizer


def _refusal(folder: Path, error: Exception) -> ConversionError:
    """Return transformers' error in one line."""
    return ConversionError(f"{folder}: cannot be opened ({' '.join(str(error).split())[:200]})")


def stream_from_export(
    folder: Path, text: str, max_new_tokens: int, sampling: Sampling, dtype: torch.dtype, device: torch.device
) -> None:
    """Continue a text with an exported model on standard output, by transformers' own generation and streamer.

    Raises: ConversionError if the export cannot be read.
    """
    model, tokenizer = open_export(folder, dtype)
    torch.manual_seed(sampling.seed)
    inputs = tokenizer(text, return_tensors="pt").to(device)
    # transformers takes a top_k of 50 where none is given
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p}
    if sampling.temperature == 0:
        options = {}
    model.to(device).generate(  # type: ignore[arg-type]  # `to` is torch's, whose decorator hides its arguments
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        do_sample=sampling.temperature > 0,
        **options,
    )
