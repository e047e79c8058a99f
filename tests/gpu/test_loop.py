"""The training loop on CUDA: no waiting host, steady memory, falling loss."""

import pytest
import torch

from tests.distributed.harness import run_distributed
from tests.gpu.loop import memory_after_steps, run_without_waiting

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": True},
        {"compiled": True},
        {"anywhere": True},
        {"dropout": True},
        {"recompute": "mixer"},
        {"order": "layers", "recompute": "mlp", "anywhere": True},
    ],
    ids=["plain", "recompute", "compiled", "documents-anywhere", "dropout", "recompute-mixer", "layer-by-layer"],
)
def test_the_host_never_waits_between_logging_steps(options, dtype, device):
    run_without_waiting(device, dtype, **options)


def test_memory_does_not_grow_from_step_to_step(device):
    allocated = memory_after_steps(device, BF16, 12)
    assert allocated[2] > 0
    assert len(set(allocated[2:])) == 1, allocated


def run(**payload):
    (result,) = run_distributed(1, "tests.gpu.loop:train", {"device": "cuda", **payload})
    return result


@pytest.mark.parametrize("feeding", ["sequences", "streams"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_bfloat16_training(zero_stage, feeding):
    result = run(precision="bf16", zero_stage=zero_stage, feeding=feeding, steps=30)
    assert all(0 < norm < 100 for norm in result["norms"])
    # one batch of 256 random tokens of 64 is learned by heart
    assert result["losses"][-1] < 0.7 * result["losses"][0]
    print("DeepSpeed waits at:", *result["waits"], sep="\n  ")
    ours = [place for place in result["waits"] if "/megamem/" in place.replace("site-packages", "")]
    assert not ours, ours


def test_compiled_training_follows_plain_training():
    plain, compiled = (run(precision="bf16", zero_stage=1, steps=20, compile=c) for c in (False, True))
    # fused kernels round less often than BF16 kernels in a row: 2^-9 per rounding, and 20 steps amplify it
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=3e-2)


def test_bfloat16_on_cuda_follows_float32_on_the_cpu():
    half = run(precision="bf16", zero_stage=1, steps=10)
    whole = run(precision="fp32", zero_stage=1, steps=10, device="cpu")
    assert half["losses"] == pytest.approx(whole["losses"], rel=3e-2)
