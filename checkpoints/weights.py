"""The trained weights as one safetensors file, whatever layout they were trained under."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.config.parts import ModelPart
from megamem.config.predictions import settings_without_tensors
from megamem.errors import DataError
from megamem.parallel.gather import whole_parameter
from megamem.parallel.linears import info
from megamem.parallel.topology import Topology
from megamem.tensor_files import write_tensors

IMPORTED_MODEL, IMPORTED_WEIGHTS, IMPORTED_TOKENIZER = "model.yaml", "weights.safetensors", "tokenizer"
"""Names of the files that `megamem convert from-hf` writes of a model."""


@dataclass(frozen=True)
class WeightsHeader:
    """What a weights file says of its weights besides their names."""

    new_parameters: Sequence[str] = ()
    """Parameters of the model that the file does not hold and that start as in a new run."""
    tokenizer: str | None = None
    """`Tokenizer.vocabulary_hash` of what the weights were trained with."""
    parts: Mapping[str, ModelPart] = field(default_factory=dict)
    """Parts of the model that can start another model's (`ArchitectureConfig.parts`)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`settings_without_tensors` of the model that the weights were trained in."""

    @classmethod
    def of_model(cls, model: ModelConfig, tokenizer: str | None, new_parameters: Sequence[str] = ()) -> WeightsHeader:
        """Return the header of a model's weights."""
        return cls(new_parameters, tokenizer, model.architecture.parts(model), settings_without_tensors(model))

    def metadata(self) -> dict[str, str]:
        """Return it as safetensors has it."""
        said = {
            "format": "megamem",
            "dtype": "fp32",
            "new_parameters": json.dumps(list(self.new_parameters)),
            "parts": json.dumps({name: part.model_dump(mode="json") for name, part in self.parts.items()}),
            "settings": json.dumps(dict(self.settings)),
        }
        return said if self.tokenizer is None else {**said, "tokenizer": self.tokenizer}


def save_weights(
    parameters: dict[str, nn.Parameter], topology: Topology, path: Path, header: WeightsHeader = WeightsHeader()
) -> None:
    """Gather FP32 master weights tensor by tensor and write them by global name, on rank 0. All ranks must call it."""
    whole: dict[str, Tensor] = {}
    values = ((name, whole_parameter(parameter, topology.tp_group)) for name, parameter in parameters.items())
    if topology.pp_rank > 0:
        _send(values, parameters, topology)
        return
    for name, value in values:
        if topology.rank == 0:
            whole[name] = value.detach().cpu().contiguous().clone()
    if topology.rank == 0:
        for stage in range(1, topology.pp_size):
            # the last stage's tied embedding is the first's
            whole = {**dict(_receive(stage, topology)), **whole}
        write_weights(whole, path, header)


def write_weights(weights: dict[str, Tensor], path: Path, header: WeightsHeader = WeightsHeader()) -> None:
    """Write FP32 weights by global name as one file, whole or not at all.

    Args:
        weights: whole tensors, of each parameter's own shape, [N, ...].
        path: the safetensors file.
        header: what the file says of them.

    Raises:
        OSError: as `write_tensors` does.
    """
    write_tensors(path, weights, header.metadata())


def _send(values: Iterable[tuple[str, Tensor]], parameters: dict[str, nn.Parameter], topology: Topology) -> None:
    """Send a later stage's tensors to the first stage: their names and shapes, then one after the other.

    values: whole tensors by global name, of each parameter's own shape, [N, ...].
    """
    sends = topology.dp_rank == 0 and topology.tp_rank == 0
    if sends:
        shapes = {name: _whole_shape(parameter, topology.tp_size) for name, parameter in parameters.items()}
        header = torch.frombuffer(bytearray(json.dumps(shapes).encode()), dtype=torch.uint8).to(topology.device)
        length = torch.tensor([header.numel()], device=topology.device)
        dist.send(length, group=topology.pp_group, group_dst=0)
        dist.send(header, group=topology.pp_group, group_dst=0)
    for _, value in values:
        if sends:
            dist.send(value.detach().contiguous(), group=topology.pp_group, group_dst=0)


def _receive(stage: int, topology: Topology) -> Iterator[tuple[str, Tensor]]:
    """Yield what `_send` sends on `stage`: names and whole tensors, on the CPU."""
    length = torch.zeros(1, dtype=torch.int64, device=topology.device)
    dist.recv(length, group=topology.pp_group, group_src=stage)
    header = torch.empty(int(length), dtype=torch.uint8, device=topology.device)
    dist.recv(header, group=topology.pp_group, group_src=stage)
    for name, shape in json.loads(bytes(header.tolist())).items():
        value = torch.empty(shape, device=topology.device)
        dist.recv(value, group=topology.pp_group, group_src=stage)
        yield name, value.cpu()


def _whole_shape(parameter: nn.Parameter, tp_size: int) -> list[int]:
    """Return the shape of a parameter that tensor-parallel ranks hold shards of."""
    shape, axis = list(parameter.shape), info(parameter).shard_axis
    if axis is not None:
        shape[axis] *= tp_size
    return shape


def load_weights(parameters: dict[str, nn.Parameter], path: Path, tp_size: int = 1, tp_rank: int = 0) -> None:
    """Copy this rank's shards from a file of `save_weights`.

    Args:
        parameters: the model's, by global name; overwritten.
        path: the safetensors file.
        tp_size: number of tensor-parallel ranks.
        tp_rank: this rank among them.

    Raises:
        DataError: the file cannot be read or is of another model; the message names file and tensor.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such weights file")
    try:
        file = safe_open(path, framework="pt")
    except Exception as error:
        raise DataError(f"{path}: not a readable safetensors file ({error})") from None
    with file, torch.no_grad():
        names = set(file.keys())
        if missing := sorted(set(parameters) - names):
            raise DataError(f"{path}: {missing[0]} is missing; the file belongs to another model")
        if extra := sorted(names - set(parameters)):
            raise DataError(f"{path}: {extra[0]} is not in the model; the file belongs to another model")
        for name, parameter in parameters.items():
            value = file.get_tensor(name)
            axis = info(parameter).shard_axis
            if axis is not None:
                value = value.chunk(tp_size, axis)[tp_rank]
            if value.shape != parameter.shape:
                raise DataError(f"{path}: {name} has shape {tuple(value.shape)}, the model {tuple(parameter.shape)}")
            parameter.copy_(value)
