"""Infini-Transformer: its sizes in the paper's tables, and what is special in its gate, write and numerics."""

import pytest
import torch

from megamem.config.model import ModelConfig
from megamem.costs.parameters import parameter_counts
from megamem.costs.state_bytes import model_state_bytes, state_sizes
from megamem.memory.attention.local_attention import LocalAttentionConfig
from megamem.memory.base import Chunk
from megamem.memory.compressive.infini_attention import InfiniAttention, InfiniAttentionConfig, features, retrieve
from megamem.memory.shared.blocks import BlockSlice
from megamem.parallel.linears import PlainLinears, info, initialize_parameters
from tests.unit.shipped import shipped

BLOCK, HEADS, WIDTH = 8, 4, 6
CPU = torch.device("cpu")


def model_with(kv_heads: int = HEADS, **options) -> ModelConfig:
    tree = {
        "layers": 1, "hidden_size": HEADS * WIDTH, "heads": HEADS, "kv_heads": kv_heads, "chunk_size": BLOCK,
        "init_std": 0.3, "mixer": {"kind": "infini_attention", **options},
    }  # fmt: skip
    return ModelConfig.model_validate(tree)


def mixer_with(kv_heads: int = HEADS, dtype: torch.dtype = torch.float64, **options) -> InfiniAttention:
    model = model_with(kv_heads, **options)
    mixer = model.mixer_at(0).build(model, PlainLinears(), 0)
    initialize_parameters(mixer, 1)
    return mixer.to(dtype)


def hidden(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, rows, HEADS * WIDTH, dtype=torch.float64, generator=generator)


def write(mixer: InfiniAttention, state, keys, values, at: int, rows: int = 1):
    """The memory after a block of keys and values that starts at position `at`."""
    return state | mixer.remember(state, BlockSlice(0, BLOCK, (at,) * rows, BLOCK), keys, values)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class TestSizes:
    @pytest.mark.parametrize(
        ("size", "memory", "gates"), [("100m", 777_600, 96), ("200m", 1_166_400, 144), ("400m", 1_555_200, 192)]
    )
    def test_memory_and_added_parameters_of_the_paper(self, size, memory, gates):
        """Tables 1, 2 and 4: 0.8M, 1.2M and 1.6M numbers; H parameters a layer, 96 in the 100M model."""
        model = shipped(f"infini-{size}").model
        numbers = {"associations": 0, "mass": 0}
        for layer in range(model.layers):
            specs = model.mixer_at(layer).state_specs(model)
            for name in numbers:
                numbers[name] += torch.Size(specs[name].sizes(state_sizes(model, "layers.0", 1))).numel()
        assert numbers == {"associations": memory, "mass": model.layers * model.hidden_size}
        assert memory == model.resolved_head_dim**2 * model.heads * model.layers
        planned = model_state_bytes(model, 1, torch.bfloat16, context_tokens=32_768)
        assert planned == {"memory": 4 * (memory + model.layers * model.hidden_size), "open": 0}
        assert sum(model.mixer_at(layer).extra_parameters(model) for layer in range(model.layers)) == gates
        plain = shipped(f"transformer-{size}").model
        assert parameter_counts(model)["total"] - parameter_counts(plain)["total"] == gates
        assert parameter_counts(model)["memory"] == gates

    @pytest.mark.parametrize("size", ["100m", "200m", "400m"])
    def test_recipes_differ_from_the_compared_ones_in_the_model_alone(self, size):
        infini, elastic = (
            shipped(f"{kind}-{size}").model_dump(exclude={"model", "name"}) for kind in ("infini", "elastic")
        )
        assert infini == elastic

    def test_key_heads_are_what_counts(self):
        model = model_with(kv_heads=2)
        specs = model.mixer_at(0).state_specs(model)
        assert specs["associations"].sizes(state_sizes(model, "layers.0", 3)) == (3, 2, WIDTH, WIDTH)
        assert model.mixer_at(0).extra_parameters(model) == HEADS


class TestGate:
    def test_the_first_block_is_local_attention_whatever_the_gate(self):
        x = hidden(2 * BLOCK)
        outputs = {}
        for gate in (-30.0, 0.0, 30.0):
            mixer = mixer_with(gate_init=gate)
            outputs[gate] = mixer(x, mixer.initial_state(1, CPU, x.dtype), Chunk((0,)))[0]
        model = model_with()
        local = LocalAttentionConfig().build(model, PlainLinears(), 0)
        initialize_parameters(local, 1)
        expected = local.double()(x, local.initial_state(1, CPU, x.dtype), Chunk((0,)))[0]
        for output in outputs.values():
            assert torch.equal(output[:BLOCK], expected[:BLOCK])
        # sigmoid(-30) = 1e-13: the second block is local attention too, and at 30 it is not
        torch.testing.assert_close(outputs[-30.0], expected, rtol=0, atol=1e-11)
        assert (outputs[30.0] - expected)[BLOCK:].abs().amin(-1).min() >= 0
        assert (outputs[30.0] - outputs[0.0])[BLOCK:].abs().max() > 0.1

    def test_each_row_leaves_its_own_first_block_alone(self):
        """One row in its second block, one in its first, one in left padding: the gate mixes in the first only."""
        mixer = mixer_with()
        state = mixer.initial_state(3, CPU, torch.float64)
        filled = write(mixer, state, *(random(BLOCK, 3, HEADS, WIDTH, seed=s) for s in (1, 2)), at=0, rows=3)
        fresh = torch.tensor([False, True, True])[:, None, None, None]
        state["associations"] = filled["associations"].masked_fill(fresh, 0)
        state["mass"] = filled["mass"].masked_fill(fresh[..., 0], 0)
        local, query = random(2, 3, HEADS, WIDTH, seed=3), random(2, 3, HEADS, WIDTH, seed=4)
        mixed = mixer.mix(local, query, state, BlockSlice(0, 2, (BLOCK + 1, 3, -4), BLOCK))
        assert torch.isfinite(mixed).all()
        assert torch.equal(mixed[:, 1:], local[:, 1:])
        row = {name: tensor[:1] for name, tensor in filled.items() if name in ("associations", "mass")}
        alone = mixer.mix(local[:, :1], query[:, :1], row, BlockSlice(0, 2, (BLOCK + 1,), BLOCK))
        torch.testing.assert_close(mixed[:, :1], alone, rtol=0, atol=1e-14)

    def test_gradients_stay_finite_where_the_memory_is_empty(self):
        mixer = mixer_with(normalize=False)
        state = mixer.initial_state(2, CPU, torch.float64)
        state = write(mixer, state, *(random(BLOCK, 2, HEADS, WIDTH, seed=s) for s in (1, 2)), at=0, rows=2)
        state = {name: state[name] * torch.tensor([1.0, 0.0]).view(-1, *(1,) * (state[name].ndim - 1))
                 for name in ("associations", "mass")}  # fmt: skip
        local, query = (random(3, 2, HEADS, WIDTH, seed=s).requires_grad_() for s in (3, 4))
        mixer.mix(local, query, state, BlockSlice(0, 3, (BLOCK, 0), BLOCK)).square().sum().backward()
        assert torch.isfinite(query.grad).all()
        assert query.grad[:, 0].abs().max() > 0
        assert query.grad[:, 1].abs().max() == 0

    def test_the_gate_has_a_gradient_of_zeros_in_a_first_block(self):
        """A window of one block must leave no parameter without a gradient."""
        mixer = mixer_with()
        mixer(hidden(BLOCK), mixer.initial_state(1, CPU, torch.float64), Chunk((0,)))[0].sum().backward()
        assert mixer.gate.logit.grad.tolist() == [0.0] * HEADS

    @pytest.mark.parametrize("update", ["delta", "linear"])
    def test_an_empty_memory_in_the_middle_of_a_document_is_harmless(self, update):
        """A run that begins there afresh: its first block is local attention, its second reads the first."""
        mixer = mixer_with(update=update)
        x = hidden(2 * BLOCK)
        late, late_state, _ = mixer(x, mixer.initial_state(1, CPU, x.dtype), Chunk((5 * BLOCK,)))
        early, early_state, _ = mixer(x, mixer.initial_state(1, CPU, x.dtype), Chunk((0,)))
        torch.testing.assert_close(late, early, rtol=0, atol=1e-13)
        torch.testing.assert_close(late_state["associations"], early_state["associations"], rtol=0, atol=1e-13)

    def test_one_gate_per_query_head_starts_where_it_is_told_and_does_not_decay(self):
        mixer = mixer_with(kv_heads=2, gate_init=-1.5)
        assert mixer.gate.logit.tolist() == [-1.5] * HEADS
        assert info(mixer.gate.logit).shard_axis == 0
        assert not info(mixer.gate.logit).decay


class TestWrite:
    def test_what_is_known_is_not_written_again(self):
        """One key with one value: the delta rule leaves M as it is, `linear` adds the block once more."""
        key, value = random(1, 1, HEADS, WIDTH, seed=1), random(1, 1, HEADS, WIDTH, seed=2)
        keys, values = key.expand(BLOCK, -1, -1, -1), value.expand(BLOCK, -1, -1, -1)
        for update, growth in (("delta", 1), ("linear", 2)):
            mixer = mixer_with(update=update)
            once = write(mixer, mixer.initial_state(1, CPU, key.dtype), keys, values, at=0)
            twice = write(mixer, once, keys, values, at=BLOCK)
            torch.testing.assert_close(twice["associations"], growth * once["associations"], rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(twice["mass"], 2 * once["mass"])

    def test_the_first_block_is_written_whole(self):
        keys, values = random(BLOCK, 1, HEADS, WIDTH, seed=1), random(BLOCK, 1, HEADS, WIDTH, seed=2)
        written = []
        for update in ("delta", "linear"):
            mixer = mixer_with(update=update)
            written.append(write(mixer, mixer.initial_state(1, CPU, keys.dtype), keys, values, at=0))
        assert torch.equal(written[0]["associations"], written[1]["associations"])
        sigma = torch.nn.functional.elu(keys) + 1
        expected = torch.einsum("tbhi,tbhj->bhij", sigma, values)
        torch.testing.assert_close(written[0]["associations"], expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(written[0]["mass"], sigma.sum(0), rtol=0, atol=1e-13)

    def test_the_linear_memory_is_one_sum_over_the_whole_past(self):
        """Read after three blocks, it is linear attention over all of their tokens."""
        mixer = mixer_with(update="linear")
        keys, values = random(3 * BLOCK, 1, HEADS, WIDTH, seed=1), random(3 * BLOCK, 1, HEADS, WIDTH, seed=2)
        state = mixer.initial_state(1, CPU, keys.dtype)
        for at in range(0, 3 * BLOCK, BLOCK):
            state = write(mixer, state, keys[at : at + BLOCK], values[at : at + BLOCK], at)
        query = random(1, HEADS, 5, WIDTH, seed=3)
        found, known = retrieve(features(query), state["associations"], state["mass"])
        assert known.all()
        weights = torch.einsum("bhqi,tbhi->bhqt", features(query), features(keys))
        expected = torch.einsum("bhqt,tbhj->bhqj", weights / weights.sum(-1, keepdim=True), values)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)

    def test_rows_whose_block_goes_on_keep_their_memory_bit_for_bit(self):
        mixer = mixer_with()
        keys, values = (random(BLOCK, 3, HEADS, WIDTH, seed=s) for s in (1, 2))
        state = write(mixer, mixer.initial_state(3, CPU, keys.dtype), keys, values, at=0, rows=3)
        keys, values = (random(BLOCK, 3, HEADS, WIDTH, seed=s) for s in (3, 4))
        # rows end at a border, inside a block, in left padding
        after = mixer.remember(state, BlockSlice(0, 4, (BLOCK + 4, BLOCK + 1, -9), BLOCK), keys, values)
        for name in ("associations", "mass"):
            assert torch.equal(after[name][1:], state[name][1:])
            assert not torch.equal(after[name][:1], state[name][:1])


class TestNumerics:
    @pytest.mark.parametrize("x", [-80.0, -20.0, -1.0, 0.0, 1e-3, 5.0])
    def test_features_are_elu_plus_one_and_stay_positive(self, x):
        value = torch.tensor(x, requires_grad=True)
        found = features(value)
        found.backward()
        exact = 1 + x if x > 0 else torch.tensor(x, dtype=torch.float64).exp().item()
        assert found.item() == pytest.approx(exact, rel=1e-6)
        assert found.item() > 0
        assert value.grad.item() == pytest.approx(min(exact, 1), rel=1e-6)
        # the sum of two rounded terms is 0 far below, where every stored key would weigh nothing
        assert (torch.nn.functional.elu(torch.tensor(-20.0)) + 1).item() == 0

    def test_keys_far_below_zero_are_read_back(self):
        """All features near e^-20: their ratios are as good as any, so one stored pair comes back."""
        mixer = mixer_with(dtype=torch.float32)
        key, value = torch.full((BLOCK, 1, HEADS, WIDTH), -20.0), torch.randn(1, 1, HEADS, WIDTH)
        state = mixer.initial_state(1, CPU, torch.float32)
        state = write(mixer, state, key, value.expand(BLOCK, -1, -1, -1), at=0)
        found, _ = retrieve(features(torch.full((1, HEADS, 1, WIDTH), -20.0)), state["associations"], state["mass"])
        torch.testing.assert_close(found[0, :, 0], value[0, 0], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("update", ["delta", "linear"])
    def test_the_state_follows_float64_over_a_long_stream(self, update):
        """M and z in FP32 after 512 blocks: rounding adds up like a random walk, far below BF16's 4e-3."""
        found = {}
        for dtype in (torch.float32, torch.float64):
            mixer = mixer_with(update=update, dtype=dtype)
            state = mixer.initial_state(1, CPU, dtype)
            for block in range(512):
                keys, values = (random(BLOCK, 1, HEADS, WIDTH, seed=2 * block + s).to(dtype) for s in (0, 1))
                state = write(mixer, state, keys, values, at=block * BLOCK)
            found[dtype] = state
        for name in ("associations", "mass"):
            exact = found[torch.float64][name]
            error = (found[torch.float32][name].double() - exact).norm() / exact.norm()
            print(f"{update} {name}: {error:.1e}")
            assert error < 1e-5


def test_a_block_must_divide_the_chunk():
    with pytest.raises(ValueError, match=r"block 3 does not divide model\.chunk_size 8"):
        model_with(block=3)
    assert InfiniAttentionConfig(block=4).update == "delta"


def test_stopped_gradients_reach_the_blocks_of_the_same_call_only():
    mixer = mixer_with(block=4, stop_gradient=True)
    x = hidden(3 * BLOCK).requires_grad_()
    state, outputs = mixer.initial_state(1, CPU, x.dtype), []
    for at in range(0, 3 * BLOCK, BLOCK):
        output, state, _ = mixer(x[at : at + BLOCK], state, Chunk((at,)))
        outputs.append(output)
    (grad,) = torch.autograd.grad(outputs[2][4:].square().sum(), x)
    assert grad[: 2 * BLOCK].abs().max() == 0
    assert grad[2 * BLOCK : 2 * BLOCK + 4].abs().amin() > 0
