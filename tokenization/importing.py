"""The import of other projects' tokenizers into the common form."""

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from megamem.errors import DataError
from megamem.files import read_json
from tokenization.sentencepiece_model import SentencePieceBackend, converted
from tokenization.tokenizer import SAMPLES, FastBackend, Tokenizer, save

KNOWN_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "[EOS]")
KNOWN_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]")
BPE_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def import_tokenizer(source: Path, folder: Path, eos: str | None = None) -> Tokenizer:
    """Import a tokenizer.

    Args:
        source: a Hugging Face `tokenizer.json` or a folder with one, a folder with GPT-2's two files, or a
            SentencePiece `.model`.
        folder: where the tokenizer goes.
        eos: the token that ends documents, where the source does not say.

    Raises:
        DataError: the source cannot be read or has no such token, or the folder is in use.
    """
    if not source.exists():
        raise DataError(f"{source}: no such file or folder")
    if source.is_file() and ".model" in source.name:
        return _import_sentencepiece(source, folder, eos)
    path = source / "tokenizer.json" if source.is_dir() else source
    try:
        fast = FastTokenizer.from_file(str(path)) if path.is_file() else _from_bpe_files(source)
    except DataError:
        raise
    except Exception as error:
        # the library raises bare Exceptions
        raise DataError(f"{path}: not a readable tokenizer ({str(error).splitlines()[0]})") from None
    fast.no_truncation()
    fast.no_padding()
    eos_id = _id(fast.get_vocab(True), eos or _declared_eos(path.parent), KNOWN_EOS, source)
    bos_id = next((fast.token_to_id(token) for token in KNOWN_BOS if fast.token_to_id(token) is not None), None)
    return save(folder, "hugging-face", fast.to_str(pretty=True).encode(), ".json", eos_id, bos_id)


def _import_sentencepiece(source: Path, folder: Path, eos: str | None) -> Tokenizer:
    """Import a SentencePiece model: as `tokenizer.json` if that gives the same tokens, else as it is."""
    data = source.read_bytes()
    try:
        backend = SentencePieceBackend(data)
    except RuntimeError:
        raise DataError(f"{source}: not a SentencePiece model") from None
    sp = backend.processor
    vocabulary = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    declared = sp.id_to_piece(sp.eos_id()) if sp.eos_id() >= 0 else None
    eos_id = _id(vocabulary, eos or declared, KNOWN_EOS, source)
    bos_id = sp.bos_id() if sp.bos_id() >= 0 else None
    fast = converted(data)
    if fast is not None and _agree(FastBackend(fast), backend):
        return save(folder, "sentencepiece", fast.to_str(pretty=True).encode(), ".json", eos_id, bos_id)
    return save(folder, "sentencepiece", data, ".model", eos_id, bos_id)


def _agree(fast: FastBackend, reference: SentencePieceBackend) -> bool:
    """Return whether both encode and decode all samples alike, one by one and joined."""
    for text in (*SAMPLES, "\n".join(SAMPLES), " ".join(SAMPLES * 3)):
        ids = reference.encode(text)
        if fast.encode(text) != ids or fast.decode(ids) != reference.decode(ids):
            return False
    return True


def _from_bpe_files(folder: Path) -> FastTokenizer:
    """Make a byte-level BPE of GPT-2's two files, vocabulary and merges. Raises DataError where they are missing."""
    for names in BPE_FILES:
        vocabulary, merges = (folder / name for name in names)
        if vocabulary.is_file() and merges.is_file():
            tokenizer = FastTokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            special = [token for token in KNOWN_EOS if tokenizer.token_to_id(token) is not None]
            tokenizer.add_special_tokens(special)
            return tokenizer
    raise DataError(f"{folder}: no tokenizer.json, no vocab.json + merges.txt, no encoder.json + vocab.bpe")


def _declared_eos(folder: Path) -> str | None:
    """Return the eos token that `tokenizer_config.json` names, as Hugging Face writes it."""
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    return token.get("content") if isinstance(token, dict) else token


def _id(vocabulary: dict[str, int], wanted: str | None, known: tuple[str, ...], source: Path) -> int:
    """Return the id of the token that ends documents: `wanted`, or the first of `known`. Raises DataError."""
    if wanted is not None and wanted not in vocabulary:
        raise DataError(f"{source}: eos token {wanted!r} is not in the vocabulary")
    found = next((vocabulary[token] for token in ([wanted] if wanted else known) if token in vocabulary), None)
    if found is None:
        raise DataError(f"{source}: it names no token that ends a document; state one with --eos")
    return found
