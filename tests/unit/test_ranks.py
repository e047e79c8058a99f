"""What a rank of a layout builds and holds, without building the others."""

from pathlib import Path

import pytest
import torch

from checkpoints.weights import WeightsHeader, write_weights
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.parallel import ParallelConfig
from megamem.config.run import RunConfig
from megamem.costs.parameters import parameter_costs, parameter_counts
from megamem.errors import LayoutError
from megamem.memory.base import DTYPES
from megamem.model.stage import Stage, build_stage, meta_stage
from megamem.parallel.linears import info
from megamem.pipeline.balancing import place_by, planned_costs
from megamem.pipeline.freezing import freeze, learning, what_learns
from megamem.pipeline.optimizer import AgreeingAdamW, parameter_groups
from megamem.pipeline.placement import contiguous
from megamem.planning.plan import checkpoint_bytes
from megamem.planning.rank_linears import RankLinears
from megamem.planning.ranks import fullest, layouts, part_parameters, rank_bytes, stage_parameters
from tests.unit.shipped import SHIPPED, shipped

LARGE = [name for name in SHIPPED if name.endswith(("-760m", "-1.3b"))]
TP, PP = (1, 2, 4, 8), (1, 2, 4)


def parallel(config: RunConfig, zero_stage: int) -> ParallelConfig:
    return config.parallel.model_copy(update={"zero_stage": zero_stage})


def rank_stage(model: ModelConfig, layers: range, tp_size: int) -> Stage:
    """As a rank builds it, without values."""
    with torch.device("meta"):
        return build_stage(model, RankLinears(tp_size), layers)


def whole(model: ModelConfig, tp_size: int, pp_size: int) -> int:
    """Parameters of all ranks of a layout, those that ranks have copies of counted once."""
    total = 0
    for layers in contiguous(place_by(parameter_costs(model), pp_size)):
        stage = rank_stage(model, layers, tp_size)
        assert stage_parameters(model, layers, tp_size) == sum(p.numel() for p in stage.parameters())
        shares = [p.numel() * (1 if info(p).shard_axis is None else tp_size) for p in stage.parameters()]
        total += sum(shares)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_large_model_splits(name: str) -> None:
    """Over 8 x 4 ranks, nothing lost and nothing twice; other layouts of a headline model below."""
    model = shipped(name).model
    assert whole(model, 8, 4) == parameter_counts(model)["total"]


def test_every_layout() -> None:
    config = shipped("titans-grm-760m")
    total = parameter_counts(config.model)["total"]
    assert all(whole(config.model, tp, pp) == total for tp in (2, 8) for pp in PP)
    rows = layouts(config, 1, TP, PP)
    assert list(rows) == [(tp, pp) for tp in TP for pp in PP]
    assert not any(isinstance(rank, str) for rank in rows.values())


def test_bytes_of_a_rank() -> None:
    """BF16 weights 2, FP32 sums 4, master weights and moments 12 bytes; a layer's state by hand."""
    config = shipped("titans-grm-760m")
    (rank,) = rank_bytes(config, 1, 1)
    count = parameter_counts(config.model)["total"]
    assert (rank.parameters, rank.weights, rank.gradients) == (count, 2 * count, 4 * count)
    assert rank.optimizer == 12 * count
    assert rank_bytes(config, 1, 1, dp_size=8)[0].optimizer == -(-12 * count // 8)
    fp32 = {"precision": "fp32"}
    for zero_stage, bytes_each in ((0, 8), (1, 12)):  # ZeRO keeps FP32 copies of its share
        changed = {"training": config.training.model_copy(update=fp32), "parallel": parallel(config, zero_stage)}
        (plain,) = rank_bytes(config.model_copy(update=changed), 1, 1)
        assert (plain.weights, plain.optimizer) == (4 * count, bytes_each * count)
    width, heads, segments = 96, 16, 4096 // 256
    matrices, channels = 2 * 4 * width * width, heads * width
    per_head = 4 * (2 * matrices + width + segments * (matrices + width))  # memory and momentum, keys; kept ones
    per_layer = heads * per_head + 8 * segments + 2 * 3 * 3 * channels  # filled; three convolutions over four tokens
    assert rank.states == config.training.micro_batch_size * 24 * per_layer


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("precision", "zero_stage"), [("fp32", 0), ("fp32", 1), ("bf16", 1)])
def test_frozen_parameters_have_neither_gradients_nor_moments(
    tmp_path: Path, precision: str, zero_stage: int, tp_size: int, pp_size: int
) -> None:
    """Against the gradients and the moments of a real AdamW after a step on what a rank builds, to the byte."""
    path = tmp_path / "start.safetensors"
    memory = {"kind": "infinity_former", "basis": 8, "widths": [0.1, 0.2], "samples": 8}
    tree = {
        "name": "case",
        "model": {
            "layers": 4, "hidden_size": 16, "heads": 4, "vocab_size": 64, "chunk_size": 8,
            "memory": [{"layers": [1, 3], "mixer": memory}, {"layers": [2], "mixer": "infini_attention"}],
        },
        "data": {"sources": "none", "sequence_length": 16},
        "training": {"steps": 2, "batch_tokens": 32, "freeze": "base", "init_from": str(path), "precision": precision},
        "parallel": {"device": "cpu", "pp": pp_size, "zero_stage": zero_stage},
    }  # fmt: skip
    config = parse_config(RunConfig, tree, "test")
    new = [name for name, _ in meta_stage(config.model).named_parameters() if ".long_" in name or ".gate." in name]
    write_weights({}, path, WeightsHeader(new))
    layers_of = contiguous(place_by(planned_costs(config), pp_size))
    for layers, planned in zip(layers_of, rank_bytes(config, tp_size, pp_size), strict=True):
        stage = build_stage(config.model, RankLinears(tp_size), layers)
        freeze(stage, new)
        stage.to(DTYPES[config.training.precision])
        groups = parameter_groups(learning(stage), config.optimizer, new)
        # as DeepSpeed does: FP32 copies of what learns where ZeRO divides the optimizer
        copies = [p.detach().float().clone().requires_grad_() for group in groups for p in group["params"]]
        optimizer = AgreeingAdamW([{**groups[0], "params": copies}], config.optimizer)
        for copy in copies:
            copy.grad = torch.ones_like(copy)
        optimizer.step()
        moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
        held = [*moments, *(copies if zero_stage else [])]
        assert planned.learning == sum(copy.numel() for copy in copies)
        assert planned.parameters == sum(p.numel() for p in stage.parameters())
        assert planned.weights == sum(p.nbytes for p in stage.parameters())
        assert planned.gradients == sum(copy.grad.nbytes for copy in copies if copy.grad is not None)
        assert planned.optimizer == sum(x.nbytes for x in held)
    count = what_learns(config.model, new).total
    frozen = parameter_counts(config.model)["total"] - count
    assert checkpoint_bytes(config) == 12 * count + (2 if precision == "bf16" else 4) * frozen


def test_impossible_layouts_say_why() -> None:
    small = {"layers": 2, "hidden_size": 32, "heads": 4, "vocab_size": 64, "chunk_size": 8}
    model = parse_config(ModelConfig, small, "test")
    with pytest.raises(LayoutError, match=r"parallel.tp: 3 ranks cannot share model.heads 4 evenly"):
        part_parameters(model, 3)
    config = shipped("titans-grm-760m")
    assert "model.heads 16" in str(fullest(config, 3, 1))
    assert "at most one stage per layer" in str(fullest(config, 1, 25))
    divided = config.model_copy(update={"parallel": parallel(config, 3)})
    assert "parallel.zero_stage: 3 needs pp 1" in str(fullest(divided, 1, 2))


def test_a_stage_keeps_global_names() -> None:
    model = shipped("titans-grm-760m").model
    names = [name for name, _ in rank_stage(model, range(6, 8), 2).named_parameters()]
    assert names[0].startswith("layers.6.")
    assert all(name.startswith(("layers.6.", "layers.7.")) for name in names)
