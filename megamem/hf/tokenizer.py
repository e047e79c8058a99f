"""A tokenizer folder as transformers reads it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from megamem.errors import ConversionError
from tokenization.tokenizer import SAMPLES, Tokenizer


def export_tokenizer(folder: Path, ours: Tokenizer, out: Path) -> None:
    """Write the tokenizer of `folder` into `out`, and check that it encodes and decodes as ours does.

    Raises: ConversionError for a SentencePiece model that has no exact form as `tokenizer.json`, or where the two
        differ on a sample.
    """
    path = folder / ours.meta.file
    if path.suffix == ".model":
        raise ConversionError(
            f"{path}: a SentencePiece model without an exact tokenizer.json; export with --no-tokenizer and ship the "
            "model file beside it"
        )
    fast = FastTokenizer.from_file(str(path))
    fast.post_processor = None  # training adds no special tokens in front of a text
    pieces = {i: token.content for i, token in fast.get_added_tokens_decoder().items()}
    special = {
        name: pieces[i]
        for name, i in (("eos_token", ours.eos_id), ("bos_token", ours.meta.bos_id), ("pad_token", ours.eos_id))
        if i is not None and i in pieces
    }
    theirs = PreTrainedTokenizerFast(tokenizer_object=fast, padding_side="left", **special)
    theirs.save_pretrained(out)
    for sample in SAMPLES:
        expected = ours.encode(sample).tolist()
        found = theirs(sample)["input_ids"]
        if found != expected and not any(token in sample for token in pieces.values()):
            raise ConversionError(f"{path}: transformers encodes {sample[:30]!r} as {found[:8]}, not {expected[:8]}")
        if (text := theirs.decode(expected, skip_special_tokens=True)) != (wanted := ours.decode(expected)):
            raise ConversionError(f"{path}: transformers decodes {wanted[:30]!r} as {text[:30]!r}")
