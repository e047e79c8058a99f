"""Every registered mixer and every attention backend on CUDA against float64 on the CPU."""

import importlib.util

import pytest
import torch

from megamem.model.kernels import GATE, OPERATIONS, RECURRENCES, choose
from megamem.ops.dropout import Dropout, DropoutKeys
from megamem.ops.linear_cross_entropy import label_scores
from megamem.ops.linear_recurrence.fla import fla_recurrence
from megamem.ops.linear_recurrence.torch import linear_recurrence
from tests.contract.case import CHUNK
from tests.contract.cases import CASES
from tests.contract.driver import LAYOUTS
from tests.gpu.host_copies import check_host_memory
from tests.gpu.numerics import (
    attention_errors,
    deep_memory_errors,
    error,
    kept_network_errors,
    memora_errors,
    mixer_errors,
    recurrence_errors,
)

# relative errors. float32: 2^-24 = 6e-8 per rounding, sums over a few hundred terms in other orders than the CPU's.
# bfloat16: 2^-9 = 2e-3 per rounding of query, key, value, weights and output; a gradient passes twice as many
TOLERANCES = {
    torch.float32: {"output": 2e-5, "state": 2e-5, "gradient": 5e-5},
    torch.bfloat16: {"output": 3e-2, "state": 2e-2, "gradient": 6e-2},
}
ids = [case.id for case in CASES]


def assert_close(errors, dtype):
    assert all(errors[what] <= TOLERANCES[dtype][what] for what in errors), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("subject", ["mixer", "wide"])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_mixer(case, subject, dtype, device):
    assert_close(mixer_errors(case, subject, dtype, device), dtype)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_model(case, device):
    assert_close(mixer_errors(case, "stage", torch.float32, device), torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [1, 3, CHUNK + 5])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_streaming(case, step, layout, device):
    """Odd calls on the device, whole chunks in float64; states are compared where chunks lie on one grid."""
    errors = mixer_errors(case, "mixer", torch.float32, device, layout, step)
    if layout == "padded":
        del errors["state"]
    assert_close(errors, torch.float32)


def test_memories_in_host_memory(device):
    check_host_memory(device)


@pytest.mark.parametrize("operation", [*OPERATIONS, *RECURRENCES], ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_libraries_pass_their_trial(operation, dtype, device):
    """Wherever the library is installed: heads of 64 and 128, and an MLP's width."""
    if dtype not in operation.dtypes:
        pytest.skip("the library's kernel is not used in this dtype")
    for width in (64, 128, 4096) if operation is GATE else (64, 128):
        chosen = choose(operation, width, device, dtype)
        expected = "torch" if operation.library.version is None else operation.library.package
        assert chosen.by.startswith(expected), chosen.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slices", [1, 4])
def test_losses_in_slices(slices, dtype, device):
    x, weight = (torch.randn(n, 64, generator=torch.Generator().manual_seed(0)).to(dtype) for n in (96, 200))
    labels = torch.arange(96)

    def found(x, weight, labels, slices):
        x, weight = x.requires_grad_(), weight.requires_grad_()
        scores = label_scores(x, weight, labels, 190, slices)
        gradients = torch.autograd.grad((scores[0] - scores[1]).sum(), (x, weight))
        return dict(zip(("log sums", "labels", "x", "weight"), (*scores, *gradients), strict=True))

    ours = found(*(each.to(device, copy=True) for each in (x, weight, labels)), slices)
    exact = found(x.double(), weight.double(), labels, 1)
    kinds = {"log sums": "output", "labels": "output", "x": "gradient", "weight": "gradient"}
    for name, kind in kinds.items():
        assert_close({kind: error(ours[name].detach().cpu(), exact[name].detach())}, dtype)


SHAPES = [(128, ()), (128, (64,)), (100, (37,)), (1, (63,)), (64, (32, 64))]
BACKENDS = ["sdpa", "flex", "flash_attn"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "pasts"), SHAPES)
@pytest.mark.parametrize("width", [64, 90])
def test_attention_in_bfloat16(backend, tokens, pasts, width, device):
    if backend == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        backend = "sdpa"  # the optional package is absent: the default kernel is checked once more
    assert_close(attention_errors(backend, torch.bfloat16, device, tokens, pasts, width=width), torch.bfloat16)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(("tokens", "pasts"), SHAPES)
@pytest.mark.parametrize("width", [64, 90])
def test_attention_in_float32(backend, tokens, pasts, width, device):
    assert_close(attention_errors(backend, torch.float32, device, tokens, pasts, width=width), torch.float32)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_grouped_queries(backend, device):
    errors = attention_errors(backend, torch.bfloat16, device, 128, (64,), kv_heads=2)
    assert_close(errors, torch.bfloat16)


@pytest.mark.parametrize("mask", ["rows", "keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 90])
def test_masked_pasts(mask, dtype, width, device):
    assert_close(attention_errors("sdpa", dtype, device, 65, (33, 7), width=width, mask=mask), dtype)


def test_memory_products_run_without_tf32(device):
    """TF32 keeps 10 bits of each factor; coefficients accumulate over long histories."""
    from megamem.parallel.topology import Topology

    Topology.start(device="cuda")
    assert torch.get_float32_matmul_precision() == "highest"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    error = ((a.to(device) @ b.to(device)).cpu().double() - exact).norm() / exact.norm()
    assert error < 1e-5, error


def test_dropout_drops_what_it_drops_on_the_cpu(device):
    dropout = Dropout(0.3, DropoutKeys.of(1, 2, range(3)).inside("here"), first=5)
    values, shares = torch.ones(17, 3, 33), torch.ones(3, 4, 17, 29)
    assert torch.equal(dropout.values(values.to(device)).cpu(), dropout.values(values))
    assert torch.equal(dropout.shares(shares.to(device), True).cpu(), dropout.shares(shares, True))


@pytest.mark.parametrize("gates", ["", "decay", "rate", "decay and rate"])
def test_recurrence_kernels(gates, device):
    """Torch's, and flash-linear-attention's where it is installed, on BF16 tokens against float64."""
    assert recurrence_errors(linear_recurrence, gates, device)["output"] < 2e-5  # FP32 inside
    if importlib.util.find_spec("fla") is not None:
        assert_close(recurrence_errors(fla_recurrence, gates, device), torch.bfloat16)


@pytest.mark.parametrize(("tokens", "width"), [(64, 96), (16, 64), (128, 64)])
@pytest.mark.parametrize("momentum", [False, True], ids=["dla", "titans"])
@pytest.mark.parametrize(("precision", "much"), [("ieee", 1), ("tf32x3", 2), ("tf32", 200)])
@pytest.mark.parametrize("rows", [2, 60])
def test_deep_memory_kernels(precision, much, momentum, tokens, width, rows, device):
    """Triton's against float64: as near as float32, or 2^-11 = 5e-4 for each factor of a product."""
    from megamem.ops.deep_memory.triton.launch import passes

    errors = deep_memory_errors(passes(precision), device, momentum, tokens, width, rows)
    assert all(errors[what] <= much * TOLERANCES[torch.float32][what] for what in errors), errors


@pytest.mark.parametrize("width", [96, 64])
@pytest.mark.parametrize("selected", [False, True], ids=["all", "selected"])
@pytest.mark.parametrize(
    ("dtype", "precision", "much"),
    [
        (torch.float32, "ieee", 1),
        (torch.float32, "tf32x3", 2),
        (torch.float32, "tf32", 200),
        (torch.bfloat16, "tf32", 1),
    ],
)
def test_kept_network_kernels(dtype, precision, much, selected, width, device):
    """Triton's against float64, as above; queries in BF16 round each factor of a product to 2^-9."""
    errors = kept_network_errors(precision, dtype, selected, width, device)
    assert all(errors[what] <= much * TOLERANCES[dtype][what] for what in errors), errors


@pytest.mark.parametrize(("tokens", "width"), [(64, 96), (16, 64)])
@pytest.mark.parametrize("decay", [False, True], ids=["no decays", "decays"])
@pytest.mark.parametrize(("precision", "much"), [("ieee", 2), ("tf32x3", 4), ("tf32", 200)])
def test_memora_kernels(precision, much, decay, tokens, width, device):
    """Triton's against float64, as above; the logarithms of weights alone are 1.7e-5 off in torch's float32."""
    errors = memora_errors(precision, decay, tokens, width, device)
    assert all(errors[what] <= much * TOLERANCES[torch.float32][what] for what in errors), errors
