"""The layout in which flash-linear-attention is called: its functions stood in for by loops over its own axes."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.config.load import merge, parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.memory.recurrent.matrix import MatrixMixer
from megamem.model import kernels
from megamem.model.kernels import RECURRENCES, choose, use_library_recurrences
from megamem.model.stage import Stage, build_stage
from megamem.ops.linear_recurrence.fla import check_recurrence, fla_recurrence
from megamem.ops.linear_recurrence.torch import linear_recurrence
from megamem.parallel.linears import PlainLinears
from megamem.planning import measured_part
from megamem.planning.activations import Activations
from megamem.planning.measured_part import Share, recurrence_of


def loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, *, scale: float, initial_state: Tensor,
    output_final_state: bool, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The package's documentation, token by token: q, k, v [batch, tokens, heads, width], g and beta [..., heads].

    cu_seqlens [series + 1]: where the series begin that stand behind one another in a single row; a state for each.
    cu_seqlens_cpu: the same, on the host.
    """
    assert output_final_state
    assert k.shape[-1] % 2 == v.shape[-1] % 2 == 0, "the kernels take even widths"
    if cu_seqlens is not None:
        assert q.shape[0] == 1
        assert cu_seqlens_cpu.tolist() == cu_seqlens.tolist()
        assert len(initial_state) == len(cu_seqlens) - 1
        found = []
        for number, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            own = [None if x is None else x[:, begin:end] for x in (q, k, v, g, beta)]
            state = initial_state[number : number + 1]
            found.append(loop(*own, scale=scale, initial_state=state, output_final_state=True))
        reads, states = zip(*found, strict=True)
        return torch.cat(reads, 1), torch.cat(states)
    assert q.dtype == k.dtype == v.dtype, "the kernels take one dtype"
    q, k, v = (x.to(initial_state.dtype) for x in (q, k, v))
    state, outputs = initial_state, []
    for t in range(q.shape[1]):
        if g is not None:
            state = g[:, t, :, None, None].exp() * state
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, loop)


def put_in_place(monkeypatch: pytest.MonkeyPatch, compute: Callable[..., Any]) -> None:
    """Let `compute` stand for all functions of the package."""
    functions = {
        "simple_gla": ("chunk_simple_gla", lambda q, k, v, g, **rest: compute(q, k, v, g, None, **rest)),
        "delta_rule": ("chunk_delta_rule", lambda q, k, v, beta, **rest: compute(q, k, v, None, beta, **rest)),
        "gated_delta_rule": ("chunk_gated_delta_rule", compute),
    }
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, (function, made) in functions.items():
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, function, made)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("resets", [(), ((2, 3), ()), ((), (1, 6))])
@pytest.mark.parametrize("rate", [False, True])
@pytest.mark.parametrize("decay", [None, 1, 2])
def test_agrees_with_the_recurrence(decay: int | None, rate: bool, resets: Sequence[Sequence[int]]) -> None:
    """Values, state and gradients in float64; decays of one row stand for all rows, resets are those of each."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    # an odd width of values, as a normalizer makes it
    given = {"query": normal(2, 3, 2, 7, 4), "key": normal(2, 3, 7, 4) / 2, "value": normal(2, 3, 7, 5)}
    given["state"] = normal(2, 3, 4, 5)
    if decay is not None:
        given["log_decay"] = -normal(decay, 3, 7).abs()
    if rate:
        given["rate"] = normal(2, 3, 7).sigmoid()
    found = []
    for compute in (fla_recurrence, linear_recurrence):
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        read, after = compute(**leaves, resets=resets)
        grads = torch.autograd.grad(read.sin().sum() + after.cos().sum(), list(leaves.values()))
        found.append((read, after, *grads))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # sums of some ten terms in other orders


def test_values_in_the_states_dtype_are_taken() -> None:
    """SSD multiplies them by its step in FP32; the kernels get the keys' dtype, and answers come in the state's."""
    x = torch.randn(1, 2, 1, 6, 4, generator=torch.Generator().manual_seed(1))
    key, value, state = x[:, :, 0].bfloat16(), x[:, :, 0].float(), torch.zeros(1, 2, 4, 4)
    read, after = fla_recurrence(x.bfloat16(), key, value, state)
    assert read.dtype == after.dtype == torch.float32
    exact, _ = linear_recurrence(x.bfloat16(), key, value.bfloat16(), state)
    torch.testing.assert_close(read, exact, rtol=1e-5, atol=1e-5)  # both sum in FP32


def test_what_cannot_run_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_recurrence("torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.recurrence_kernel: fla is not installed"):
        check_recurrence("fla")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model.recurrence_kernel: fla needs a CUDA device; choose torch"):
        check_recurrence("fla")


# `model.recurrence_kernel: auto`


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is installed, and has kernels for this machine's processor."""
    monkeypatch.setattr(kernels, "DEVICE_TYPE", "cpu")
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name == "fla" or found(name, *rest))
    choose.cache_clear()
    yield
    choose.cache_clear()


CPU = torch.device("cpu")


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("operation", RECURRENCES, ids=lambda operation: operation.name)
def test_it_is_chosen_where_it_is_near_to_exact_results(operation: kernels.Operation) -> None:
    chosen = choose(operation, 8, CPU, torch.bfloat16)
    assert chosen.function is fla_recurrence, chosen.reason
    found = choose(operation, 8, CPU, torch.float32)
    assert found.function is linear_recurrence
    assert found.reason == "flash-linear-attention computes it in bfloat16 alone"


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("operation", RECURRENCES, ids=lambda operation: operation.name)
@pytest.mark.parametrize("slip", ["begins with zeros", "gates", "last state"])
def test_a_wrong_one_is_not(operation: kernels.Operation, slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets the state that it is given, takes gates for others, or hands on the state it had been given."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, **rest: Any) -> Any:
        first = rest["initial_state"]
        if slip == "begins with zeros":
            return loop(q, k, v, g, beta, **{**rest, "initial_state": 0 * first})
        if slip == "last state":
            return loop(q, k, v, g, beta, **rest)[0], first.clone()
        given = (None if g is None else g / 2, None if beta is None else beta / 2)
        return loop(q, k, v, *given, **rest) if any(x is not None for x in given) else loop(q, 2 * k, v, *given, **rest)

    put_in_place(monkeypatch, wrong)
    assert choose(operation, 8, CPU, torch.bfloat16).function is linear_recurrence


def stage_with(mixer: object) -> Stage:
    tree = {"layers": 2, "hidden_size": 16, "heads": 2, "vocab_size": 32, "chunk_size": 16, "mixer": mixer}
    return build_stage(parse_config(ModelConfig, tree, "test"), PlainLinears())


MATRICES = [
    "linear_attention", {"kind": "linear_attention", "features": "elu", "normalizer": True}, "retnet", "ssd",
    "delta_net", {"kind": "delta_net", "decay": True, "expand_v": 2},
]  # fmt: skip
"""Memories of each kind of gates and width of values."""


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("mixer", MATRICES, ids=str)
def test_a_stage_uses_it(mixer: object) -> None:
    stage = stage_with(mixer)
    mixers = [module for module in stage.modules() if isinstance(module, MatrixMixer)]
    before, asked = [mixer.recurrence for mixer in mixers], []

    def agree(here: bool) -> bool:
        asked.append(here)
        return here

    assert [each.by for each in use_library_recurrences(stage, CPU, torch.float32, agree)] == ["torch"] * 2
    assert [mixer.recurrence for mixer in mixers] == before
    chosen = use_library_recurrences(stage, CPU, torch.bfloat16, agree)
    assert [each.by for each in chosen] == ["flash-linear-attention of unknown version"] * 2
    assert asked == [False, True]
    gates = mixers[0].gates(torch.randn(3, 2, 16))
    assert mixers[0].gated == ("log_decay" in gates, "rate" in gates)
    # elsewhere than on CUDA torch computes still
    for one, other in zip(mixers, before, strict=True):
        assert one.recurrence.keywords == {"otherwise": other}


@pytest.mark.usefixtures("tried")
def test_all_ranks_use_it_or_none() -> None:
    stage = stage_with("retnet")
    mixers = [module for module in stage.modules() if isinstance(module, MatrixMixer)]
    before = [mixer.recurrence for mixer in mixers]
    chosen = use_library_recurrences(stage, CPU, torch.bfloat16, lambda here: False)
    assert all(each.function is fla_recurrence for each in chosen), "right on this rank"
    assert [mixer.recurrence for mixer in mixers] == before


@pytest.mark.usefixtures("tried")
def test_stages_without_a_recurrence_agree_too() -> None:
    asked = []
    use_library_recurrences(stage_with("local_attention"), CPU, torch.bfloat16, lambda here: asked.append(here) or True)
    assert asked == [True]


class SmallOnesWrong(torch.autograd.Function):
    """Turns gradients around that are below 1 % of the largest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(gradient.abs() < 0.01 * gradient.abs().max(), -gradient, gradient)


@pytest.mark.usefixtures("tried")
def test_small_gradients_that_are_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within 3 % of the largest, together more than 3 % of all."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, **rest: Any) -> Any:
        return loop(q, SmallOnesWrong.apply(k), v, g, beta, **rest)

    put_in_place(monkeypatch, wrong)
    found = choose(RECURRENCES[0], 8, CPU, torch.bfloat16)
    assert found.function is linear_recurrence
    assert "of the length of all results" in found.reason


@pytest.mark.parametrize("kernel", ["auto", "torch", "fla"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plans_count_what_runs(kernel: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA in BF16 the package's kernels, where it is named or installed; on the CPU never, compiled or not."""
    monkeypatch.setattr(measured_part, "FLA", SimpleNamespace(version="0.6.0", package="flash-linear-attention"))
    model = {
        "layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 32, "chunk_size": 16, "mixer": "retnet",
        "recurrence_kernel": kernel,
    }  # fmt: skip
    data = {"sources": "none", "sequence_length": 32}
    training = {"precision": precision, "batch_tokens": 64, "steps": 1}
    run = {"name": "test", "data": data, "training": training, "model": model}
    for device, compiled in product(("cuda", "cpu"), (False, True)):
        config = parse_config(RunConfig, merge(run, {"training": {"compile": compiled}}), "test")
        plain = parse_config(RunConfig, merge(run, {"model": {"recurrence_kernel": "torch"}}), "test")
        plain = plain.model_copy(update={"training": config.training})
        expected = "fla" if device == "cuda" and precision == "bf16" and kernel != "torch" else "torch"
        assert recurrence_of(config, device) == expected
        ours, torchs = (
            len(Activations.of_run(each, device=device).layer_work(0, Share(2, 1))[0].forward.kinds)
            for each in (config, plain)
        )
        assert (ours < torchs) == (expected == "fla")
