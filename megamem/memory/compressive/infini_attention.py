"""Infini-Transformer: an associative matrix of all past keys and values per head, mixed with block-local attention.

Munkhdalai, Faruqui and Gopal, "Leave No Context Behind", 2024, as paper 000 compares it: with RMSNorm on what is read.

    sigma(x) = ELU(x) + 1
    read     A_mem = sigma(Q) M / (sigma(Q) z)
    mix      A = g A_mem + (1 - g) A_local,   g = sigmoid(beta), one beta per head
    write    M <- M + sigma(K)^T (V - sigma(K) M / (sigma(K) z)),   z <- z + sum of sigma(K) over the block

Queries and keys are those before rotation. Shapes: [batch, heads, tokens, width]; M [batch, kv_heads, width, width],
z [batch, kv_heads, width].
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
        """M (the size that papers count), z, and the open block."""
        mass = ("batch", "kv_heads", model.resolved_head_dim)
        return {
            "associations": TensorSpec((*mass, model.resolved_head_dim), "float32", shard="kv_heads"),
            "mass": TensorSpec(mass, "float32", shard="kv_heads"),
            **open_specs(model),
        }

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """sigma(Q) [M, z] of each block but the first, sigma(K) [M, z] likewise (delta), sigma(K)^T V of each block.

        A write has a gradient if the next block's read has one (for a window that spans the sequence): the last
        block's is read by nobody, and with `stop_gradient` neither is that before a chunk's border.
        """
        block = resolve_block(self.block, model)
        blocks = range(-(-sequence_length // block))
        per_chunk = model.chunk_size // block
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
        """One beta per head."""
        return model.heads

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> InfiniAttention:
        """See `MixerConfig.build`."""
        return InfiniAttention(self, model, linears)


class _Features(torch.autograd.Function):
    """sigma, whose derivative is sigma itself below zero and 1 above: nothing else is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sigma = x.clamp(max=0).exp_().add_(x.relu())
        ctx.save_for_backward(sigma)
        return sigma

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (sigma,) = ctx.saved_tensors
        return sigma.clamp(max=1).mul_(grad)


def features(x: Tensor) -> Tensor:
    """sigma(x) = ELU(x) + 1, with exp(x) itself below zero: ELU(x) + 1 rounds to nothing there, and z could be 0."""
    sigma: Tensor = _Features.apply(x)
    return sigma


def retrieve(sigma: Tensor, associations: Tensor, mass: Tensor, eps: float | None = None) -> tuple[Tensor, Tensor]:
    """sigma M / (sigma z), a mean of stored values weighted by sigma(q) . sigma(k).

    eps: if given, the mean divided by its root mean square over the width, as RMSNorm does.
    Returns: [..., tokens, width], 0 from an empty memory (0 / 1 in place of 0 / 0); [..., tokens, 1] bool, whether
    there was anything to read.
    """
    sums, weights = sigma @ associations, sigma @ mass[..., None]
    known = weights > 0
    scale = torch.where(known, weights, 1).reciprocal()
    if eps is not None:  # two factors of each token, multiplied before they meet the whole width
        norm = torch.linalg.vector_norm(sums, dim=-1, keepdim=True) * scale
        scale = scale * (norm.square() / sums.shape[-1] + eps).rsqrt()
    return sums * scale, known


def heads_first(x: Tensor) -> Tensor:
    """[tokens, batch, heads, width] -> [batch, heads, tokens, width]."""
    return x.permute(1, 2, 0, 3)


def tokens_first(x: Tensor) -> Tensor:
    """[batch, heads, tokens, width] -> [tokens, batch, heads, width]."""
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

        Shapes: see `BlockAttention.mix`.
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
        """The write, in rows whose block ends; all of a block is compared with the memory from before it."""
        associations, mass = state["associations"], state["mass"]
        sigma, new = features(heads_first(keys).to(mass.dtype)), heads_first(values).to(mass.dtype)
        if self.config.update == "delta" and any(end > self.block for end in block_slice.ends):
            new = new - retrieve(sigma, associations, mass)[0]
        if not all(block_slice.closing):
            sigma = sigma * to_device(block_slice.closing, sigma.device, torch.bool)[:, None, None, None]
        return {"associations": associations + sigma.mT @ new, "mass": mass + sigma.sum(-2)}
