"""Tokenizers, in one form on disk: a folder with `tokenizer.json` (or `tokenizer.model`) and `meta.json`.

`Tokenizer` encodes documents only: text that spells a special token is plain text, and no token is added.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as FastTokenizer

from megamem.errors import DataError
from megamem.files import read_json, sha256_file, write_bytes, write_json

META = "meta.json"
FORMAT_VERSION = 1
PART_CHARACTERS = 1 << 18
"""Longer texts are encoded in parts where that changes nothing: the library needs 100 bytes per character."""

Kind = Literal["byte-level-bpe", "word-level", "character-level", "byte-level", "hugging-face", "sentencepiece"]
END_OF_LINE = "ĠĊ"
"""Piece of a line's end in a word-level tokenizer: a space and a line break in the byte-level alphabet."""

# A word after exactly one space is where every GPT-type pre-tokenizer cuts anyway.
_CUT = re.compile(r"(?<=\w)(?= [^\W\d_])")

SAMPLES = (
    "The quick brown fox jumps over the lazy dog. It's 1,234.5 miles away, isn't it?",
    " leading and trailing spaces ",
    "two  spaces,   three,\ttab\t\ttabs",
    "line\nline\r\n\n\nthree empty lines above \n trailing space before the break",
    "café naïve Ελληνικά русский 中文字符 日本語 한국어 עברית",
    "emoji 🙂👩‍👩‍👧 and a combining e\u0301, ﬁ ligature, ½, Ａ full width, \u00a0no-break",
    "<s> </s> <unk> <|endoftext|> <0x41> ▁ literal specials",
    "x" * 50 + "    def f(a, b):\n        return a + b\n",
)
"""Texts on which two implementations of a tokenizer must agree."""


class Backend(Protocol):
    """The interface of a tokenizer library."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, nothing added."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens left out."""

    def pieces(self) -> list[str]:
        """Return the piece (spelling) of every id; special tokens as an empty string."""


@dataclass(frozen=True)
class TokenizerMeta:
    """The contents of `meta.json`: what is known of a tokenizer without loading it."""

    kind: Kind
    """Where the tokenizer comes from."""
    file: str
    """Name of the tokenizer's file in the folder."""
    vocab_size: int
    """Largest token id + 1."""
    eos_id: int
    """The token that ends every document."""
    bos_id: int | None
    """The token that begins a text, if there is one; nothing here writes it."""
    sha256: str
    """Hash of the tokenizer's file, to which shards are bound."""
    byte_pieces: bool
    """True where pieces are spelt in the byte-level alphabet."""
    divisible: bool
    """True where long texts may be cut between words without changing a token."""
    format_version: int = FORMAT_VERSION
    """Version of the format."""


class FastBackend:
    """`tokenizer.json`, read by the `tokenizers` library."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        """Take a tokenizer of that library and switch off what adds or cuts tokens."""
        # a document may spell "<|endoftext|>": that is text
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """See `Backend.encode`."""
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: list[int]) -> str:
        """See `Backend.decode`."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def pieces(self) -> list[str]:
        """See `Backend.pieces`."""
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        pieces = [""] * (max(vocabulary.values()) + 1)
        for piece, i in vocabulary.items():
            pieces[i] = "" if i in special else piece
        return pieces


class Tokenizer:
    """Encodes and decodes text. Made by `Tokenizer.load`, `train`, `words`, `characters` and `importing`."""

    def __init__(self, backend: Backend, meta: TokenizerMeta) -> None:
        """Put a library's tokenizer and its description together."""
        self.backend = backend
        self.meta = meta

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Open a tokenizer folder. Raises DataError naming the file that is missing, damaged or changed."""
        meta = load_meta(folder)
        path = folder / meta.file
        if not path.is_file():
            raise DataError(f"{path}: missing")
        if sha256_file(path) != meta.sha256:
            raise DataError(f"{path}: changed since it was written (SHA-256 differs from {META})")
        return cls(open_backend(path), meta)

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1."""
        return self.meta.vocab_size

    @property
    def eos_id(self) -> int:
        """The token that ends every document."""
        return self.meta.eos_id

    @property
    def hash(self) -> str:
        """SHA-256 of the tokenizer's file."""
        return self.meta.sha256

    @cached_property
    def vocabulary_hash(self) -> str:
        """SHA-256 of what each token stands for: the same for a tokenizer and its copy in another form of file."""
        digest = hashlib.sha256(str(self.eos_id).encode())
        for spelt in self.token_bytes():
            digest.update(len(spelt).to_bytes(4, "little") + spelt)
        return digest.hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return the token ids of a text, [tokens], without eos."""
        return np.concatenate(list(self.encode_parts(text)))

    def encode_parts(self, text: str) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the token ids of the parts of a text, [tokens], without eos."""
        for part in cut(text, PART_CHARACTERS) if self.meta.divisible else [text]:
            yield np.asarray(self.backend.encode(part), dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the token ids of each text, [tokens], without eos."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text of token ids; special tokens give nothing. Bytes that are not UTF-8 give U+FFFD."""
        return self.backend.decode([int(i) for i in ids])

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of text that each token of the vocabulary stands for; special tokens none.

        Joined over a document's tokens they are the document in UTF-8. SentencePiece models that put a space before
        the first word have it here too.
        """
        spell = _byte_level() if self.meta.byte_pieces else None
        return [_spelt(piece, spell) for piece in self.backend.pieces()]


def load_meta(folder: Path) -> TokenizerMeta:
    """Read `meta.json` of a tokenizer folder. Raises DataError where it is missing or of another version."""
    # of a file in the place of the folder, reading says what is wrong
    if not folder.is_file() and not (folder / META).exists():
        raise DataError(
            f"{folder / META}: missing; not a tokenizer folder, which `megamem tokenizer train` or `import` writes"
        )
    value = read_json(folder / META)
    version = value.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(f"{folder / META}: format_version {version}, this version reads {FORMAT_VERSION}")
    try:
        return TokenizerMeta(**value)
    except TypeError:
        raise DataError(f"{folder / META}: not the description of a tokenizer") from None


def open_backend(path: Path) -> Backend:
    """Open a tokenizer's file with the library that its suffix names. Raises DataError where it cannot be read."""
    try:
        if path.suffix == ".model":
            from tokenization.sentencepiece_model import SentencePieceBackend

            return SentencePieceBackend(path.read_bytes())
        return FastBackend(FastTokenizer.from_file(str(path)))
    except Exception as error:  # both libraries raise bare Exceptions
        raise DataError(f"{path}: not a readable tokenizer ({str(error).splitlines()[0]})") from None


def save(folder: Path, kind: Kind, data: bytes, suffix: str, eos_id: int, bos_id: int | None) -> Tokenizer:
    """Write a tokenizer folder; `meta.json` last, so that a folder with it is complete.

    Args:
        folder: where it goes.
        kind: where the tokenizer comes from.
        data: contents of the tokenizer's file.
        suffix: `.json` or `.model`.
        eos_id: the token that ends documents.
        bos_id: the token that begins a text, if there is one.

    Raises:
        DataError: the folder holds a tokenizer already.
    """
    check_unused(folder)
    path = folder / f"tokenizer{suffix}"
    write_bytes(path, data)
    backend = open_backend(path)
    meta = TokenizerMeta(
        kind=kind,
        file=path.name,
        vocab_size=len(backend.pieces()),
        eos_id=eos_id,
        bos_id=bos_id,
        sha256=sha256_file(path),
        # the characters of a text may lack the space
        byte_pieces=kind == "character-level" or (suffix == ".json" and _decodes_bytes(backend)),
        divisible=all(_same_in_parts(backend, sample) for sample in SAMPLES),
    )
    write_json(folder / META, asdict(meta))
    return Tokenizer(backend, meta)


def check_unused(folder: Path) -> None:
    """Raise DataError if a folder holds a tokenizer."""
    if (folder / META).exists():
        raise DataError(f"{folder}: already holds a tokenizer; choose another folder")


def cut(text: str, size: int) -> Iterator[str]:
    """Yield parts of a text of about `size` characters, cut between two words parted by one space."""
    start = 0
    while found := _CUT.search(text, start + size):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _same_in_parts(backend: Backend, text: str) -> bool:
    """Return whether a text has the same tokens if it is cut between words."""
    return [i for part in cut(text, 8) for i in backend.encode(part)] == backend.encode(text)


def _decodes_bytes(backend: Backend) -> bool:
    """Return whether pieces are in the byte-level alphabet, in which a space is spelt Ġ."""
    # a word-level tokenizer has no piece of a space alone
    return not {"Ġ", END_OF_LINE}.isdisjoint(backend.pieces())


def _spelt(piece: str, byte_level: dict[str, int] | None) -> bytes:
    """Return the bytes of a piece, spelt in the byte-level alphabet or, without one, as SentencePiece does."""
    if byte_level is not None:
        # a token added to the vocabulary by hand is spelt in plain text
        return bytes(map(byte_level.__getitem__, piece)) if byte_level.keys() >= set(piece) else piece.encode()
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _byte_level() -> dict[str, int]:
    """Byte of each letter of the byte-level alphabet: printable Latin-1 is itself, other bytes follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def vocabulary_hash(folder: Path | None) -> str | None:
    """Return `Tokenizer.vocabulary_hash` of a folder's tokenizer; None where no folder is given."""
    return None if folder is None else Tokenizer.load(folder).vocabulary_hash
