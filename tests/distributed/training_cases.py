"""What the training tests run on each rank: small models, fixed batches, single-process references."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.data.batch import Batch
from megamem.memory.base import detach
from megamem.model.objective import build_objective
from megamem.model.stage import build_stage
from megamem.parallel.gather import whole_gradient, whole_parameter
from megamem.parallel.linears import PlainLinears, info, initialize_parameters
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.engine import PipelineEngine, build_engine
from megamem.pipeline.train_chunk import chunk_places, dropout_keys
from tests.contract.cases import CASES

ROWS, LENGTH, CHUNK, VOCABULARY = 8, 64, 16, 64
MIXERS = {case.kind: {"kind": case.kind, **case.options} for case in reversed(CASES)}
"""Every registered mechanism once, with the options of its first contract case."""
KINDS = ["local_attention", "elastic_memory", "full_attention", "infini_attention"]
"""No state, a state of fixed size, one that grows, and a memory with parameters: the layers of most cases."""


def layers_of(kinds: list[str]) -> dict[str, Any]:
    """Sections of a model whose layers are these mechanisms."""
    return {
        "layers": len(kinds),
        "memory": [{"layers": [layer], "mixer": MIXERS[kind]} for layer, kind in enumerate(kinds)],
    }


MODEL = {
    "hidden_size": 32, "heads": 4, "kv_heads": 2, "vocab_size": VOCABULARY, "chunk_size": CHUNK, **layers_of(KINDS),
}  # fmt: skip
DLA = {"kind": "dla", "inner_chunk": 2, "expansion": 2}
EVERY = layers_of(sorted(MIXERS))
"""Every mechanism, for a few layouts: the laws hold each to float64 by itself."""
COMBINED = {
    "training": {"objective": {
        "kind": "combined", "copies": {"kind": "copy", "delimiter": {"token": 63, "count": 3}}, "copy_weight": 0.7,
    }},
    "data": {"documents": "drop"},
}  # fmt: skip
"""Sections of a run that reads each batch twice: next tokens, and copies behind delimiters."""
GPT2 = {
    "norm": "layer", "mlp": "gelu", "bias": True, "positions": "learned", "max_positions": 3 * CHUNK,
    "tie_embeddings": True, "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY + 8,
}  # fmt: skip
"""GPT-2's norm, MLP, biases and positions; a vocabulary with spare rows."""

RECURRENT = {"architecture": {"kind": "recurrent_memory", "memory_tokens": 2}}
"""Memory tokens that go from the last layer to the first, around the same layers."""

MEMORY_MODEL = {
    "architecture": {
        "kind": "memory_model",
        "encoder": {
            "layers": 2, "hidden_size": 16, "heads": 4, "mixer": {"kind": "masked_mixer", "form": "headed"},
        },
        "memories_per_chunk": 2, "slots": 2, "overflow": "drop_oldest", "compressed_size": 12,
    },
    "layers": 4, "memory": [], "mixer": "local_attention", "bias": True,
}  # fmt: skip
"""An encoder narrower than its decoder, which reads two memories of each of the last two chunks."""

AUTOENCODER = {
    "architecture": {
        "kind": "autoencoder",
        "encoder": {"layers": 2, "hidden_size": 16, "heads": 4, "mixer": {"kind": "masked_mixer", "form": "headed"}},
    },
    "layers": 4, "memory": [], "mixer": "local_attention",
}  # fmt: skip
"""An encoder narrower than its decoder, which is given one vector of each chunk."""
AUTOENCODE = {"training": {"objective": "autoencode"}, "data": {"documents": "drop"}}
"""How such a model is trained."""

RISING = {"kind": "melodi", "form": "rising", "summaries": 4}
SIDE_ROWS = {
    "mixer": {**RISING, "memories": 2},
    "memory": [
        {"layers": [1], "mixer": "local_attention"},
        {"layers": [2], "mixer": {**RISING, "long_memory": 6, "long_increment": 3}},
    ],
}
"""Summary rows that rise through the layers and pass one of them by."""

LAMEMO = {
    "mixer": {"kind": "lamemo", "memory_length": 12, "shared_biases": True},
    "memory": [
        {"layers": [1], "mixer": "local_attention"},
        {"layers": [2], "mixer": {"kind": "transformer_xl", "memory_length": 12, "shared_biases": True}},
    ],
}
"""Memory rows made in the first layer and read in the last; between them a layer that shares u and v alone."""

DROPOUT = {
    "dropout": 0.2, "attention_dropout": 0.3, "mlp": "relu", "norm_position": "post", "init_std": 0.1,
    **layers_of(["transformer_xl", "elastic_memory", "full_attention", "memorizing_attention"]),
}  # fmt: skip
"""Every place where values are dropped."""

MUP = {"mup": {"base_width": 16, "base_heads": 4}}
"""Half as wide a base with as many heads: start values, learning rates, attention and tied logits all differ."""

ADAPTIVE = {"adaptive": {"cutoffs": [10, 27, 40], "divisor": 2, "row_multiple": 4}}
"""Words in four clusters, the last three of them narrower; each has spare rows."""
TIED_ADAPTIVE = {"adaptive": {**ADAPTIVE["adaptive"], "tie_projections": True}, "tie_embeddings": True}

SHARED_BIASES = {
    "memory": [
        {"layers": [1, 3], "mixer": {"kind": "transformer_xl", "memory_length": 12, "shared_biases": True}},
        {"layers": [2], "mixer": {"kind": "compressive_transformer", "ratio": 4, "shared_biases": True}},
    ],
}
"""One pair of u and v for all layers but the first, in which there are none."""


def run_config(steps: int = 20, **sections) -> RunConfig:
    """A small run; `sections` are merged over the defaults."""
    tree = {
        "name": "case",
        "model": {**MODEL, **sections.get("model", {})},
        "data": {"sources": "none", "sequence_length": LENGTH, "documents": "pack", **sections.get("data", {})},
        "training": {
            "steps": steps, "batch_tokens": ROWS * LENGTH, "precision": "fp32", **sections.get("training", {}),
        },
        "parallel": {"timeout_s": 300, "stall_timeout_s": 240, "device": "cpu", **sections.get("parallel", {})},
        "optimizer": {"grad_clip": 0.0, **sections.get("optimizer", {})},
    }  # fmt: skip
    return parse_config(RunConfig, tree, "test")


def step_batch(step: int, documents: str) -> Batch:
    """All rows of a step, some labels ignored, unevenly over rows; one document a row, but for other ones in row 2.

    documents: with `pack` one begins there at a chunk's border, with `join` three begin at any token.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (LENGTH, ROWS), generator=generator)
    labels = torch.randint(0, VOCABULARY, (LENGTH, ROWS), generator=generator)
    labels[5:40, 1] = -100
    starts = np.arange(0, LENGTH, CHUNK)[:, None].repeat(ROWS, 1)
    begins = None
    if documents == "pack":
        starts[2:, 2] -= 2 * CHUNK
    if documents == "join":
        begins = np.zeros((LENGTH, ROWS), np.bool_)
        begins[0] = True
        begins[[CHUNK - 5, CHUNK + 3, CHUNK + 4], 2] = True
        starts[1:, 2] = np.arange(5, LENGTH - CHUNK + 5, CHUNK)
        starts[2:, 2] -= 9
    return Batch(tokens, labels, starts, tuple(range(ROWS)), begins)


def local_batches(config: RunConfig, topology: Topology, step: int) -> list[Batch]:
    """This rank's micro-batches of `step`, split as the feeder does."""
    whole = step_batch(step, config.data.documents)
    micro = config.training.micro_batch_size
    batches = []
    for a in range(config.accumulation_steps(topology.dp_size)):
        first = (a * topology.dp_size + topology.dp_rank) * micro
        rows = slice(first, first + micro)
        begins = None if whole.begins is None else whole.begins[:, rows]
        own = Batch(whole.tokens[:, rows], whole.labels[:, rows], whole.starts[:, rows], tuple(range(micro)), begins)
        batches.append(own)
    return batches


def reference(
    steps: int,
    bptt_chunks: int,
    lr: float,
    model: str,
    documents: str,
    learns: Callable[[str], bool] = lambda name: True,
    objective: str = '"next_token"',
):
    """(gradients of step 0, losses of all steps, weights at the end): one process, one autograd graph per window.

    model: what differs from `MODEL`, as JSON; documents: see `step_batch`; learns: of a parameter's name;
    objective: one whose readings have a single loss each, the cross-entropy, as JSON. Losses are of the first one.
    """
    training = {"bptt_chunks": bptt_chunks, "objective": json.loads(objective)}
    config = run_config(model=json.loads(model), training=training, data={"documents": documents})
    stage = build_stage(config.model, PlainLinears())
    initialize_parameters(stage, config.training.seed)
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(learns(name))
    decay = config.optimizer.weight_decay
    groups = [
        {"params": [p], "lr": lr * info(p).lr_scale, "weight_decay": decay / info(p).lr_scale if p.ndim >= 2 else 0.0}
        for p in stage.parameters()
        if p.requires_grad
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=config.optimizer.betas, eps=config.optimizer.eps)
    readings = build_objective(config.training.objective, config.model).readings
    gradients: dict[str, torch.Tensor] = {}
    losses = []
    for step in range(steps):
        batch = step_batch(step, documents)
        optimizer.zero_grad()
        for number, (predicting, weight) in enumerate(readings):
            tokens, labels = predicting.inputs_and_labels(batch.tokens, batch.labels)
            rows = range(number * ROWS, (number + 1) * ROWS)
            places = chunk_places(batch, dropout_keys(config.model, config.training.seed, step, rows))
            states = stage.initial_states(ROWS, torch.device("cpu"), torch.float32)
            total, nats = torch.zeros(()), 0.0
            for c in range(LENGTH // CHUNK):
                if c % bptt_chunks == 0:
                    states = detach(states)
                part = slice(c * CHUNK, (c + 1) * CHUNK)
                hidden, states, auxiliary = stage(tokens[part], states, places[c])
                here = stage.token_losses(hidden, labels[part]).sum()
                nats += here.item()
                total = total + here + sum(value * tokens[part].numel() for value in auxiliary.values())
            predicted = (labels != -100).sum()
            (weight * total / predicted).backward()
            if number == 0:
                losses.append(nats / predicted.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in stage.named_parameters() if p.requires_grad}
        optimizer.step()
    return gradients, losses, {name: p.detach().clone() for name, p in stage.named_parameters()}


def train_case(case: dict) -> dict:
    """One rank's run of a case: gathered gradients and norm of step 0, loss of each step, weights at the end."""
    config = run_config(**case["config"])
    topology = Topology.start(config.parallel.tp, pp=config.parallel.pp, device="cpu", timeout_s=120)
    engine = build_engine(config, topology)
    gradients: dict[str, torch.Tensor] = {}
    out: dict = {"losses": []}
    for step in range(case["steps"]):
        watch = read_gradients(engine, gradients) if step == 0 else None
        result = engine.step(local_batches(config, topology, step), case["lr"], watch, steps_before=step)
        torch.distributed.all_reduce(result.loss_sum, group=topology.dp_group)
        out["losses"].append((result.loss_sum / result.predicted).item())
        if step == 0:
            out["grad_norm"] = float(result.grad_norm)
    weights = {name: whole_parameter(p, topology.tp_group) for name, p in engine.parameters().items()}
    if topology.tp_rank == topology.dp_rank == 0:
        out |= {"gradients": gradients, "weights": weights}
    if isinstance(engine, PipelineEngine):
        out["peak_units"] = engine.executor.peak_units
    return out


def read_gradients(engine: TrainingEngine, gradients: dict[str, torch.Tensor]) -> Callable[[str], None]:
    """Return what to watch a step with: it gathers the gradients between the last backward and the update."""

    def watch(action: str) -> None:
        if action != "gradient reduction and optimizer step":
            return
        for name, parameter in engine.parameters().items():
            if parameter.requires_grad:
                gradients[name] = whole_gradient(parameter, engine.topology.tp_group).clone()
            else:
                assert parameter.grad is None

    return watch


def train_cases(cases: dict[str, dict]) -> dict[str, dict]:
    """All cases one after the other in this world."""
    return {name: train_case(case) for name, case in cases.items()}
