"""Floating-point operations per token, by formula: the numerator of MFU.

Matrix products only, a multiplication and an addition counting as two; norms, rotations, softmax and the optimizer are
left out, as is the forward pass that activation checkpointing repeats. Attention counts the keys that a query may see
(the causal triangle), not the rectangle some kernels compute, so that no kernel raises its MFU by wasted work.
"""

from __future__ import annotations

from collections import Counter

from megamem.config.cost import Flops, product
from megamem.config.model import ModelConfig


def flops_by_part(model: ModelConfig, sequence_length: int, causal: bool = True) -> dict[str, Flops]:
    """Forward and backward FLOPs per token of each part of the model, averaged over a sequence read from its start.

    Parts: `projections`, `mlp`, `head`, and what the mixers declare (`attention`, `memory_update`, ...).
    causal: count the causal triangle; False counts whole rectangles, as a kernel without a causal form computes them.
    """
    mixers = [model.mixer_at(layer) for layer in range(model.layers)]
    parts: dict[str, Flops] = {
        "projections": product(2 * sum(mixer.projection_parameters(model) for mixer in mixers)),
        "mlp": product(2 * model.layers * model.mlp_matrices),
        "head": product(2 * model.hidden_size * model.resolved_padded_vocab_size),
    }
    # layers with equal mixers cost the same
    counts = Counter(mixer.model_dump_json() for mixer in mixers)
    for mixer in {mixer.model_dump_json(): mixer for mixer in mixers}.values():
        layers = counts[mixer.model_dump_json()]
        for name, flops in mixer.mixing_flops(model, sequence_length, causal).items():
            more = Flops(layers * flops.forward, layers * flops.backward)
            parts[name] = parts[name] + more if name in parts else more
    return parts


def flops_per_token(model: ModelConfig, sequence_length: int) -> dict[str, float]:
    """FLOPs per token, averaged over sequences of `sequence_length` tokens.

    Keys: each part's forward (see `flops_by_part`), their sum `total`, `backward` (twice the forward, except for
    a memory's products with constant matrices, which hand on one gradient), and `training`, the sum of both passes.
    """
    parts = flops_by_part(model, sequence_length)
    forward = sum(part.forward for part in parts.values())
    backward = sum(part.backward for part in parts.values())
    return {
        **{name: part.forward for name, part in parts.items()},
        "total": forward,
        "backward": backward,
        "training": forward + backward,
    }
