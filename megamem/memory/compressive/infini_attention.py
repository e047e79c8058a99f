"""Infini-Transformer: an associative matrix of all past keys and values per head, mixed with block-local attention.

Munkhdalai, Faruqui and Gopal, "Leave No Context Behind: Efficient Infinite Context Transformers with Infini-attention",
2024, in the form that the Elastic Memory paper ("Towards Compressive and Scalable Recurrent Memory") compares: with
RMSNorm on what is read.

    sigma(x) = ELU(x) + 1
    read     A_mem = sigma(Q) M / (sigma(Q) z)                                               (equation 3)
    write    M <- M + sigma(K)^T V,   z <- z + sum of sigma(K) over the block                (4, `update: linear`)
             M <- M + sigma(K)^T (V - sigma(K) M / (sigma(K) z)),   z likewise               (5, `update: delta`)
    mix      A = g A_mem + (1 - g) A_local,   g = sigmoid(beta), one beta per head           (6)

Queries and keys are those before rotation. In the state M is `associations` and z is `mass`.

Letters of shapes: B batch rows, H local query heads, G local key/value heads, T tokens, D head_dim.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from megamem.config.cost import Flops
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, State, StateSpec, TensorSpec, detach, to_device
from megamem.memory.shared.block_attention import BlockAttention, local_attention_flops, open_specs, resolve_block
from megamem.memory.shared.blocks import BlockSlice
from megamem.memory.shared.gate import MemoryGate
from megamem.parallel.linears import Linears


@MIXERS.register
class InfiniAttentionConfig(MixerConfig):
    """Infini-Transformer: linear-attention memory of all past blocks, gated per head with block-local attention."""

    kind: Literal["infini_attention"] = "infini_attention"
    """`infini_attention`"""
    block: PositiveInt | None = None
    """Tokens attended locally and written at once; the chunk if not given. Divides model.chunk_size."""
    update: Literal["delta", "linear"] = "delta"
    """What a block writes: of its values only what the memory does not yet give for their keys, or all of them."""
    normalize: bool = True
    """RMSNorm without weights, per head, on what is read, before it is mixed with local attention."""
    gate_init: float = 0.0
    """Initial beta of each head: the memory's share of the output starts at sigmoid(beta), 0 being one half."""
    stop_gradient: bool = False
    """Treat the memory a call starts from as constant: nothing is learned through what earlier chunks wrote."""

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        resolve_block(self.block, model)

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare M (the size that papers count), z, and the open block."""
        mass = ("batch", "kv_heads", model.resolved_head_dim)
        return {
            "associations": TensorSpec((*mass, model.resolved_head_dim), "float32", shard="kv_heads"),
            "mass": TensorSpec(mass, "float32", shard="kv_heads"),
            **open_specs(model),
        }

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`.

        Counted are sigma(Q) [M, z] of each block but the first, sigma(K) [M, z] likewise (delta), and sigma(K)^T V of
        each block.

        A write has a gradient if the next block's read has one (for a window that spans the sequence): the last
        block's is read by nobody, and with `stop_gradient` neither is that before a chunk's border.
        """
        block = resolve_block(self.block, model)
        blocks = range(-(-sequence_length // block))
        per_chunk = model.chunk_size // block
        # blocks whose read passes gradients on, and blocks whose write gets gradients from the next block
        linked = {b for b in blocks if b and not (self.stop_gradient and b % per_chunk == 0)}
        taught = {b - 1 for b in linked}
        reads = len(blocks) - 1
        read = 2 * model.resolved_head_dim * (model.resolved_head_dim + 1) / len(blocks)
        write = 2 * model.resolved_kv_heads * model.resolved_head_dim**2 / len(blocks)
        update = Flops(write * len(blocks), write * 2 * len(taught))
        if self.update == "delta":
            update += Flops(
                model.resolved_kv_heads * read * reads,
                model.resolved_kv_heads * read * (len(taught - {0}) + len(taught & linked)),
            )
        return {
            **local_attention_flops(block, model, sequence_length, causal),
            "memory_retrieval": Flops(model.heads * read * reads, model.heads * read * (reads + len(linked))),
            "memory_update": update,
        }

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count one beta per head."""
        return model.heads

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> InfiniAttention:
        """See `MixerConfig.build`."""
        return InfiniAttention(self, model, linears)


class _Features(torch.autograd.Function):
    """The function sigma, of which only the result is kept for the backward pass.

    Its derivative is sigma itself below zero and 1 above.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return sigma(x), x [B, H, T, D]."""
        sigma = x.clamp(max=0).exp_().add_(x.relu())
        ctx.save_for_backward(sigma)
        return sigma

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient of x from that of sigma(x), [B, H, T, D]."""
        (sigma,) = ctx.saved_tensors
        return sigma.clamp(max=1).mul_(grad)


def features(x: Tensor) -> Tensor:
    """Return sigma(x) = ELU(x) + 1 of x [B, H, T, D].

    Below zero it is exp(x) itself: ELU(x) + 1 would round to 0 there, and so could z.
    """
    sigma: Tensor = _Features.apply(x)
    return sigma


def retrieve(sigma: Tensor, associations: Tensor, mass: Tensor, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """Return sigma M / (sigma z), the mean of stored values weighted by sigma(q) . sigma(k).

    Args:
        sigma: sigma of queries or keys, [B, H, T, D].
        associations: M [B, H, D, D].
        mass: z [B, H, D].
        eps: if given, the mean is divided by its root mean square over D, as RMSNorm does.
    Returns: [B, H, T, D], 0 from an empty memory (0 / 1 in place of 0 / 0); whether there was anything to read, bool
        [B, H, T, 1].
    """
    sums, weights = sigma @ associations, sigma @ mass[..., None]
    known = weights > 0
    scale = torch.where(known, weights, 1).reciprocal()
    # both factors of a token are multiplied with each other before they are with all D channels
    if eps is not None:
        norm = torch.linalg.vector_norm(sums, dim=-1, keepdim=True) * scale
        scale = scale * (norm.square() / sums.shape[-1] + eps).rsqrt()
    return sums * scale, known


def heads_first(x: Tensor) -> Tensor:
    """Reorder [tokens, batch, heads, head_dim] to [batch, heads, tokens, head_dim]."""
    return x.permute(1, 2, 0, 3)


def tokens_first(x: Tensor) -> Tensor:
    """Reorder [batch, heads, tokens, head_dim] to [tokens, batch, heads, head_dim]."""
    return x.permute(2, 0, 1, 3)


class InfiniAttention(BlockAttention):
    """Block attention mixed per head with what a linear-attention memory of the blocks before holds."""

    def __init__(self, config: InfiniAttentionConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(model, linears, config.state_specs(model), resolve_block(config.block, model))
        self.config = config
        self.eps = model.norm_eps if config.normalize else None
        self.groups = model.heads // model.resolved_kv_heads
        self.differentiable_state = not config.stop_gradient
        self.gate = MemoryGate(model, linears, config.gate_init)

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        return super().forward(hidden, state if self.differentiable_state else detach(state), chunk)

    def mix(self, output: Tensor, query: Tensor, state: State, block_slice: BlockSlice) -> Tensor:
        """Return g A_mem + (1 - g) A_local; A_local alone where the memory is empty: in a document's first block.

        See `BlockAttention.mix`.
        """
        gate = self.gate()
        if not any(block_slice.finished_tokens):
            # A_local is mixed with itself: ZeRO 3 needs a gradient of the gate, if of zeros, from each backward pass
            return torch.lerp(output, output, gate.to(output.dtype))
        associations, mass = (x.repeat_interleave(self.groups, 1) for x in (state["associations"], state["mass"]))
        sigma = features(heads_first(query).to(mass.dtype))
        retrieved, known = retrieve(sigma, associations, mass, self.eps)
        # heads first: [batch, heads, tokens, 1]
        gate = torch.where(known, gate[:, None], 0)
        return torch.lerp(output, tokens_first(retrieved).to(output.dtype), tokens_first(gate).to(output.dtype))

    def remember(self, state: State, block_slice: BlockSlice, keys: Tensor, values: Tensor) -> State:
        """See `BlockAttention.remember`: the write, in rows whose block ends.

        With `delta` all keys of the block read the memory from before the block.
        """
        associations, mass = state["associations"], state["mass"]
        sigma, new = features(heads_first(keys).to(mass.dtype)), heads_first(values).to(mass.dtype)
        if self.config.update == "delta" and any(end > self.block for end in block_slice.ends):
            new = new - retrieve(sigma, associations, mass)[0]
        if not all(block_slice.closing):
            sigma = sigma * to_device(block_slice.closing, sigma.device, torch.bool)[:, None, None, None]
        return {"associations": associations + sigma.mT @ new, "mass": mass + sigma.sum(-2)}
