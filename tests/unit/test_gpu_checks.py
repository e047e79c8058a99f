"""The checks of tests/gpu, run where there is no CUDA device: on the CPU, and on `meta`.

Tensors on `meta` have a device and a shape but no values: code that mixes devices, or reads a value to the host, fails.
"""

import pytest
import torch

import megamem.memory.continuous.elastic_memory as elastic_memory
from megamem.ops.attention.softmax import _padded
from megamem.ops.deep_memory.group_backward import TORCH
from tests.contract.cases import CASES
from tests.gpu.conftest import missing_devices
from tests.gpu.host_copies import check_host_memory
from tests.gpu.loop import memory_after_steps, run_without_waiting, train
from tests.gpu.numerics import attention_errors, deep_memory_errors, mixer_errors
from tests.gpu.parallel import LAYOUTS, assert_follows, losses_of, run_and_kill, run_to_end, tree_of
from tests.gpu.test_numerics import assert_close

CPU, META = torch.device("cpu"), torch.device("meta")
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(torch.float32, {"dropout": True}, id="dropout"),
        pytest.param(
            torch.float32, {"order": "layers", "recompute": "mlp"}, id="layer-by-layer", marks=pytest.mark.slow
        ),
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


def test_host_memory_check():
    check_host_memory(CPU)


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
    from tests.distributed.harness import run_distributed

    payload = {"device": "cpu", "precision": "bf16", "zero_stage": 1, "feeding": "streams", "steps": 12}
    (result,) = run_distributed(1, f"{train.__module__}:train", payload)
    assert result["losses"][-1] < result["losses"][0]
    assert result["waits"] == []


@pytest.mark.parametrize("momentum", [False, True], ids=["dla", "titans"])
def test_deep_memories_are_as_near_to_float64_as_the_check_of_their_kernels_asks(momentum):
    assert_close(deep_memory_errors(TORCH, CPU, momentum, tokens=16, width=8), torch.float32)


@pytest.mark.slow
@pytest.mark.distributed
def test_layouts_check():
    """Two processes over gloo; the other layouts and precisions are those of tests/distributed."""
    (alone,) = losses_of(1, "cpu", ["alone"], ["bf16"]).values()
    found = losses_of(2, "cpu", ["tp2", "pp2", "dp2-zero2"], ["bf16"])
    assert len(found) == 3
    for losses in found.values():
        assert_follows(losses, alone, "bf16")
    with pytest.raises(AssertionError):
        assert_follows([1.05 * loss for loss in alone], alone, "bf16")


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_and_moved_check(data, tmp_path):
    """A run under TP 2 whose second rank is killed goes on under DP 2 with ZeRO 1, as if nothing had happened."""
    straight = run_to_end(1, tree_of(data, tmp_path, "straight", "cpu", {}))
    run_and_kill(2, tree_of(data, tmp_path, "killed", "cpu", LAYOUTS["tp2"][1]))
    after = run_to_end(2, tree_of(data, tmp_path, "killed", "cpu", LAYOUTS["dp2-zero1"][1]))
    assert_follows(after, straight, "fp32")


@pytest.mark.parametrize(
    ("marks", "found", "reason"),
    [
        ([], 1, None),
        ([], 0, "needs 1 CUDA device, found 0"),
        ([pytest.mark.devices(4)], 4, None),
        ([pytest.mark.devices(2)], 0, "needs 2 CUDA devices, found 0"),
        ([pytest.mark.devices(4)], 2, "needs 4 CUDA devices, found 2"),
    ],
)
def test_what_is_missing_is_said(request, marks, found, reason):
    for mark in marks:
        request.node.add_marker(mark)
    assert missing_devices(request.node, found) == reason
