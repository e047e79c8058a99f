"""LaMemo: what rows see and are mixed of, how it compares with Transformer-XL, what it costs, what is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megamem
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.parameters import parameter_counts
from megamem.errors import ConfigError
from megamem.memory.base import Chunk, State, States, state_tensors
from megamem.model.stage import Stage, build_stage
from megamem.ops.attention.look_ahead import interpolate, look_ahead_attention, unseen_ahead
from megamem.ops.attention.relative import relative_attention
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.unit.test_model_config import parameters

CPU, CHUNK = torch.device("cpu"), 6
POST = {"norm": "layer", "norm_position": "post", "mlp": "relu", "bias": True, "scale_embedding": True}


def model(kind: str = "lamemo", layers: int = 3, shape: dict[str, Any] | None = None, **options: Any) -> ModelConfig:
    tree = {
        "layers": layers, "hidden_size": 16, "heads": 4, "vocab_size": 32, "chunk_size": CHUNK, "init_std": 0.3,
        "mixer": {"kind": kind, **options}, **(shape or {}),
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "test")


def built(config: ModelConfig, layers: range | None = None) -> Stage:
    stage = build_stage(config, PlainLinears(), layers)
    initialize_parameters(stage, 1)
    return stage.double()


def ids(tokens: int, rows: int = 2) -> Tensor:
    return torch.randint(32, (tokens, rows), generator=torch.Generator().manual_seed(0))


def read(stage: Stage, x: Tensor, step: int = CHUNK) -> tuple[Tensor, States]:
    """Outputs of all tokens of x [tokens, rows], read in calls of `step`, and the last states."""
    states, outputs = stage.initial_states(x.shape[1], CPU, next(stage.parameters()).dtype), []
    with torch.no_grad():
        for start in range(0, x.shape[0], step):
            out, states, _ = stage(x[start : start + step], states, Chunk((start,) * x.shape[1]))
            outputs.append(out)
    return torch.cat(outputs), states


@pytest.mark.parametrize("chunk", [1, 4, 6, 7])
@pytest.mark.parametrize("length", [1, 3, 6, 13])
def test_every_pair_of_a_row_and_a_later_token_is_counted_once(length: int, chunk: int) -> None:
    """A token looks ahead to all that came since, for as long as it is in the memory, and to none of it twice."""
    seen: Counter[tuple[int, int]] = Counter()
    last: dict[int, int] = {}
    for begin in range(chunk, 8 * chunk + 1, chunk):
        empty = max(length - begin, 0)
        unseen = unseen_ahead(length, min(chunk, length), True, (empty,) if empty else None, CPU)
        visible = ~(unseen[0] if empty else unseen)
        for row, key in visible.nonzero().tolist():
            token, other = begin - length + row, begin + 1 - visible.shape[1] + key
            if row >= empty:
                seen[token, other] += 1
        last |= dict.fromkeys(range(max(begin - length, 0), begin), begin)
    assert seen == {(i, j): 1 for i, begin in last.items() for j in range(i + 1, begin + 1)}


@pytest.mark.parametrize("shape", [{}, POST], ids=["pre", "post"])
@pytest.mark.parametrize("length", [3, CHUNK, 13])
def test_without_look_ahead_it_is_transformer_xl(length: int, shape: dict[str, Any]) -> None:
    """Rows made anew of what was recorded are the hidden states that Transformer-XL caches."""
    ours = built(model(shape=shape, memory_length=length, look_ahead=False))
    theirs = built(model("transformer_xl", shape=shape, memory_length=length))
    theirs.load_state_dict(ours.state_dict())
    x = ids(5 * CHUNK + 2)
    (mine, _), (expected, states) = read(ours, x), read(theirs, x)
    # float64, sums in another order
    assert (mine - expected).abs().max() < 1e-12
    if not shape:
        return
    # layers that normalize behind themselves cache what they are given: the rows of the chunk that is open
    given: dict[str, Tensor] = {}

    def noting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(hidden: Tensor, state: State, chunk: Chunk) -> Any:
            if chunk.rows_before:
                given[name] = hidden[: chunk.rows_before]
            return forward(hidden, state, chunk)

        return noted

    for name, layer in ours.layers.items():
        layer.mixer.forward = noting(name, layer.mixer.forward)
    read(ours, x)
    assert len(given) == 3
    for name, rows in given.items():
        assert (rows - states[f"layers.{name}"]["memory"]).abs().max() < 1e-12


@pytest.mark.parametrize(
    "options", [{}, {"interpolate": False}, {"positions": "transformer_xl"}, {"order_mask": False}]
)
def test_one_segment_is_causal_attention(options: dict[str, Any]) -> None:
    ours, theirs = built(model(**options)), built(model("transformer_xl"))
    theirs.load_state_dict(ours.state_dict(), strict=False)
    x = ids(CHUNK)
    assert (read(ours, x)[0] - read(theirs, x)[0]).abs().max() < 1e-12
    x = ids(2 * CHUNK)
    assert (read(ours, x)[0] - read(theirs, x)[0])[CHUNK:].abs().max() > 1e-3


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (7, 3), (300, 300), (290, 129)])
@pytest.mark.parametrize("hidden", [None, (0, 3)])
def test_attention_ahead_block_by_block_has_the_gradients_of_the_whole(
    rows: int, keys: int, ordered: bool, hidden: tuple[int, int] | None
) -> None:
    """Vectors and logarithms of sums, against operations that torch differentiates itself."""
    distances = rows + 1 if ordered else 2 * rows + 1
    shapes = ((rows, 2, 4, 8), (rows, 2, 4, 8), (keys, 2, 2, 8), (keys, 2, 2, 8), (distances, 4, 8))
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    found = []
    for fused in (True, False):
        unseen = unseen_ahead(rows, keys, ordered, hidden, CPU)
        out, _, sums = look_ahead_attention(*given, unseen, ordered, fused)
        assert sums is not None
        probes = [torch.randn(t.shape, generator=generator.manual_seed(1), dtype=torch.float64) for t in (out, sums)]
        found.append((out, sums, *torch.autograd.grad([out, sums], given, probes)))
    for ours, whole in zip(*found, strict=True):
        # sums of 300 terms in another order: some hundred units in the last place
        assert (ours - whole).abs().max() < 1e-12 * max(1.0, whole.abs().max().item())


def test_what_is_mixed_is_attention_in_both_directions() -> None:
    """One v and one table of distances for both give one softmax over all places, but for the epsilon of 1e-6."""
    rows, generator = 6, torch.Generator().manual_seed(0)
    content, distance, key, value = (torch.randn(rows + 1, 1, 2, 4, generator=generator).double() for _ in range(4))
    table = torch.randn(rows + 2, 2, 4, generator=generator).double()  # distances 7 to 0
    behind = torch.ones(rows + 1, rows + 1, dtype=torch.bool).triu(1)
    back = relative_attention(content, distance, key, value, table, behind, log_sums=True)
    assert back.log_sums is not None
    unseen = unseen_ahead(rows, rows, True, None, CPU)
    ahead = look_ahead_attention(content[:rows], distance[:rows], key[1:], value[1:], table[1:].flip(0), unseen)
    assert ahead.log_sums is not None
    mixed, sums = interpolate(back.out[:rows], back.log_sums[:rows], ahead.out, ahead.log_sums)
    for row in range(rows):
        for head in range(2):
            by_place = torch.stack([
                content[row, 0, head] @ key[j, 0, head] + distance[row, 0, head] @ table[rows + 1 - abs(row - j), head]
                for j in range(rows + 1)
            ])  # fmt: skip
            exact = (by_place / 2).softmax(0) @ value[:, 0, head]
            assert (mixed[row, 0, head] - exact).abs().max() < 1e-5
            assert abs(sums[row, 0, head] - (by_place / 2).logsumexp(0)) < 1e-12


def test_gradients_flow_through_the_mixture_and_the_look_ahead_but_not_into_records() -> None:
    old, old_sums, new, new_sums = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double().requires_grad_()
        for seed, shape in enumerate([(3, 1, 2, 4), (3, 1, 2), (3, 1, 2, 4), (3, 1, 2)])
    )
    inputs = (old.detach(), old_sums.detach(), new, new_sums)
    assert torch.autograd.gradcheck(lambda n, s: interpolate(*inputs[:2], n, s)[0], (new, new_sums))
    stage = built(model())
    x, states = ids(2 * CHUNK), stage.initial_states(2, CPU, torch.float64)
    _, states, _ = stage(x[:CHUNK], states, Chunk((0, 0)))
    assert not any(tensor.requires_grad for tensor in state_tensors(states))
    out, _, _ = stage(x[CHUNK:], states, Chunk((CHUNK, CHUNK)))
    grads = torch.autograd.grad(stage.token_losses(out, x[CHUNK:]).sum(), list(stage.parameters()))
    for (name, _), grad in zip(stage.named_parameters(), grads, strict=True):
        assert grad.abs().max() > 1e-6, name


def test_every_parameter_has_a_gradient_of_the_first_chunk_too() -> None:
    """The v of the look-ahead has zeros, as no row has a token yet: ZeRO wants a gradient of each."""
    stage = built(model())
    x = ids(CHUNK)
    out, _, _ = stage(x, stage.initial_states(2, CPU, torch.float64), Chunk((0, 0)))
    stage.token_losses(out, x).sum().backward()
    grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    assert not grads["layers.0.mixer.biases.ahead"].any()
    # nobody reads what the topmost layer would see ahead
    assert "layers.2.mixer.biases.ahead" not in grads


@pytest.mark.parametrize("std", [0.1, 3.0])
def test_logarithms_of_sums_stay_exact_in_bfloat16(std: float) -> None:
    """A memory of 20 segments, read for 200 of them: finite, and near those of FP32 from the same weights."""
    config = model(memory_length=20 * CHUNK, shape={"init_std": std})
    low, high = build_stage(config, PlainLinears()), build_stage(config, PlainLinears())
    initialize_parameters(low, 1)
    low.bfloat16()
    high.load_state_dict(low.state_dict())
    x = ids(200 * CHUNK)
    (output, found), (_, exact) = read(low, x), read(high, x)
    assert output.isfinite().all()
    for name in ("layers.0", "layers.1"):
        sums, wanted = found[name]["log_sums"], exact[name]["log_sums"]
        assert sums.dtype == wanted.dtype == torch.float32
        assert sums.isfinite().all()
        if std == 0.1:
            # scores are rounded to BF16, an error of 2e-3 of each; sums of up to 120 of them average it: here 9.4e-4
            # in the lowest layer, 1.5e-3 above it, where keys are of rounded rows
            assert (sums - wanted).abs().max() < 5e-3
        else:
            # exponentials of such scores are beyond FP32
            assert sums.max() > 89


class Operations(TorchDispatchMode):
    """Notes what is computed: the name of every operation and the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found.append((str(func), [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]))
        return result


@pytest.mark.parametrize(
    "options", [{}, {"memory_length": 3}, {"memory_length": 13}, {"look_ahead": False}, {"order_mask": False}]
)
def test_generating_a_token_costs_the_same_however_long_the_text(options: dict[str, Any]) -> None:
    """The same operations on the same shapes and as many bytes of state at each place of a chunk, 40 chunks later."""
    stage = built(model(**options))
    x = ids(50 * CHUNK)

    def generated(chunk: int) -> list[tuple[list[tuple[str, list[torch.Size]]], int]]:
        """What is computed for each token of a chunk, and the bytes of state behind it."""
        _, states = read(stage, x[: chunk * CHUNK])
        found = []
        for place in range(chunk * CHUNK, (chunk + 1) * CHUNK):
            with torch.no_grad(), Operations() as operations:
                _, states, _ = stage(x[place : place + 1], states, Chunk((place, place)))
            found.append((operations.found, sum(tensor.nbytes for tensor in state_tensors(states))))
        return found

    # tables that all calls share are made the first time
    generated(3)
    early, late = generated(4), generated(44)
    assert early == late
    numbers = [sum(shape.numel() for _, shapes in operations for shape in shapes) for operations, _ in early]
    assert numbers[0] > max(numbers[1:]), "rows are made anew with the first token of a chunk alone"


@pytest.mark.parametrize(
    "options", [{}, {"memory_length": 4}, {"positions": "transformer_xl"}, {"shared_biases": True}]
)
def test_parameters_by_hand(options: dict[str, Any]) -> None:
    config = model(**options)
    # W_r, u and v of a layer, and another v where rows are made for a layer above
    vectors, ahead = 3 * 2 * 16, 2 * 16 * (options.get("positions") is None)
    if options.get("shared_biases"):
        vectors, ahead = 2 * 16, 16
    expected = 3 * 16 * 16 + vectors + ahead
    assert parameters(config) - parameters(model("local_attention")) == expected
    assert parameter_counts(config)["total"] == parameters(config)


def test_two_stages_give_what_one_gives() -> None:
    """What a stage hands up is all that the next one needs: rows, and tokens behind them."""
    config = model(memory_length=4)
    whole, lower, upper = built(config), built(config, range(2)), built(config, range(2, 3))
    assert upper.border_shape(CHUNK, 2) == (4 + CHUNK, 2, 16)
    assert upper.border_shape(2, 2, start=4) == (2, 2, 16)
    assert set(upper.components) == {"layers.2"}
    assert set(lower.components) == {"layers.0", "layers.1", "recent_tokens"}
    states = [stage.initial_states(2, CPU, torch.float64) for stage in (whole, lower, upper)]
    for start in range(0, 3 * CHUNK, CHUNK):
        call, chunk = ids(3 * CHUNK)[start : start + CHUNK], Chunk((start, start))
        expected, states[0], _ = whole(call, states[0], chunk)
        hidden, states[1], _ = lower(call, states[1], chunk)
        output, states[2], _ = upper(hidden, states[2], chunk)
        # the same operations in the same order
        assert torch.equal(output, expected)


def test_other_layers_let_the_rows_pass_by() -> None:
    """Layers between and above do not change rows, nor do these change what such layers make of tokens."""
    hybrid = built(model(layers=4, shape={"memory": [{"layers": [1, 3], "mixer": "local_attention"}]}))
    hidden = torch.randn(2 * CHUNK, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for name in ("1", "3"):
        layer = hybrid.layers[name]
        state = layer.mixer.initial_state(1, CPU, torch.float64)
        output, _, _ = layer(hidden, state, Chunk((CHUNK,), rows_before=CHUNK))
        assert torch.equal(output[:CHUNK], hidden[:CHUNK])
        assert torch.equal(output[CHUNK:], layer(hidden[CHUNK:], state, Chunk((CHUNK,)))[0])
    x = ids(4 * CHUNK + 1)
    assert (read(hybrid, x)[0] - read(hybrid, x, 1)[0]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"memory": [{"layers": [1], "mixer": {"kind": "melodi", "form": "rising"}}]},
            "layers share one set of side rows, but are given those of lamemo (layer 0) and those of melodi (layer 1); "
            "use one of these kinds",
        ),
        (
            {"memory": [{"layers": [2], "mixer": {"kind": "lamemo", "memory_length": 5}}]},
            "layers share one set of side rows, but are given 6 (layer 0) and 5 (layer 2); use one number for all",
        ),
        (
            {"architecture": "recurrent_memory"},
            "architecture recurrent_memory carries no side rows, which lamemo (layer 0) takes up the layers; use "
            "architecture decoder",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(shape=change)


def test_it_cannot_stand_alone() -> None:
    with pytest.raises(ConfigError, match=r"lamemo with these options hands rows from layer to layer.*build_model"):
        megamem.mixer("lamemo", hidden_size=16, heads=4, chunk_size=CHUNK)
