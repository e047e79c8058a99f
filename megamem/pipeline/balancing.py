"""What layers, embedding and head cost, so that stages can be balanced."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.memory.base import Chunk
from megamem.model.stage import Stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.parallel.topology import Topology
from megamem.pipeline.placement import balance, contiguous
from megamem.pipeline.simulate import Cost

REPEATS = 3


@dataclass(frozen=True)
class PartCosts:
    """Costs in any one unit."""

    layers: tuple[float, ...]
    embedding: float
    head: float

    def place(self, stages: int) -> list[int]:
        """Layers of each stage."""
        return balance(self.layers, stages, self.embedding, self.head)

    def by_stage(self, counts: list[int]) -> list[float]:
        """Cost of each stage that holds so many layers."""
        rest = iter(self.layers)
        stages = [sum(next(rest) for _ in range(count)) for count in counts]
        stages[0] += self.embedding
        stages[-1] += self.head
        return stages


def parameter_costs(model: ModelConfig) -> PartCosts:
    """Parameters of each layer and of embedding and head (tied: both hold the matrix)."""
    matrix = float(model.resolved_padded_vocab_size * model.hidden_size)
    shared = model.mlp_matrices + model.layer_vectors
    mixers = [model.mixer_at(layer) for layer in range(model.layers)]
    return PartCosts(
        tuple(float(shared + m.projection_parameters(model) + m.extra_parameters(model)) for m in mixers),
        matrix + (model.max_positions or 0) * model.hidden_size,
        matrix + model.norm_vectors,
    )


def flop_costs(model: ModelConfig, sequence_length: int) -> PartCosts:
    """Training FLOPs per token of each layer and the head; looking an embedding up costs none."""
    shared = model.mlp_matrices
    layers = []
    for layer in range(model.layers):
        mixer = model.mixer_at(layer)
        mixing = mixer.mixing_flops(model, sequence_length, True).values()
        products = 6.0 * (shared + mixer.projection_parameters(model))
        layers.append(products + sum(flops.forward + flops.backward for flops in mixing))
    return PartCosts(tuple(layers), 0.0, 6.0 * model.resolved_padded_vocab_size * model.hidden_size)


def chunk_flops(model: ModelConfig, chunks: int, counts: list[int]) -> Cost:
    """FLOPs per token of each action on each stage, by the chunk's index: a memory that grows costs more later on.

    counts: layers of each stage. A chunk's share is what a sequence that ends with it costs more than one that ends
    before it.
    """
    products = 2.0 * model.mlp_matrices
    forward = [[0.0] * chunks for _ in counts]
    backward = [[0.0] * chunks for _ in counts]
    for stage, layers in enumerate(contiguous(counts)):
        for layer in layers:
            mixer = model.mixer_at(layer)
            before = [0.0, 0.0]
            for chunk in range(chunks):
                mixing = mixer.mixing_flops(model, (chunk + 1) * model.chunk_size, True).values()
                total = [(chunk + 1) * sum(f.forward for f in mixing), (chunk + 1) * sum(f.backward for f in mixing)]
                linear = products + 2.0 * mixer.projection_parameters(model)
                forward[stage][chunk] += linear + total[0] - before[0]
                backward[stage][chunk] += 2 * linear + total[1] - before[1]
                before = total
    head = 2.0 * model.resolved_padded_vocab_size * model.hidden_size
    for chunk in range(chunks):
        forward[-1][chunk] += head
        backward[-1][chunk] += 2 * head
    return lambda stage, action: (forward if action.kind == "forward" else backward)[stage][action.chunk]


def measured_costs(config: RunConfig, device: torch.device) -> PartCosts:
    """Seconds of forward and backward over one chunk: of a layer of each kind, the embedding and the head.

    Measured on one device without tensor parallelism, at the start of a document.
    """
    model = config.model
    kinds = {model.mixer_at(layer).model_dump_json(): layer for layer in reversed(range(model.layers))}
    seconds = {kind: _measure(config, device, layer, with_head=False) for kind, layer in kinds.items()}
    layers = tuple(seconds[model.mixer_at(layer).model_dump_json()] for layer in range(model.layers))
    last = _measure(config, device, model.layers - 1, with_head=True)
    # looking tokens up takes far less than the head's product: it is not measured
    return PartCosts(layers, 0.0, max(last - layers[-1], 0.0))


def _measure(config: RunConfig, device: torch.device, layer: int, with_head: bool) -> float:
    """Median seconds over one chunk of a stage that holds one layer, and the output head or not."""
    rows, size = config.training.micro_batch_size, config.model.chunk_size
    # a layer is followed by the head where it is the model's last
    model = config.model.model_copy(update={"layers": layer + (1 if with_head else 2)})
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    with device:
        stage = Stage(model, PlainLinears(), range(layer, layer + 1))
        stage.first = False
        initialize_parameters(stage, 0)
        stage.to(dtype)
        x = torch.ones(size, rows, model.hidden_size).to(dtype).requires_grad_()
        labels = torch.zeros(size, rows, dtype=torch.int64)

    def once() -> None:
        hidden, _, _ = stage(x, stage.initial_states(rows, device, dtype), Chunk((0,) * rows))
        (stage.token_losses(hidden, labels) if with_head else hidden).sum().backward()

    return _median_seconds(once, device)


def _median_seconds(once: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def planned_costs(config: RunConfig) -> PartCosts:
    """Costs that need no device: by parameters if the configuration says so, else by operations."""
    if config.parallel.placement == "parameters":
        return parameter_costs(config.model)
    return flop_costs(config.model, config.data.sequence_length)


def place(config: RunConfig, topology: Topology | None = None) -> list[int]:
    """Layers of each stage as `parallel.placement` asks. A collective call where it asks for a measurement.

    Without a topology a measurement is not made: operations are counted in its place.
    """
    placement, stages = config.parallel.placement, config.parallel.pp
    if isinstance(placement, tuple):
        return list(placement)
    if placement != "measured" or topology is None:
        return planned_costs(config).place(stages)
    counts = torch.zeros(stages, dtype=torch.int64)
    if topology.rank == 0:
        counts += torch.tensor(measured_costs(config, topology.device).place(stages))
    dist.broadcast(counts, src=0)
    return [int(count) for count in counts]
