"""Many inner chunks at once against one after the other, with the gradients that autograd finds there."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.ops.deep_memory.error import OutputNorm
from megamem.ops.deep_memory.group import deep_memory_chunks
from megamem.ops.deep_memory.network import InnerRates, deep_memory
from megamem.parallel.linears import PlainLinears, initialize_parameters

ROWS, HEADS, GROUPS, CHUNKS, TOKENS, WIDTH, INNER = 2, 2, 2, 5, 4, 3, 6


def drawn(matrices: int, decay: bool, momentum: bool, norm: bool, start: bool) -> dict[str, Tensor]:
    """Inputs in float64 by name, all with gradients."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    gate = (ROWS, HEADS, CHUNKS, TOKENS)
    inputs = {
        "query": normal(ROWS, HEADS, GROUPS, CHUNKS, TOKENS, WIDTH),
        # of length one: the memory must not grow
        "key": torch.nn.functional.normalize(normal(*gate, WIDTH), dim=-1),
        "value": normal(*gate, WIDTH),
        "rate": 0.05 * normal(*gate).sigmoid(),
    }
    if decay:
        inputs["log_decay"] = torch.nn.functional.logsigmoid(2 + normal(*gate))
    if momentum:
        inputs["log_momentum"] = torch.nn.functional.logsigmoid(normal(*gate))
    if norm:
        inputs["norm"] = 1 + 0.3 * normal(HEADS, WIDTH)
    shapes = [(INNER, WIDTH), (WIDTH, INNER)] if matrices == 2 else [(WIDTH, WIDTH)]
    for i, shape in enumerate(shapes):
        if start:
            inputs[f"start_{i}"] = normal(HEADS, *shape)
        inputs[f"added_{i}"] = 0.3 * normal(ROWS, HEADS, *shape)
        if momentum:
            inputs[f"momentum_{i}"] = 0.1 * normal(ROWS, HEADS, *shape)
    return {name: x.requires_grad_() for name, x in inputs.items()}


def named(inputs: dict[str, Tensor], name: str) -> tuple[Tensor, ...]:
    """The inputs of that name and a number, in order."""
    return tuple(x for key, x in inputs.items() if key.startswith(f"{name}_"))


def rates(inputs: dict[str, Tensor], where: object = ...) -> InnerRates:
    """The gates of the tokens."""
    names = ("rate", "log_decay", "log_momentum")
    return InnerRates(*(inputs[name][where] if name in inputs else None for name in names))


def momenta(inputs: dict[str, Tensor]) -> tuple[Tensor, ...] | None:
    """The momentum, if there is one."""
    return named({key: x for key, x in inputs.items() if key != "log_momentum"}, "momentum") or None


def one_by_one(inputs: dict[str, Tensor], loss: str, residual: bool) -> list[Tensor]:
    """Answers, what has been added, and the momentum, from one inner chunk after the other."""
    norm = OutputNorm(inputs["norm"], 1e-3) if "norm" in inputs else None
    start, added, momentum, reads = named(inputs, "start"), named(inputs, "added"), momenta(inputs), []
    for n in range(CHUNKS):
        weights = tuple(a + b for a, b in zip(start, added, strict=True)) if start else added
        read, after, momentum = deep_memory(
            inputs["query"][:, :, :, n], inputs["key"][:, :, n], inputs["value"][:, :, n], weights, momentum,
            rates(inputs, (slice(None), slice(None), n)), loss, residual, norm,
        )  # fmt: skip
        added = tuple(a + (b - c) for a, b, c in zip(added, after, weights, strict=True))
        reads.append(read)
    return [torch.stack(reads, dim=3), *added, *(momentum or ())]


def together(inputs: dict[str, Tensor], loss: str, residual: bool, group: int) -> list[Tensor]:
    """The same from groups of inner chunks."""
    norm = OutputNorm(inputs["norm"], 1e-3) if "norm" in inputs else None
    read, added, momentum = deep_memory_chunks(
        inputs["query"], inputs["key"], inputs["value"], named(inputs, "start") or None, named(inputs, "added"),
        momenta(inputs), rates(inputs), loss, residual, norm, group,
    )  # fmt: skip
    return [read, *added, *(momentum or ())]


FORMS = list(itertools.product((1, 2), ("l2", "dot"), (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(("matrices", "loss", "decay", "momentum", "norm"), FORMS)
def test_groups_are_what_one_after_the_other_gives(
    matrices: int, loss: str, decay: bool, momentum: bool, norm: bool
) -> None:
    """1e-11: rounding of float64 through five steps whose gradients are of the order of ten."""
    residual = (matrices + decay + norm) % 2 == 0
    inputs = drawn(matrices, decay, momentum, norm, start=momentum or matrices == 2)
    exact = one_by_one(inputs, loss, residual)
    found = together(inputs, loss, residual, group=2)
    weights = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2)) for x in exact]

    def gradients(results: list[Tensor]) -> tuple[Tensor, ...]:
        total = sum((x * weight).sum() for x, weight in zip(results, weights, strict=True))
        return torch.autograd.grad(total, list(inputs.values()))

    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for name, ours, theirs in zip(inputs, gradients(found), gradients(exact), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def kept_and_gradients(mixer: str | dict, group: int | None) -> tuple[int, list[Tensor]]:
    """Bytes that a layer keeps for its backward pass over 24 inner chunks, and what it gives: outputs, gradients."""
    sizes = {"hidden_size": 16, "heads": 2, "layers": 1, "vocab_size": 16, "chunk_size": 96}
    model = parse_config(ModelConfig, {**sizes, "mixer": mixer, "deep_memory_group": group}, "test")
    layer = model.mixer_at(0).build(model, PlainLinears(), 0)
    initialize_parameters(layer, 1, 1, 0)
    layer.double()
    x = torch.randn(96, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    state = layer.initial_state(1, x.device, x.dtype)
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        output, *_ = layer(x, state, Chunk((0,)))
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    return sum(kept.values()), [output, *torch.autograd.grad(output.square().sum(), [x, *weights])]


@pytest.mark.parametrize("kind", ["dla", "titans", "memora"])
def test_groups_of_another_length_give_the_same(kind: str) -> None:
    """1e-11: rounding, as gradients are summed in another order; groups of two keep the weights twelve times."""
    mixer = {"kind": kind, "inner_chunk": 4}
    kept, exact = kept_and_gradients(mixer, None)
    for group in (1, 2, 24, 100):
        bytes_kept, found = kept_and_gradients(mixer, group)
        for ours, theirs in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        if group == 2:
            assert bytes_kept > kept
