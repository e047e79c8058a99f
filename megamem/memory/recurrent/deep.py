"""Deep memories: a small network per head, trained on the text's keys and values while it is read.

    M(x) = x + LN(W1 gelu(W2 x)), or x + LN(W x)
    S_t = e_t S_{t-1} - b_t grad l(M; k_t, v_t),   M_t = a_t M_{t-1} + S_t,   y_t = M_t(q_t)

The base of deep linear attention (`dla.py`), Titans (`titans.py`) and Memora (`memora.py`), which name their papers.
`megamem/ops/deep_memory/` computes one inner chunk; the mixer here makes its inputs, keeps the tokens of an unfinished
inner chunk in the state's open buffer, and writes the weights once the inner chunk ends. All gradients of an inner
chunk are taken at the weights it starts from, so its length is a part of the definition. The state is what has been
added to the learned weights that every document starts from.

Letters of shapes: B batch rows, H local key/value heads, G query heads that share one of them, T tokens, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, State, TensorSpec, state_dtype, to_device
from megamem.memory.recurrent.base import Inputs, RecurrentMixer, TokenGate
from megamem.memory.recurrent.deep_config import DeepConfig
from megamem.memory.recurrent.network_parameters import NormWeight, StartWeights
from megamem.memory.shared.blocks import BlockSlice, open_visible
from megamem.memory.shared.row_by_row import apart, read_row_by_row
from megamem.ops.deep_memory.error import OutputNorm, standardized
from megamem.ops.deep_memory.group import GROUP, deep_memory_chunks
from megamem.ops.deep_memory.group_backward import GroupPasses
from megamem.ops.deep_memory.kept import Copies, Matrix, Rows, shared_product
from megamem.ops.deep_memory.kept_networks import KeptPasses, Spans, kept_networks
from megamem.ops.deep_memory.kernels import kept_passes_of, passes_of, selected_passes_of
from megamem.ops.deep_memory.network import InnerRates, Join, Weights, deep_memory
from megamem.ops.deep_memory.pointwise import PLAIN
from megamem.ops.deep_memory.selected_networks import SelectedPasses, selected_networks
from megamem.parallel.linears import Linears


@dataclass(frozen=True)
class InnerChunk:
    """One inner chunk of each row, up to the last token of a call or of the inner chunk."""

    query: Tensor
    """[B, H, G, T, D] of the new tokens."""
    tokens: dict[str, Tensor]
    """`key` and `value` [B, H, open + T, D] and gates [B, H, open + T, *gate_shape]; the open tokens come first."""
    new: BlockSlice
    """Where the new tokens lie."""
    parameters: Mapping[str, Tensor]
    """See `Inputs`."""

    @property
    def open_tokens(self) -> int:
        """Number of columns before the new tokens; a row's own open tokens are the last of them."""
        return self.tokens["key"].shape[2] - self.new.tokens

    def seen(self) -> Tensor | None:
        """Return which tokens belong to each row's inner chunk; None if all of them do.

        Returns: [B, 1, open + T], ones and zeros in the dtype of the rates.
        """
        rate = self.tokens["rate"]
        visible = open_visible(self.new, self.open_tokens, rate.device) if self.open_tokens else None
        if visible is None:
            return None
        new = visible.new_ones((self.new.tokens, visible.shape[1]))
        return torch.cat((visible, new)).mT[:, None].to(rate.dtype)


class DeepMemory(RecurrentMixer):
    """A small network per head that is trained on the keys and values it reads."""

    def __init__(self, config: DeepConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.config = config
        self.unit_keys, self.query_scale = config.normalize, 1.0
        self.names = list(config.matrices(model))
        self.max_rate = config.max_rate or 1 / model.resolved_head_dim
        self.start = StartWeights(config.matrices(model), model, linears) if config.start == "learned" else None
        self.token_gates = nn.ModuleDict(
            {name: self.make_gate(model, linears, value) for name, value in config.gate_starts().items()}
        )
        self.gate_shape = config.gate_shape(model)
        self.norm_weight = NormWeight(model, linears) if config.layer_norm else None
        self.norm_eps = model.norm_eps
        self.pointwise = PLAIN
        self.kernel, self.precision = model.deep_memory_kernel, model.deep_memory_precision
        self.group = model.deep_memory_group
        self.passes: Callable[[Tensor, int], GroupPasses] = partial(
            passes_of, self.kernel, self.precision, config.inner_chunk
        )
        self.kept_passes: Callable[[Tensor, Sequence[Tensor]], KeptPasses] = partial(
            kept_passes_of, self.kernel, self.precision
        )
        self.selected_passes: Callable[[Tensor, Sequence[Tensor]], SelectedPasses | None] = partial(
            selected_passes_of, self.kernel, self.precision
        )

    def make_gate(self, model: ModelConfig, linears: Linears, start: float) -> nn.Module:
        """Make the projection from tokens to a gate of `DeepConfig.gate_shape`, which starts at `start`."""
        return TokenGate(model, linears, start)

    def prepare(self, query: Tensor, key: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """See `RecurrentMixer.prepare` ([T, B, heads, D]): unit vectors with `normalize`, else as they are."""
        return (self.unit(query), self.unit(key)) if self.config.normalize else (query, key)

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """Return `rate`, and the logarithm of the sigmoid of each other gate, of tokens x [T, B, hidden_size].

        Each gate is [B, H, T, *gate_shape] in float32 (float64 for float64).
        """
        found = {name: gate(x) for name, gate in self.token_gates.items()}
        if "rate" in found:
            rate = self.max_rate * found.pop("rate").sigmoid()
        else:
            shape = (x.shape[1], self.sizes["kv_heads"] // self.tp_size, x.shape[0], *self.gate_shape)
            rate = torch.full(shape, self.max_rate, dtype=state_dtype(x.dtype), device=x.device)
        return {"rate": rate, **{name: nn.functional.logsigmoid(value) for name, value in found.items()}}

    def memory_parameters(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """See `RecurrentMixer.memory_parameters`: the matrices that documents start from, and the norm's weight."""
        found = {} if self.start is None else self.start()
        if self.norm_weight is not None:
            found["norm"] = self.norm_weight()
        return {name: tensor.to(dtype) for name, tensor in found.items()}

    def output_norm(self, parameters: Mapping[str, Tensor]) -> OutputNorm | None:
        """Return the layer norm inside the memory, with a weight [H, width]; None if there is none."""
        return OutputNorm(parameters["norm"], self.norm_eps) if self.config.layer_norm else None

    def learned(self, memory: State, parameters: Mapping[str, Tensor]) -> Weights:
        """Return what the inner steps change, the learned start plus the state: [B, H, outputs, inputs] each."""
        added = (memory[name] for name in self.names)
        return tuple(
            parameters[name] + tensor if name in parameters else tensor
            for name, tensor in zip(self.names, added, strict=True)
        )  # fmt: skip

    def weights(self, memory: State, parameters: Mapping[str, Tensor]) -> Weights:
        """Return the weights of the network that a state stands for, [B, H, outputs, inputs] each."""
        return self.learned(memory, parameters)

    def recur(self, inputs: Inputs, memory: State, chunk: Chunk, join: Join | None = None) -> tuple[Tensor, State]:
        """See `RecurrentMixer.recur`."""
        if apart(chunk):
            rows, memory = read_row_by_row(
                self.specs, memory, chunk, self.config.inner_chunk,
                lambda row, own, here: self.recur(inputs.rows(row), own, here),
            )  # fmt: skip
            return torch.cat(rows), memory
        reads, done = [], 0
        while done < inputs.tokens:
            here = chunk.after(done)
            memory = self.reset_inside(memory, done, here.starts, inputs.key)
            left = here.document_splits(inputs.tokens - done)[0].stop
            tokens = self.whole_inner_chunks(here, left) if join is None else 0
            part = slice(done, done + tokens)
            if tokens:
                read, memory = self.read_whole(inputs.part(part), memory)
            else:
                # up to the next border of an inner chunk of any row
                size = self.config.inner_chunk
                tokens = min(left, *(size - start % size for start in here.starts))
                part = slice(done, done + tokens)
                read, memory = self._read_inner_chunk(
                    inputs.part(part), memory, BlockSlice(0, tokens, here.starts, size), join
                )
            reads.append(read)
            done = part.stop
        return torch.cat(reads, dim=-2) if len(reads) > 1 else reads[0], memory

    def recur_from_start(self, inputs: Inputs, chunk: Chunk) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `RecurrentMixer.recur_from_start`.

        The learned start stands for what was added to nothing: who keeps the weights would have to add it again, to
        what had been got by subtracting it.
        """
        rows, names = inputs.key.shape[0], set(self.names)
        started = {name: x.expand(rows, *x.shape) for name, x in inputs.parameters.items() if name in names}
        fresh = {
            name: self.zeros(spec, rows, inputs.key.device, inputs.key.dtype)
            for name, spec in self.specs.items()
            if isinstance(spec, TensorSpec) and name not in started
        }
        rest = {name: x for name, x in inputs.parameters.items() if name not in names}
        read, memory = self.recur(replace(inputs, parameters=rest), {**fresh, **started}, chunk)
        return read, self.snapshot(memory, rest)

    def whole_inner_chunks(self, chunk: Chunk, tokens: int) -> int:
        """Return how many of the next tokens are read and written as groups of whole inner chunks of all rows."""
        size = self.config.inner_chunk
        if any(start < 0 or start % size for start in chunk.starts):
            return 0
        whole = tokens - tokens % size
        # a single one gains nothing by a backward pass that computes it anew
        return whole if whole > size else 0

    def in_inner_chunks(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return queries [B, H, G, N, T, D], keys, values and gates [B, H, N, T, ...] of N whole inner chunks."""

        def cut(x: Tensor, axis: int) -> Tensor:
            """Cut the token axis of x [B, ..., T, ...] into inner chunks."""
            return x.unflatten(axis, (-1, self.config.inner_chunk))

        gates = {name: cut(gate, 2) for name, gate in inputs.gates.items()}
        return cut(inputs.query, 3), cut(inputs.key, 2), cut(inputs.value, 2), gates

    def read_whole(self, inputs: Inputs, memory: State) -> tuple[Tensor, State]:
        """Read and write tokens that make up whole inner chunks of each row.

        Returns: what the queries read, [B, H, G, T, D]; the state after the last token.
        """
        query, key, value, gates = self.in_inner_chunks(inputs)
        start = tuple(inputs.parameters[name] for name in self.names if name in inputs.parameters) or None
        momentum = None
        if self.config.has_momentum():
            momentum = tuple(memory[f"{name}_momentum"] for name in self.names)
        read, added, last_momentum = deep_memory_chunks(
            query, key, value, start,
            tuple(memory[name] for name in self.names), momentum,
            InnerRates(gates["rate"], gates.get("log_decay"), gates.get("log_momentum")),
            self.config.loss, self.config.residual, self.output_norm(inputs.parameters),
            self.group or GROUP, self.pointwise, self.passes(inputs.key, len(self.names)),
        )  # fmt: skip
        momenta = zip(self.names, last_momentum or (), strict=last_momentum is not None)
        new = {**dict(zip(self.names, added, strict=True)), **{f"{name}_momentum": value for name, value in momenta}}
        return read.flatten(3, 4), {**memory, **new}

    def snapshot(self, memory: State, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `RecurrentMixer.snapshot`."""
        weights = self.weights(memory, parameters)
        return weights if len(weights) == 1 else (weights[0], weights[1].mT)

    def answer(self, inputs: Inputs, kept: Sequence[Tensor], shares: Tensor, spans: Spans = ()) -> Tensor:
        """See `RecurrentMixer.answer`; each memory ([B, H, N, ...]) has a norm of its own, before the shares."""
        eps = self.norm_eps if self.config.layer_norm else None
        query = self._asked(inputs.query, kept[0])
        made = kept_networks(query, kept, shares, eps, spans, self.pointwise, self.kept_passes(query, kept))
        return self.answered(made, inputs, shares.sum(-1, keepdim=True))

    def answer_selected(
        self, inputs: Inputs, kept: Sequence[Sequence[Tensor]], shares: Sequence[Tensor], most: int,
        copies: Copies | None = None, far: Sequence[bool] = (),
    ) -> Tensor:  # fmt: skip
        """See `RecurrentMixer.answer_selected` ([B, H, G, T, V])."""
        query = self._asked(inputs.query, kept[0][0])
        passes = None if any(far) else self.selected_passes(query, kept[0])
        if passes is None:
            return super().answer_selected(inputs, kept, shares, most, copies, far)
        eps = self.norm_eps if self.config.layer_norm else None
        together = torch.cat(list(shares), dim=-1)
        made = selected_networks(query, kept, together, most, eps, passes)
        return self.answered(made, inputs, together.sum(-1, keepdim=True))

    def _asked(self, query: Tensor, kept: Tensor) -> Tensor:
        """Return queries [..., D] in the dtype of the products with kept matrices [..., D]."""
        return query if self.config.kept_products == "training" else query.to(kept.dtype)

    def mixed(self, inputs: Inputs, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
        """See `RecurrentMixer.mixed`."""
        made = self.product(0, inputs.query, kept, shares)
        if len(kept) == 2:
            made = self.product(1, nn.functional.gelu(made), kept, shares)
        if self.config.layer_norm:
            made = standardized(made, self.norm_eps)
        return self.answered(made, inputs, torch.ones_like(made[..., :1]))

    def answer_rows(self, x: Tensor, kept: Sequence[Matrix], rows: Rows) -> Tensor:
        """See `RecurrentMixer.answer_rows`: what the network makes, normalized."""
        x, exact = self._asked(x, kept[0][0]), kept[0][0].dtype
        made = rows.times(x, [part.to(x.dtype).mT for part in kept[0]])
        if len(kept) == 2:
            made = rows.times(nn.functional.gelu(made), [part.to(x.dtype) for part in kept[1]])
        made = made.to(exact)
        return standardized(made, self.norm_eps) if self.config.layer_norm else made

    def answered(self, made: Tensor, inputs: Inputs, total: Tensor) -> Tensor:
        """See `RecurrentMixer.answered` ([B, H, G, T, D]): the norm's weight, and the query itself."""
        norm, query = self.output_norm(inputs.parameters), inputs.query if self.config.residual else None
        if norm is None and query is None:
            return made
        answered: Tensor = self.pointwise.kept_answer(made, None if norm is None else norm.weight, total, query)
        return answered

    def product(self, matrix: int, x: Tensor, kept: Sequence[Tensor], shares: Tensor) -> Tensor:
        """See `RecurrentMixer.product`."""
        matrices = kept[matrix] if matrix else kept[matrix].mT
        return shared_product(x.to(matrices.dtype), matrices, shares)

    def _read_inner_chunk(
        self, inputs: Inputs, memory: State, block_slice: BlockSlice, join: Join | None
    ) -> tuple[Tensor, State]:
        """Read and write tokens that lie in one inner chunk of each row."""
        # open tokens of the inner chunk stand before the new ones: each step is computed anew from the chunk's start
        open_tokens = memory["open_key"].shape[2]
        new = {"key": inputs.key, "value": inputs.value, **inputs.gates}
        tokens = {
            name: torch.cat((memory[f"open_{name}"].to(tensor.dtype), tensor), dim=2) if open_tokens else tensor
            for name, tensor in new.items()
        }
        read, learned = self.learn(InnerChunk(inputs.query, tokens, block_slice, inputs.parameters), memory, join)
        kept = block_slice.open_tokens_after
        rest = {f"open_{name}": _last(tensor, kept).to(memory[f"open_{name}"].dtype) for name, tensor in tokens.items()}
        memory = {**memory, **rest}
        # the weights change only where the inner chunk has ended
        if all(block_slice.closing):
            return read, {**memory, **learned}
        if any(block_slice.closing):
            closing = to_device(block_slice.closing, read.device, torch.bool)[:, None, None, None]
            memory |= {name: torch.where(closing, value, memory[name]) for name, value in learned.items()}
        return read, memory

    def learn(self, inner: InnerChunk, memory: State, join: Join | None) -> tuple[Tensor, State]:
        """Read and write an inner chunk as far as it has been read.

        Args:
            memory: the state as the inner chunk starts.
            join: see `RecurrentMixer.recur`.
        Returns: what the queries read, [B, H, G, T, D]; weights and momentum after the last token.
        """
        weights = self.weights(memory, inner.parameters)
        momentum = None
        if self.config.has_momentum():
            momentum = tuple(memory[f"{name}_momentum"] for name in self.names)
        read, after, last_momentum = deep_memory(
            inner.query, inner.tokens["key"], inner.tokens["value"], weights, momentum, _rates(inner),
            self.config.loss, self.config.residual, self.output_norm(inner.parameters), join,
        )  # fmt: skip
        momenta = zip(self.names, last_momentum or (), strict=last_momentum is not None)
        return read, {
            **self.added(memory, weights, after),
            **{f"{name}_momentum": value for name, value in momenta},
        }

    def added(self, memory: State, before: Weights, after: Weights) -> State:
        """Return what has been added to the learned start: so far, and by the change from `before` to `after`.

        Summed in this order, as both are small beside the weights themselves.
        """
        return {
            name: memory[name] + (last - first)
            for name, first, last in zip(self.names, before, after, strict=True)
        }  # fmt: skip


def _rates(inner: InnerChunk) -> InnerRates:
    """Return rate, decay and momentum [B, H, T] of the tokens, 0 for open tokens of another inner chunk."""
    rates = InnerRates(inner.tokens["rate"], inner.tokens.get("log_decay"), inner.tokens.get("log_momentum"))
    seen = inner.seen()
    if seen is None:
        return rates
    decay, momentum = (None if gate is None else gate * seen for gate in (rates.log_decay, rates.log_momentum))
    return InnerRates(rates.rate * seen, decay, momentum, seen.expand_as(rates.rate))


def _last(x: Tensor, count: int) -> Tensor:
    """Return the last `count` tokens of x [B, H, T, ...].

    An empty result is a new tensor: an empty view would keep all of x's memory alive.
    """
    return x[:, :, x.shape[2] - count :] if count else x.new_zeros((*x.shape[:2], 0, *x.shape[3:]))
