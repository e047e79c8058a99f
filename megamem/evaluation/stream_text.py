"""Continues a text with a trained model and shows it as it is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megamem.config.run import RunConfig
from megamem.errors import ConfigError, DataError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.sampling import Sampling
from tokenization.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"
"""What a decoder puts in the place of a character whose last bytes are still to come."""


def trained_tokenizer(config: RunConfig, origin: str, folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer that a model was trained with, or the one in `folder`.

    origin: what messages call the model. Raises: ConfigError where there is none, DataError where it has more tokens
    than the model.
    """
    folder = folder or config.data.tokenizer
    if folder is None:
        raise ConfigError(f"{origin}: its run names no tokenizer; give --tokenizer")
    words = Tokenizer.load(folder)
    if words.vocab_size > config.model.vocab_size:
        raise DataError(f"{folder}: has {words.vocab_size:,} tokens, the model {config.model.vocab_size:,}")
    return words


def stream_text(
    evaluator: Evaluator,
    tokenizer: Tokenizer,
    text: str,
    max_new_tokens: int,
    sampling: Sampling,
    show: Callable[[str], None],
) -> None:
    """Continue `text` until the end token or `max_new_tokens`; `show` gets each new piece, in whole characters.

    A piece that ends within a character is held back until the tokens with the rest of it are there.
    """
    shown = ""

    def on_token(_: int, tokens: list[int]) -> bool:
        nonlocal shown
        whole = tokenizer.decode(tokens)
        if not whole.endswith(INCOMPLETE):
            show(whole.removeprefix(shown))
            shown = whole
        return False

    prompt = tokenizer.encode(text).tolist()
    evaluator.generate([prompt], max_new_tokens, sampling=sampling, end_token=tokenizer.eos_id, stop=on_token)
