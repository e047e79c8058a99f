"""The trained weights as one safetensors file, whatever layout they were trained under."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from megamem.errors import DataError
from megamem.parallel.gather import whole_parameter
from megamem.parallel.linears import info
from megamem.parallel.topology import Topology


def save_weights(parameters: dict[str, nn.Parameter], topology: Topology, path: Path) -> None:
    """Write FP32 master weights by global name, gathered tensor by tensor; rank 0 writes. All ranks must call it."""
    whole: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        value = whole_parameter(parameter, topology.tp_group)
        if topology.rank == 0:
            whole[name] = value.detach().cpu().contiguous().clone()
    if topology.rank == 0:
        temporary = path.with_suffix(".tmp")
        save_file(whole, temporary, metadata={"format": "megamem", "dtype": "fp32"})
        temporary.rename(path)


def load_weights(parameters: dict[str, nn.Parameter], path: Path, tp_size: int = 1, tp_rank: int = 0) -> None:
    """Copy this rank's shards from a file of `save_weights`. Raises DataError naming file and tensor."""
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
