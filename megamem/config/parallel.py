"""How a run is split over processes: `ParallelConfig`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from megamem.config.base import ConfigModel


def _placement_is_plain(value: object) -> object:
    """Refuse what is neither a rule nor a list of numbers with one line, where the union would give one per member."""
    layers = isinstance(value, list | tuple) and all(isinstance(n, int) and n >= 0 for n in value)
    if not layers and value not in ("flops", "parameters", "measured"):
        raise ValueError(f"{value!r} is neither flops, parameters or measured nor a list of layers per stage")
    return value


class ParallelConfig(ConfigModel):
    """How the model and the batch are split over processes. `parallel: auto` lets the planner choose tp, pp and
    zero_stage."""

    tp: PositiveInt = 1
    """Tensor-parallel size: ranks that share each layer. Divides heads, kv_heads, ffn_size and vocab_size. `auto`: the
    planner chooses."""
    dp: PositiveInt | None = None
    """Data-parallel size; whatever the number of processes leaves if not given."""
    pp: PositiveInt = 1
    """Pipeline stages: ranks that hold different layers. ZeRO 0 and 1 only. `auto`: the planner chooses."""
    placement: Annotated[
        Literal["flops", "parameters", "measured"] | tuple[Annotated[int, Field(ge=0)], ...],
        BeforeValidator(_placement_is_plain),
    ] = "flops"
    """Layers of each stage: balanced by operations, by parameters or by the time each part takes on this machine (all
    with embedding and output head), or a list of the number of layers of each stage."""
    sequence_parallel: bool = False
    """Split the tokens outside of attention and MLP over the tensor-parallel ranks too."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: 1 shards optimizer states over DP ranks, 2 gradients too, 3 parameters too. 0: FP32 only.
    `auto`: the planner chooses."""
    check_memory: bool = True
    """Refuse to start where the plan of a rank's bytes does not fit into its CUDA device."""
    device: Literal["cpu", "cuda"] | None = None
    """`cuda` where there is one if not given."""
    timeout_s: PositiveFloat = 600
    """Seconds a collective may wait before the process group gives up."""
    stall_timeout_s: PositiveFloat = 300
    """Seconds without progress after which the job ends, naming the rank. Must cover the longest single step."""
