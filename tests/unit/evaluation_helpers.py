"""Synthetic held-out documents, tiny models, and the slow way to their losses."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.data.batch import IGNORED, EvaluationDocument
from megamem.memory.base import Chunk
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tokenization.text_size import TextSize

CHUNK = 8
VOCABULARY = 32
CPU = torch.device("cpu")
MIXERS = {
    "rising_melodi": {"kind": "melodi", "form": "rising", "summaries": 2},
    "local_attention": {"kind": "local_attention"},
    "full_attention": {"kind": "full_attention"},
    "elastic_memory": {"kind": "elastic_memory", "order": 6, "samples": 5, "block": 4},
    "infini_attention": {"kind": "infini_attention", "block": 4},
}
ROWS = 3
"""Documents that the evaluators of the tests read side by side."""
TOLERANCE = 1e-10
"""float64 throughout: what is left is the order of sums, some 1e-13 here."""


def model_config(kind: str) -> ModelConfig:
    """Two layers, the second with the mixer. Large weights, so that the memory has a visible effect."""
    return ModelConfig.model_validate(
        {
            "layers": 2,
            "hidden_size": 16,
            "heads": 4,
            "ffn_size": 32,
            "vocab_size": VOCABULARY,
            "chunk_size": CHUNK,
            "init_std": 0.3,
            "memory": [{"layers": [1], "mixer": MIXERS[kind]}],
        }
    )


def make_stage(kind: str, dtype: torch.dtype = torch.float64) -> Stage:
    stage = build_stage(model_config(kind), PlainLinears())
    initialize_parameters(stage, 1)
    return stage.to(dtype)


def text_size_of(predicted: int) -> TextSize:
    """What `predicted` tokens stand for. No two sizes are equal, so that no figure can have another one's divisor."""
    return TextSize(bytes=3 * predicted, characters=2 * predicted, words=predicted // 2 + 1, lines=predicted // 4 + 2)


def document(predicted: int, seed: int, text_size: TextSize | None = None) -> EvaluationDocument:
    """`predicted` random tokens and their labels, padded to whole chunks.

    text_size: of the predicted tokens' text; `text_size_of` them if not given.
    """
    text = torch.randint(VOCABULARY, (predicted + 1,), generator=torch.Generator().manual_seed(seed))
    length = -(-predicted // CHUNK) * CHUNK
    tokens, labels = torch.zeros(length, dtype=torch.int64), torch.full((length,), IGNORED)
    tokens[:predicted], labels[:predicted] = text[:-1], text[1:]
    return EvaluationDocument(f"document {seed}", tokens, labels, predicted, text_size or text_size_of(predicted))


def documents(*lengths: int) -> list[EvaluationDocument]:
    return [document(length, seed) for seed, length in enumerate(lengths)]


def slow_logits(
    stage: Stage, text: EvaluationDocument, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Position and logits after each token begin..end-1, read one by one from a fresh memory at `begin`."""
    states = stage.initial_states(1, CPU, torch.float64)
    with torch.no_grad():
        for at in range(begin, text.predicted_tokens if end is None else min(end, text.predicted_tokens)):
            hidden, states, _ = stage(text.tokens[at].view(1, 1), states, Chunk((at - begin,)))
            yield at, stage.logits(hidden)[0, 0]


def slow_losses(stage: Stage, text: EvaluationDocument, begin: int = 0, end: int | None = None) -> np.ndarray:
    """Loss of each predicted token begin..end-1."""
    read = slow_logits(stage, text, begin, end)
    return np.array([float(torch.logsumexp(logits, 0) - logits[text.labels[at]]) for at, logits in read])


def slow_guesses(stage: Stage, text: EvaluationDocument) -> list[int]:
    """The most probable token after each token of a document."""
    return [int(logits.argmax()) for _, logits in slow_logits(stage, text)]
