"""SentencePiece models, read through their own library or rewritten as `tokenizer.json` where that is exact."""

from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # ModelProto.SentencePiece.Type
BPE = 2  # TrainerSpec.ModelType
SPACE = "▁"


class SentencePieceBackend:
    """`tokenizer.model`, read by the `sentencepiece` library."""

    def __init__(self, data: bytes) -> None:
        """Read a model. Raises RuntimeError where `data` is none."""
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=data)

    def encode(self, text: str) -> list[int]:
        """See `Backend.encode`."""
        ids: list[int] = self.processor.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        """See `Backend.decode`."""
        text: str = self.processor.decode(ids)
        return text

    def pieces(self) -> list[str]:
        """See `Backend.pieces`."""
        sp = self.processor
        return ["" if sp.is_control(i) else sp.id_to_piece(i) for i in range(sp.get_piece_size())]


def converted(data: bytes) -> FastTokenizer | None:
    """Return the model as a `tokenizers` tokenizer, or None where it is not a BPE with spaces spelt as a prefix.

    Whether it encodes the same must still be checked: the two libraries order equal merges differently.
    """
    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at run time
    model.ParseFromString(data)
    spec, rules = model.trainer_spec, model.normalizer_spec
    if spec.model_type != BPE or spec.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        return None
    unknown = next(piece.piece for piece in model.pieces if piece.type == UNKNOWN)
    vocabulary = {piece.piece: i for i, piece in enumerate(model.pieces)}
    tokenizer = FastTokenizer(
        models.BPE(vocabulary, _merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=spec.byte_fallback)
    )
    tokenizer.normalizer = _normalizer(rules)
    first_space = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *first_space]
    )
    for special, kinds in ((True, (CONTROL,)), (False, (USER_DEFINED,))):
        tokens = [piece.piece for piece in model.pieces if piece.type in kinds]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    return tokenizer


def _merges(model: Any) -> list[tuple[str, str]]:
    """Return every way to split a piece in two known pieces, best score first."""
    ranks = {piece.piece: (-piece.score, i) for i, piece in enumerate(model.pieces)}
    merges = []
    for text, rank in ranks.items():
        pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += [(rank, ranks[left], ranks[right], left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(merges)]


def _normalizer(rules: Any) -> normalizers.Normalizer:
    """Return the normalizer that follows a model's rules."""
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
