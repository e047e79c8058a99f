"""Multiply-adds per token at the WikiText-103 shape, beside those that the LaMemo paper publishes in its Table 1.

    python -m benchmarks.published_flops

16 layers of 410, 10 heads, MLPs of 2,100 with ReLU, segments, caches and external memories of 150 each, 267,735 words.
Forward only, averaged over a document of 100 segments, causal: a query counts the keys it sees. The head is counted
whole, without which the paper's figures cannot be as large; an adaptive softmax computes less.
"""

from __future__ import annotations

import argparse

from benchmarks.common import table
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.flops import flops_per_token

SEGMENT = 150
PUBLISHED = {
    "local_attention": 148, "transformer_xl": 157, "lamemo": 191, "compressive_transformer": 169,
    "infinity_former": 235,
}  # fmt: skip
"""Millions, of Ji et al., "LaMemo: Language Modeling with Look-Ahead Memory", 2022, Table 1."""
OPTIONS: dict[str, dict[str, object]] = {
    "local_attention": {},
    "transformer_xl": {"memory_length": SEGMENT},
    "lamemo": {"memory_length": SEGMENT},
    # ratio 4 in the infinity-former paper does not divide a segment of 150
    "compressive_transformer": {"memory_length": SEGMENT, "compressed_length": SEGMENT, "ratio": 5},
    "infinity_former": {"basis": SEGMENT, "samples": 512, "short_memory": SEGMENT, "sticky": "random"},
}


def multiply_adds(kind: str) -> dict[str, float]:
    """Return millions of multiply-adds of one token's forward pass by part, of a mechanism at the published shape."""
    shape = {
        "layers": 16, "hidden_size": 410, "heads": 10, "ffn_size": 2100, "vocab_size": 267_735, "chunk_size": SEGMENT,
        "mlp": "relu", "norm": "layer", "bias": True, "tie_embeddings": True,
    }  # fmt: skip
    if kind == "local_attention":
        shape["head_dim"] = 42  # rotary positions need an even width
    model = parse_config(ModelConfig, {**shape, "mixer": {"kind": kind, **OPTIONS[kind]}}, "benchmark")
    parts = flops_per_token(model, 100 * SEGMENT)
    return {name: value / 2e6 for name, value in parts.items() if name not in ("backward", "training")}


def main(arguments: list[str] | None = None) -> None:
    """See the module's documentation."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    base = multiply_adds("local_attention")["total"]
    rows = []
    for kind, published in PUBLISHED.items():
        parts = multiply_adds(kind)
        total = parts.pop("total")
        own = ", ".join(f"{name} {value:.1f}" for name, value in parts.items() if name not in ("head", "mlp"))
        rows.append(
            [
                kind,
                f"{total:.0f}",
                str(published),
                f"{total / base:.2f}",
                f"{published / PUBLISHED['local_attention']:.2f}",
                own,
            ]
        )
    print(table(["mechanism", "ours, M", "published, M", "over the first", "published", "ours by part, M"], rows))


if __name__ == "__main__":
    main()
