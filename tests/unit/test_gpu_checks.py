"""The checks of tests/gpu, run where there is no CUDA device: on the CPU, and on `meta`.

Tensors on `meta` have a device and a shape but no values: code that mixes devices, or reads a value to the host, fails.
"""

import pytest
import torch

import megamem.memory.continuous.elastic_memory as elastic_memory
from megamem.ops.attention.softmax import _padded
from tests.contract.cases import CASES
from tests.gpu.loop import memory_after_steps, run_without_waiting, train
from tests.gpu.numerics import attention_errors, mixer_errors
from tests.gpu.test_numerics import assert_close

CPU, META = torch.device("cpu"), torch.device("meta")
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(torch.float32, {"dropout": True}, id="dropout"),
        pytest.param(torch.float32, {}, id="plain", marks=pytest.mark.slow),
        pytest.param(torch.float32, {"anywhere": True}, id="documents-anywhere", marks=pytest.mark.slow),
        pytest.param(BF16, {"recompute": True}, id="recompute", marks=pytest.mark.slow),
    ],
)
def test_steps_and_callbacks_read_no_value_and_mix_no_devices(dtype, options):
    run_without_waiting(META, dtype, **options)


def test_the_loop_runs_on_the_cpu_too():
    run_without_waiting(CPU, torch.float32)
    run_without_waiting(CPU, torch.float32, anywhere=True)
    assert memory_after_steps(CPU, BF16, 2) == [0, 0]


def test_a_value_read_by_the_host_is_noticed(monkeypatch):
    remember = elastic_memory.ElasticMemory.remember

    def curious(self, state, span, keys, values):
        assert keys.abs().max() > 0
        return remember(self, state, span, keys, values)

    monkeypatch.setattr(elastic_memory.ElasticMemory, "remember", curious)
    with pytest.raises(RuntimeError, match="meta"):
        run_without_waiting(META, torch.float32)


def test_a_tensor_on_another_device_is_noticed(monkeypatch):
    monkeypatch.setattr(elastic_memory, "to_device", lambda values, device, dtype: torch.tensor(values, dtype=dtype))
    with pytest.raises((RuntimeError, NotImplementedError)):
        run_without_waiting(META, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_mixer_check(case, dtype):
    assert_close(mixer_errors(case, "mixer", dtype, CPU), dtype)


def test_mixer_check_in_other_forms():
    elastic = next(case for case in CASES if case.kind == "elastic_memory")
    assert_close(mixer_errors(elastic, "wide", torch.float32, CPU), torch.float32)
    assert_close(mixer_errors(elastic, "stage", torch.float32, CPU), torch.float32)
    assert_close(mixer_errors(elastic, "mixer", torch.float32, CPU, "one_grid", 3), torch.float32)
    padded = mixer_errors(elastic, "mixer", torch.float32, CPU, "padded", 13)
    assert_close({"output": padded["output"], "gradient": padded["gradient"]}, torch.float32)


@pytest.mark.parametrize(("tokens", "pasts"), [(40, ()), (30, (17,)), (1, (23,))])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_attention_check(tokens, pasts, dtype):
    assert_close(attention_errors("sdpa", dtype, CPU, tokens, pasts, kv_heads=2, width=90), dtype)


@pytest.mark.parametrize("mask", ["rows", "keys"])
def test_masked_attention_check(mask):
    assert_close(attention_errors("sdpa", torch.float32, CPU, 9, (5, 3), mask=mask), torch.float32)


def test_padded_heads_attend_as_unpadded_ones():
    """CUDA's fused kernels get heads of 90 as 96; zeros add nothing to scores, and the scale stays that of 90."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 11, 90, dtype=torch.float64, generator=generator) for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    padded = _padded(q, k, v, is_causal=True)
    assert padded.shape == exact.shape
    torch.testing.assert_close(padded, exact, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.distributed
def test_training_check():
    from tests.distributed.harness import PARALLEL, run_distributed

    payload = {"device": "cpu", "precision": "bf16", "zero_stage": 1, "feeding": "streams", "steps": 12}
    (result,) = run_distributed(1, f"{train.__module__}:train", payload, preload=PARALLEL)
    assert result["losses"][-1] < result["losses"][0]
    assert result["waits"] == []
