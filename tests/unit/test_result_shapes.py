"""Rules for results of operations say what torch says, and spare a plan the import of torch's compiler."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megamem.planning.result_shapes import elementwise, known_results, makes_no_numbers
from megamem.planning.tensors import tensors_in

aten = torch.ops.aten


def look(values: object) -> list[object]:
    """Shape, dtype and strides of each tensor, without those of single numbers, which mean nothing."""
    found = list(tensors_in((values,)))
    strides = [[own for own, size in zip(x.stride(), x.shape, strict=True) if size != 1] for x in found]
    return [(x.shape, x.dtype, own) for x, own in zip(found, strides, strict=True)]


def operand(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this shape whose dimensions lie in any order in memory, perhaps with gaps or a number for many."""
    order = rng.sample(range(len(shape)), len(shape))
    made = torch.zeros([shape[dim] * rng.choice((1, 1, 1, 2)) for dim in order], dtype=dtype)
    for place, dim in enumerate(order):
        made = made.narrow(place, 0, shape[dim])
    made = made.permute([order.index(dim) for dim in range(len(shape))])
    return made[:1].expand(shape) if shape and rng.random() < 0.15 else made


def test_elementwise_results_are_those_of_the_operation_itself() -> None:
    """On the CPU, where the result is there to be looked at: operands in any order, broadcast."""
    rng = random.Random(0)
    seen = set()
    for _ in range(3000):
        shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.randrange(5)))
        shapes = [tuple(rng.choice((size, size, size, 1)) for size in shape) for _ in range(rng.choice((1, 2, 2)))]
        shapes = [own[rng.choice((0, 0, 0, len(own) // 2)) :] for own in shapes]
        operands = [operand(rng, own) for own in shapes]
        made = operands[0].exp() if len(operands) == 1 else operands[0] + operands[1]
        assert look(elementwise(operands)) == look(made)
        seen.add(made.is_contiguous())
    assert seen == {True, False}


def test_three_operands() -> None:
    rng = random.Random(1)
    for _ in range(500):
        shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(4))
        choice, *values = (operand(rng, tuple(rng.choice((size, 1)) for size in shape)) for _ in range(3))
        choice = choice.bool()
        assert look(known_results(aten.where.self, (choice, *values), {})) == look(torch.where(choice, *values))


UNARY = (aten.exp.default, aten.neg.default, aten.rsqrt.default, aten.expm1.default)
REDUCED = (aten.mean.dim, aten.sum.dim_IntList, aten.logsumexp.default)
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
NORM_BACKWARD = aten.native_layer_norm_backward.default
BINARY = (aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.gelu_backward.default)
X = torch.zeros(3, 4, 5, dtype=torch.bfloat16)
"""[3, 4, 5]"""
TURNED = X.transpose(0, 2).contiguous().transpose(0, 2)
WEIGHT = torch.zeros(5, dtype=torch.bfloat16)
ROWS = torch.zeros(3, 4, 1)
IMAGES = torch.zeros(2, 4, 4, 3).permute(0, 3, 1, 2)
EXPANDED = torch.zeros(3, 1, 5).expand(3, 4, 5)
OPERATIONS = [
    *((func, (x,)) for func in UNARY for x in (X, TURNED)),
    *((func, (X, TURNED)) for func in BINARY),
    *((func, (TURNED, 2.0)) for func in (aten.pow.Tensor_Scalar, aten.mul.Scalar, aten.clamp_min.default)),
    (aten.mul.Tensor, (X, torch.tensor(2.0))),
    (aten.mul.Tensor, (torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64))),
    (aten.softplus.default, (X, 1.0, 20.0)),
    (aten.softplus_backward.default, (X, X, 1.0, 20.0)),
    (aten.log_sigmoid_forward.default, (TURNED,)),
    (aten.log_sigmoid_backward.default, (X, X, X)),
    *((aten.cumsum.default, (x, 1)) for x in (X, TURNED)),
    *((aten.tril.default, (x,)) for x in (X, TURNED)),
    *((func, (x, 2, False)) for func in (aten._softmax.default, aten._log_softmax.default) for x in (X, TURNED)),
    *((aten._softmax_backward_data.default, (x, X, 2, torch.bfloat16)) for x in (X, TURNED)),
    (aten.masked_fill.Scalar, (TURNED, X.bool(), 0.0)),
    *((func, (TURNED, [1, -1], keep)) for func in REDUCED for keep in (False, True)),
    (aten.linalg_vector_norm.default, (X, 2, [-1], True)),
    *((func, ([X, TURNED], dim)) for func in (aten.cat.default, aten.stack.default) for dim in (0, 1, -1)),
    *((aten.cat.default, ([x[None], x[None]], 1)) for x in (X, TURNED, X.transpose(0, 1), EXPANDED)),
    *((aten.stack.default, ([x, x], dim)) for x in (TURNED, EXPANDED) for dim in (0, -1)),
    (aten.native_layer_norm.default, (X, [5], WEIGHT, WEIGHT, 1e-5)),
    (aten.diag_embed.default, (TURNED,)),
    *((aten.zeros_like.default, (x,)) for x in (X, TURNED)),
    *((aten.flip.default, (x, [0])) for x in (X, TURNED)),
    *((ATTENTION, (x[None], x[None], x[None], 0.0, True)) for x in (X, X.transpose(0, 1).contiguous().transpose(0, 1))),
    (aten.mm.default, (X[0], X[0].t())),
    *((aten.bmm.default, (x, x.transpose(1, 2))) for x in (X, TURNED)),
    (aten.addmm.default, (WEIGHT, X[0], torch.zeros(5, 5, dtype=X.dtype))),
    (aten.baddbmm.default, (torch.zeros(3, 4, 4, dtype=X.dtype), TURNED, X.transpose(1, 2))),
    (aten.slice_backward.default, (TURNED, [3, 9, 5], 1, 2, 6, 1)),
    (aten.select_backward.default, (TURNED, [3, 4, 7, 5], 2, 1)),
    (aten.addcmul.default, (X, TURNED, WEIGHT)),
    *((aten.where.self, (X.bool(), *values)) for values in ((X, TURNED), (torch.tensor(1.0), torch.tensor(2.0)))),
    (aten.native_layer_norm.default, (X.float(), [4, 5], None, None, 1e-5)),
    (NORM_BACKWARD, (X.float(), X.float(), [5], ROWS, ROWS, None, None, [True, False, False])),
    (NORM_BACKWARD, (X.float(), X.float(), [5], ROWS, ROWS, WEIGHT.float(), WEIGHT.float(), [True, True, True])),
]  # fmt: skip


def on_meta(value: object) -> object:
    """The same argument on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [on_meta(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("func", "args"), OPERATIONS, ids=lambda value: str(value) if callable(value) else "")
def test_results_are_those_of_the_meta_device(func, args) -> None:
    told = known_results(func, args, {})
    assert told is not None, "a rule"
    assert look(told) == look(func(*map(on_meta, args)))


def test_a_layer_norm_s_gradient_is_contiguous_whatever_comes_in() -> None:
    args = (TURNED.float(), TURNED.float(), [5], ROWS, ROWS, None, None, [True, False, False])
    assert look(known_results(NORM_BACKWARD, args, {})) == look(NORM_BACKWARD(*args))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.add.Tensor, (torch.arange(3), torch.arange(3)[:, None])),
        (aten.mul.Scalar, (torch.arange(3), 2)),
        (aten.mul.Scalar, (torch.arange(3), 0.5)),
        (aten.mul.Tensor, (torch.arange(3), X[0, 0, :3])),
        (aten.exp.default, (torch.arange(3),)),
        (aten.div.Tensor, (torch.arange(3), torch.arange(1, 4))),
        (aten.lt.Scalar, (X, 1)),
        (aten.bitwise_and.Tensor, (X.bool(), X.bool())),
        (aten.tril.default, (torch.ones(2, 2, dtype=torch.bool),)),
        (aten.cumsum.default, (torch.arange(3), 0)),
        (aten.mm.default, (X[0], X[0].t())),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_masks_and_indices_are_told_from_numbers(func, args) -> None:
    assert makes_no_numbers(func, args) is (not func(*args).is_floating_point())


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.add.Tensor, (torch.zeros(3, dtype=torch.int64), 1), {}),
        (aten.mean.dim, (X, [0]), {"dtype": torch.float32}),
        (aten._softmax.default, (X, 2, True), {}),
        (aten._softmax_backward_data.default, (X.float(), X.float(), 2, torch.bfloat16), {}),
        (aten.cat.default, ([IMAGES, IMAGES], 0), {}),
        (aten.cat.default, ([X, X.float()], 0), {}),
        (aten.masked_fill.Scalar, (WEIGHT, X.bool(), 0.0), {}),
        (aten.native_layer_norm.default, (X, [5], WEIGHT.float(), WEIGHT.float(), 1e-5), {}),
        (aten.mm.default, (torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)), {}),
        (aten.clone.default, (X,), {}),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_what_no_rule_is_certain_of_is_left_to_torch(func, args, kwargs) -> None:
    assert known_results(func, args, kwargs) is None


def test_recipes_are_measured_without_the_compiler() -> None:
    """In a process of its own, since tests import it: a layer of attention and one of a deep memory."""
    script = """
import sys
from pathlib import Path

import torch

from megamem.config.load import merge, parse_config, read_yaml
from megamem.config.run import RunConfig
from megamem.planning.measured_part import Part, Share, measure_chunks

recipe = read_yaml(Path("configs/recipes/memory_caching_760m.yaml"))
for name in ("transformer/transformer-760m", "titans/titans-760m"):
    run = merge(recipe, read_yaml(Path(f"configs/models/{name}.yaml")))
    model = parse_config(RunConfig, {**run, "name": "x"}, "recipe").model
    measure_chunks(Part(model, torch.bfloat16, range(1, 2), None, "cuda"), 2, True, Share(2, 4))
print("torch._dynamo" in sys.modules)
"""
    root = Path(__file__).resolve().parents[2]
    said = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"
