"""The configuration of deep memories: their networks, gates, state and cost."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from megamem.config.cost import Flops
from megamem.config.model import ModelConfig
from megamem.memory.base import StateSpec, TensorSpec
from megamem.memory.recurrent.base import RecurrentConfig
from megamem.ops.deep_memory.error import Loss


class DeepConfig(RecurrentConfig):
    """Fields of every deep memory."""

    loss: ClassVar[Loss]
    first_decay: ClassVar[float] = 6.9
    """Start value of the decay gate before its sigmoid: a memory fades by a thousandth per token. Where weights under a
    layer norm fade faster, gradients through the text grow without bound (docs/mechanisms/deep.md)."""
    network: Literal["mlp", "linear"] = "mlp"
    """The memory of a head: two layers with a GELU between, or one matrix."""
    expansion: PositiveInt = 4
    """Inner width of an `mlp` over the width of a head."""
    residual: bool = True
    """Whether the memory adds its input to its output."""
    layer_norm: bool = True
    """Normalize what the network's last matrix makes, by LayerNorm with a learned weight per channel, before the memory
    adds its input. Without it a memory may grow with the text until it overflows."""
    inner_chunk: PositiveInt = 64
    """Tokens whose gradients are taken at the same weights. Divides model.chunk_size."""
    rate: Literal["token", "fixed"] = "token"
    """The size of a gradient step: `max_rate` times the sigmoid of a projection of the token, or `max_rate` itself."""
    max_rate: PositiveFloat | None = None
    """Largest step; 1 / head_dim if not given, as though the loss were a mean over channels."""
    start: Literal["learned", "zero"] = "learned"
    """The weights every document starts from; `zero` is for `linear` alone, as an `mlp` of zeros never learns."""
    normalize: bool = True
    """Divide queries and keys by their lengths."""
    decay: bool = False
    """Fade the network's weights at a rate of each token and head."""
    kept_products: Literal["training", "fp32"] = "training"
    """Dtype of the products with kept networks (Memory Caching, log-linear memories), which nothing is written from:
    that of training, summed in FP32 by a device's units; or `fp32`. States and writes are FP32 always."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        super().check(model)
        if model.chunk_size % self.inner_chunk:
            raise ValueError(f"inner_chunk {self.inner_chunk} does not divide model.chunk_size {model.chunk_size}")
        if self.start == "zero" and self.network == "mlp":
            raise ValueError("start zero does not go with network mlp, whose gradients would be zero for ever")
        if self.start == "zero" and self.layer_norm:
            raise ValueError("start zero does not go with layer_norm true, which would divide by zero; use false")

    def gate_starts(self) -> dict[str, float]:
        """Name the gates that each token has by projection, with their start values before the sigmoid."""
        starts = {"rate": 0.0} if self.rate == "token" else {}
        return {**starts, "log_decay": self.first_decay} if self.decay else starts

    def token_gates(self) -> int:
        """See `RecurrentConfig.token_gates`."""
        return len(self.gate_starts())

    def gate_shape(self, model: ModelConfig) -> tuple[int, ...]:
        """Return the shape of each gate of one token and head: () for one number."""
        return ()

    def has_momentum(self) -> bool:
        """Return whether past gradients go on acting."""
        return False

    def matrices(self, model: ModelConfig) -> dict[str, tuple[int, int]]:
        """Name the matrices of a head's network, first to last, with their shapes [outputs, inputs]."""
        width = model.resolved_head_dim
        if self.network == "linear":
            return {"matrix": (width, width)}
        return {"up": (self.expansion * width, width), "down": (width, self.expansion * width)}

    def memory_specs(self, model: ModelConfig) -> StateSpec:
        """Declare what was added to the weights, their momentum, and the tokens of the open inner chunk."""
        shapes = self.matrices(model)
        if self.has_momentum():
            shapes |= {f"{name}_momentum": shape for name, shape in shapes.items()}
        open_vectors = TensorSpec(("batch", "kv_heads", "open", model.resolved_head_dim), shard="kv_heads", kind="open")
        gate_shape: tuple[int | str, ...] = ("batch", "kv_heads", "open", *self.gate_shape(model))
        gate = TensorSpec(gate_shape, "float32", shard="kv_heads", kind="open")
        return {
            **{
                name: TensorSpec(("batch", "kv_heads", *shape), "float32", shard="kv_heads")
                for name, shape in shapes.items()
            },
            "open_key": open_vectors,
            "open_value": open_vectors,
            **{f"open_{name}": gate for name in ("rate", *self.gate_starts())},
        }

    def snapshot_shapes(self, model: ModelConfig) -> dict[str, tuple[int, int]]:
        """See `RecurrentConfig.snapshot_shapes`.

        The second of two matrices is transposed, so that those of many memories can stand upon each other.
        """
        shapes = self.matrices(model)
        return {name: shape[::-1] if name == "down" else shape for name, shape in shapes.items()}

    def transition_size(self, model: ModelConfig) -> int:
        """See `RecurrentConfig.transition_size`: the product of decays."""
        return int(self.decay)

    def block(self) -> int:
        """See `RecurrentConfig.block`."""
        return self.inner_chunk

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count convolutions and norms, start values of the gates, and the weights that documents start from."""
        start = sum(rows * columns for rows, columns in self.matrices(model).values())
        norm = model.resolved_head_dim if self.layer_norm else 0
        learned = model.resolved_kv_heads * (self.token_gates() + (start if self.start == "learned" else 0) + norm)
        return super().extra_parameters(model) + learned

    def memory_flops(self, model: ModelConfig, sequence_length: float, causal: bool, begun: int) -> dict[str, Flops]:
        """See `deep_flops`."""
        return deep_flops(self, model, sequence_length, causal, begun)


def deep_flops(
    config: DeepConfig, model: ModelConfig, sequence_length: float, causal: bool, begun: int
) -> dict[str, Flops]:
    """Return the FLOPs per token of a deep memory, see `RecurrentConfig.memory_flops`.

    `memory_attention` is what lies within inner chunks, `memory_retrieval` and `memory_update` what goes through the
    weights. The update of the last inner chunk is read by nobody and has no backward pass; the momentum that a memory
    begins with is zero and has no gradient, and the one that it ends with is read by nobody.

    causal: a token counts itself and those before it in its inner chunk.
    """
    inner = min(config.inner_chunk, begun)
    newer, momentum = 1 - inner / sequence_length, 1 - inner / begun
    seen = (inner + 1) / 2 if causal else inner
    sizes = [rows * columns for rows, columns in config.matrices(model).values()]
    sides = [rows + columns for rows, columns in config.matrices(model).values()]
    through = 2 * model.heads * sum(sizes)
    within = 2 * model.heads * seen * sum(sides)
    # each key passes all layers but the last, the last one too where the error is made of its answer, and back through
    # it for the slope
    last, answered = len(sizes) - 1, config.loss == "l2" or config.layer_norm
    gradients = 2 * model.resolved_kv_heads * (sum(sizes[:last]) + sizes[-1] * (answered + last))
    write = 2 * model.resolved_kv_heads * sum(sizes)
    # weights that begin as zeros have no gradient
    taught = 2.0 if config.start == "learned" else 1 + momentum
    read, update = Flops(through, taught * through), Flops(gradients + write, taught * gradients + 2 * write * newer)
    attention = Flops(within, 2 * within)
    if config.has_momentum():
        read += Flops(through, through * (1 + momentum))
        update += Flops(write, 2 * write * momentum)
        # the weights of gradients, two triangles of inner x inner in each head, and of the first momentum
        coefficients = 2 * model.resolved_kv_heads * (seen * inner + seen)
        attention += Flops(coefficients, coefficients * (1 + config.decay))
    return {"memory_attention": attention, "memory_retrieval": read, "memory_update": update}
