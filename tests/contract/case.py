"""A small configuration of a mixer or of an architecture, as the laws run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megamem.config.model import ModelConfig
from tests.contract.paths import MODEL_FIELDS

CHUNK = 8
QK_NORM = {"qk_norm": True}
PROJECTION_NORM = {"qk_norm": "projection", "norm_position": "output", "bias": "query_key_value"}
"""Norms as OLMo 2 has them, and Qwen2's biases."""
FEW_CHANNELS = {"norm_eps": 0.1}
"""For a layer norm over 4 channels of positive weights, which are so alike that it makes rounding errors grow."""


@dataclass(frozen=True)
class Case:
    """Options of a mixer, or of an architecture; `queries_per_key` > 1 makes it grouped-query attention."""

    kind: str
    name: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    queries_per_key: int = 1
    core: bool = True
    """Whether every run of the tests takes it; the others wait for MEGAMEM_CASES=all, as `make test-full` sets it, or
    for their kind in MEGAMEM_CASES=titans,dla. Cases that are named, as in MEGAMEM_CASES=titans-paper, run alone. One
    for each way of keeping a state: matrix memories are one family, and Memory Caching brings Titans with it."""

    inside: str | dict[str, Any] | None = field(default=None, hash=False)
    """Of an architecture: the mixer in all its layers."""
    shape: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of the model."""
    init_std: float = 0.3
    """Weights are large, so that attention is far from uniform and every path has a visible effect."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """What the laws run: a mixer alone and in a model, an architecture as a whole model."""
        return ("mixer", "stage") if self.inside is None else ("stage",)

    @property
    def id(self) -> str:
        """How test reports call it."""
        return f"{self.kind}-{self.name}"

    @property
    def least_layers(self) -> int:
        """The fewest layers that a model of this case has: one for an encoder's layers, and one more."""
        return 1 + ((self.options.get("encoder") or {}).get("layers", 0) if self.inside is not None else 0)

    def model(
        self, layers: int = 1, heads: int = 4, head_dim: int = 4, at: int = 0, norm_eps: float = 1e-5
    ) -> ModelConfig:
        """A model with this mixer at layer `at` and plain attention elsewhere."""
        return ModelConfig.model_validate(
            {
                "layers": max(layers, self.least_layers),
                "hidden_size": heads * head_dim,
                "heads": heads,
                "kv_heads": heads // self.queries_per_key,
                "ffn_size": 2 * heads * head_dim,
                "vocab_size": 32,
                "chunk_size": CHUNK,
                "init_std": self.init_std,
                "norm_eps": norm_eps,
                **self.shape,
                **MODEL_FIELDS,
                **self._mechanism(at),
            }
        )

    def _mechanism(self, at: int) -> dict[str, Any]:
        chosen = {"kind": self.kind, **self.options}
        if self.inside is not None:
            return {"architecture": chosen, "mixer": self.inside}
        return {"mixer": "local_attention", "memory": [{"layers": [at], "mixer": chosen}]}
