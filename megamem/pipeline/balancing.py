"""What layers, embedding and head cost, so that stages can be balanced."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.backward import BackwardPass, embedding_products, head_products
from megamem.costs.flops import embedding_flops, flop_costs, head_flops, layer_chunk_flops
from megamem.costs.parameters import parameter_costs
from megamem.costs.parts import PartCosts
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage, typical_labels
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.parallel.topology import Topology
from megamem.pipeline.freezing import backward_pass_of
from megamem.pipeline.placement import balance, contiguous
from megamem.pipeline.simulate import Cost
from megamem.pipeline.train_chunk import dropout_keys

REPEATS = 3


def place_by(costs: PartCosts, stages: int) -> list[int]:
    """Return the number of layers of each stage that balances `costs` over the stages."""
    return balance(costs.layers, stages, costs.embedding, costs.head)


def chunk_flops(
    model: ModelConfig, chunks: int, counts: Sequence[int], backward_pass: BackwardPass | None = None
) -> Cost:
    """Return the FLOPs per token of each action on each stage, by the chunk's index.

    counts: layers of each stage.
    backward_pass: what is left of it where parameters are frozen; everything learns if not given.
    """
    forward = [[0.0] * chunks for _ in counts]
    backward = [[0.0] * chunks for _ in counts]
    for stage, layers in enumerate(contiguous(counts)):
        for layer in layers:
            for chunk, flops in enumerate(layer_chunk_flops(model, layer, chunks, backward_pass)):
                forward[stage][chunk] += flops.forward
                backward[stage][chunk] += flops.backward
    embedding = embedding_products(embedding_flops(model), backward_pass)
    head = head_products(head_flops(model), backward_pass)
    for chunk in range(chunks):
        forward[0][chunk] += embedding.forward
        backward[0][chunk] += embedding.backward
        forward[-1][chunk] += head.forward
        backward[-1][chunk] += head.backward
    return lambda stage, action: (forward if action.kind == "forward" else backward)[stage][action.chunk]


def measured_costs(config: RunConfig, device: torch.device) -> PartCosts:
    """Seconds of forward and backward over one chunk: of a layer of each kind, the embedding and the head.

    Measured on one device without tensor parallelism, at the start of a document.
    """
    model = config.model
    kinds = {model.layer_kind(layer): layer for layer in reversed(range(model.layers))}
    seconds = {kind: _measure(config, device, layer, with_head=False) for kind, layer in kinds.items()}
    layers = tuple(seconds[model.layer_kind(layer)] for layer in range(model.layers))
    last = _measure(config, device, model.layers - 1, with_head=True)
    # looking tokens up, and projecting them, takes far less than the head's product: it is not measured
    return PartCosts(layers, 0.0, max(last - layers[-1], 0.0))


def _measure(config: RunConfig, device: torch.device, layer: int, with_head: bool) -> float:
    """Median seconds over one chunk of a stage that holds one layer, and the output head or not.

    with_head: for the model's last layer only.
    """
    rows, size = config.training.micro_batch_size, config.model.chunk_size
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    with device:
        stage = build_stage(config.model, PlainLinears(), range(layer, layer + 1))
        stage.first, stage.last = False, with_head
        initialize_parameters(stage, 0)
        stage.to(dtype)
        x = torch.ones(stage.border_shape(size, rows)).to(dtype).requires_grad_()
        labels = typical_labels(config.model, size, rows)
    place = Chunk((0,) * rows, dropout=dropout_keys(config.model, 0, 0, range(rows)))

    def once() -> None:
        hidden, _, _ = stage.read_chunk(x, stage.initial_states(rows, device, dtype), place)
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
    return flop_costs(config.model, config.data.sequence_length, backward_pass_of(config))


def place(config: RunConfig, topology: Topology | None = None) -> list[int]:
    """Layers of each stage as `parallel.placement` asks. A collective call where it asks for a measurement.

    Without a topology a measurement is not made: operations are counted in its place.
    """
    placement, stages = config.parallel.placement, config.parallel.pp
    if isinstance(placement, tuple):
        return list(placement)
    if placement != "measured" or topology is None:
        return place_by(planned_costs(config), stages)
    counts = torch.zeros(stages, dtype=torch.int64)
    if topology.rank == 0:
        counts += torch.tensor(place_by(measured_costs(config, topology.device), stages))
    dist.broadcast(counts, src=0)
    return [int(count) for count in counts]
