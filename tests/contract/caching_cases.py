"""Small configurations of Memory Caching, in every form and over every recurrent memory."""

from __future__ import annotations

from tests.contract.case import FEW_CHANNELS, Case

CACHING = [
    Case(
        "memory_caching",
        "titans_gated",
        {"memory": {"kind": "titans", "inner_chunk": 2, "expansion": 2, "max_rate": 0.05}, "segment": 4},
        queries_per_key=2,
    ),
    Case(
        "memory_caching",
        "dla_soup",
        {"memory": {"kind": "dla", "inner_chunk": 4, "max_rate": 1.0}, "segment": 8, "combine": "soup"},
        shape=FEW_CHANNELS,
        core=False,
    ),
    Case(
        "memory_caching",
        "titans_soup_continued",
        {
            "memory": {"kind": "titans", "inner_chunk": 2, "expansion": 2, "max_rate": 0.02},
            "segment": 4,
            "combine": "soup",
            "write": "continued",
            "gate": "sigmoid",
            "max_chunks": 2,
        },
        shape=FEW_CHANNELS,
        core=False,
    ),
    Case(
        "memory_caching",
        "dla_selective",
        {"memory": {"kind": "dla", "inner_chunk": 2, "max_rate": 0.1}, "segment": 2, "combine": "ssc", "top_k": 1},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memory_caching",
        "delta_selective",
        {"memory": {"kind": "delta_net"}, "segment": 2, "combine": "ssc", "router": "query"},
        core=False,
    ),
    Case(
        "memory_caching",
        "retnet_selective",
        {"memory": {"kind": "retnet", "expand_v": 1}, "segment": 4, "combine": "ssc", "top_k": 1, "gate": "raw"},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memory_caching",
        "linear_residual",
        {"memory": {"kind": "linear_attention"}, "segment": 4, "combine": "residual", "max_chunks": 1},
        core=False,
    ),
    Case(
        "memory_caching",
        "gated_delta_sum",
        {
            "memory": {"kind": "delta_net", "decay": True},
            "segment": 8,
            "pooling": "sum",
            "gate": "sigmoid",
            "write": "continued",
        },
        core=False,
    ),
    Case(
        "memory_caching",
        "token_gates",
        {"memory": {"kind": "dla", "inner_chunk": 2, "max_rate": 0.1}, "segment": 2, "scores": "token", "ages": 3}
        | {"temperature": 0.5},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memory_caching",
        "selection_without_gates",
        {"memory": {"kind": "titans", "inner_chunk": 2, "expansion": 2, "max_rate": 0.05}, "segment": 2}
        | {"combine": "ssc", "top_k": 2, "router": "query", "gate": "none"},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memory_caching",
        "titans_selective_host",
        {"memory": {"kind": "titans", "inner_chunk": 2, "expansion": 2, "max_rate": 0.05}, "segment": 2}
        | {"combine": "ssc", "top_k": 1, "kept_on": "host"},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memory_caching",
        "titans_fp32",
        {"memory": {"kind": "titans", "inner_chunk": 2, "expansion": 2, "max_rate": 0.05, "kept_products": "fp32"}}
        | {"segment": 4},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memory_caching",
        "titans_selective_fp32",
        {"memory": {"kind": "titans", "inner_chunk": 2, "expansion": 2, "max_rate": 0.05, "kept_products": "fp32"}}
        | {"segment": 2, "combine": "ssc", "top_k": 1},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memory_caching",
        "normalized_linear",
        {"memory": {"kind": "linear_attention", "features": "elu", "normalizer": True}, "segment": 4}
        | {"temperature": 0.5},
        queries_per_key=2,
        core=False,
    ),
    Case(
        "memory_caching",
        "normalized_linear_selective",
        {"memory": {"kind": "linear_attention", "features": "elu", "normalizer": True}, "segment": 4}
        | {"combine": "ssc", "gate": "sigmoid"},
        core=False,
    ),
    Case(
        "memory_caching",
        "normalized_linear_soup",
        {"memory": {"kind": "linear_attention", "features": "elu", "normalizer": True}, "segment": 2}
        | {"combine": "soup", "lengths": "logarithmic", "levels": 3},
        core=False,
    ),
    Case(
        "memory_caching",
        "titans_logarithmic",
        {"memory": {"kind": "titans", "inner_chunk": 2, "expansion": 2, "max_rate": 0.02}, "segment": 2}
        | {"lengths": "logarithmic", "levels": 3},
        queries_per_key=2,
        shape=FEW_CHANNELS,
        core=False,
    ),
    Case(
        "memory_caching",
        "delta_logarithmic_continued",
        {"memory": {"kind": "delta_net", "decay": True}, "segment": 2, "write": "continued", "combine": "ssc"}
        | {"lengths": "logarithmic", "levels": 2, "top_k": 1},
        core=False,
    ),
    Case(
        "memory_caching",
        "dla_logarithmic_soup",
        {"memory": {"kind": "dla", "inner_chunk": 2, "max_rate": 0.1}, "segment": 2, "combine": "soup"}
        | {"lengths": "logarithmic", "levels": 4, "scores": "token", "ages": 3},
        shape=FEW_CHANNELS,
        core=False,
    ),
    Case(
        "memory_caching",
        "memora_gated",
        {"memory": {"kind": "memora", "inner_chunk": 2, "expansion": 2, "max_rate": 0.1}, "segment": 4},
        shape=FEW_CHANNELS,
        core=False,
    ),
    Case(
        "memory_caching",
        "ssd_gated",
        {"memory": {"kind": "ssd", "inner_chunk": 3}, "segment": 4, "gate": "sigmoid"},
        queries_per_key=2,
        core=False,
    ),
]
