"""What is special about the Memorizing Transformer: its queue, its search, its gate, its size."""

from __future__ import annotations

import math

import pytest
import torch

from megamem.config.model import ModelConfig
from megamem.costs.parameters import parameter_counts
from megamem.memory.attention.memorizing_attention import INITIAL_SCALE, MemorizingAttention
from megamem.memory.base import Chunk, Mixer, TensorSpec, detach
from megamem.memory.shared.blocks import BlockSlice
from megamem.ops.attention import nearest as search
from megamem.ops.attention.nearest import nearest, nearest_attention
from megamem.ops.attention.softmax import Past, past_attention
from megamem.parallel.linears import PlainLinears, initialize_parameters
from tests.unit.shipped import shipped

CHUNK, CPU = 8, torch.device("cpu")


def made(kind: str, kv_heads: int = 4, **options: object) -> Mixer:
    model = {
        "layers": 1, "hidden_size": 16, "heads": 4, "kv_heads": kv_heads, "chunk_size": CHUNK, "init_std": 0.3,
        "mixer": {"kind": kind, **options},
    }  # fmt: skip
    config = ModelConfig.model_validate(model)
    mixer = config.mixer_at(0).build(config, PlainLinears(), 0)
    initialize_parameters(mixer, 1)
    return mixer.to(torch.float64)


def built(kv_heads: int = 4, **options: object) -> MemorizingAttention:
    mixer = made("memorizing_attention", kv_heads, **options)
    assert isinstance(mixer, MemorizingAttention)
    return mixer


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def read(mixer: MemorizingAttention, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A document from its start, chunk by chunk."""
    state = mixer.initial_state(x.shape[1], CPU, x.dtype)
    outputs = []
    for begin in range(0, len(x), CHUNK):
        output, state, _ = mixer(x[begin : begin + CHUNK], state, Chunk((begin,) * x.shape[1]))
        outputs.append(output)
    return torch.cat(outputs), state


class TestQueue:
    @pytest.mark.parametrize(("queue", "block"), [(3, 8), (8, 8), (11, 4), (20, 8), (50, 2)])
    def test_holds_exactly_the_last_tokens(self, queue: int, block: int) -> None:
        mixer = built(queue=queue, block=block)
        x = random(4 * CHUNK, 2)[..., None].expand(-1, -1, 16)
        for chunks in range(1, 5):
            tokens = x[: chunks * CHUNK]
            _, state = read(mixer, tokens)
            _, key, value = mixer.project(tokens)
            held = min(queue, chunks * CHUNK)
            for name, expected in (("keys", key), ("values", value)):
                torch.testing.assert_close(state[name][queue - held :], expected[-held:], rtol=0, atol=1e-14)
                assert not state[name][: queue - held].any()

    def test_tokens_of_an_unfinished_block_are_not_in_it(self) -> None:
        mixer = built(queue=20)
        x = random(CHUNK + 3, 1, 16)
        _, after_chunk = read(mixer, x[:CHUNK])
        _, later = read(mixer, x)
        assert torch.equal(after_chunk["keys"], later["keys"])
        assert later["open_keys"].shape[0] == 3

    @pytest.mark.parametrize("gate", ["sigmoid", "none"])
    @pytest.mark.parametrize("top_k", [None, 3])
    def test_nothing_is_attended_while_it_is_empty(self, gate: str, top_k: int | None) -> None:
        """In the first block the output is local attention's, whatever garbage the queue holds; later it is not."""
        topk = {"retrieval": "topk", "top_k": top_k} if top_k else {}
        mixer = built(queue=12, gate=gate, **topk)
        x = random(CHUNK, 2, 16)
        state = mixer.initial_state(2, CPU, x.dtype)
        garbage = {**state, "keys": random(12, 2, 4, 4, seed=1), "values": random(12, 2, 4, 4, seed=2) * 1e3}
        at_start, elsewhere = Chunk((0, 0)), Chunk((CHUNK, CHUNK))
        local = mixer(x, state, at_start)[0]
        assert torch.equal(mixer(x, garbage, at_start)[0], local)
        # one row in its first block beside one that has a past
        mixed = mixer(x, garbage, Chunk((0, CHUNK)))[0]
        torch.testing.assert_close(mixed[:, 0], local[:, 0], rtol=0, atol=1e-13)
        torch.testing.assert_close(mixed[:, 1], mixer(x, garbage, elsewhere)[0][:, 1], rtol=0, atol=1e-10)
        assert (mixed[:, 1] - local[:, 1]).abs().max() > 1

    def test_slots_not_yet_filled_are_not_attended(self) -> None:
        """After one chunk a queue of 2 chunks gives what a queue of one gives."""
        x = random(2 * CHUNK, 1, 16)
        long, short = (read(built(queue=queue), x)[0] for queue in (2 * CHUNK, CHUNK))
        torch.testing.assert_close(long, short, rtol=0, atol=1e-13)


class TestNearest:
    @pytest.mark.parametrize("gate", ["sigmoid", "none"])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_all_of_them_is_dense(self, gate: str, kv_heads: int) -> None:
        x = random(4 * CHUNK, 2, 16)
        dense = read(built(kv_heads, queue=12, gate=gate), x)[0]
        every = read(built(kv_heads, queue=12, gate=gate, retrieval="topk", top_k=12), x)[0]
        assert torch.equal(every, dense)
        some = read(built(kv_heads, queue=12, gate=gate, retrieval="topk", top_k=11), x)[0]
        assert (some - dense)[CHUNK:].abs().max() > 1e-4
        assert torch.equal(some[:CHUNK], dense[:CHUNK])

    def test_finds_the_largest_products(self) -> None:
        query, past = random(5, 2, 4, 6), Past(random(9, 2, 2, 6, seed=1), random(9, 2, 2, 6, seed=2))
        chosen = nearest(query, past, 3).visible
        assert chosen is not None
        for t in range(5):
            for b in range(2):
                for h in range(4):
                    products = [float(query[t, b, h] @ past.key[j, b, h // 2]) for j in range(9)]
                    best = sorted(range(9), key=lambda j: -products[j])[:3]
                    assert chosen[b, h, t].nonzero().flatten().tolist() == sorted(best)

    def test_fewer_visible_than_wanted(self) -> None:
        """A row that may see 2 of 6 keys sees those 2 when 4 are asked for."""
        visible = torch.tensor([[False] * 4 + [True] * 2, [True] * 6]).T
        past = Past(random(6, 2, 1, 4, seed=1), random(6, 2, 1, 4, seed=2), visible)
        chosen = nearest(random(3, 2, 1, 4), past, 4).visible
        assert chosen is not None
        assert torch.equal(chosen[0, 0], visible[:, 0].expand(3, 6))
        assert (chosen[1, 0].sum(-1) == 4).all()

    def test_of_equals_exactly_as_many_are_taken_as_asked_for(self) -> None:
        past = Past(random(1, 1, 1, 4).expand(7, 1, 1, 4), random(7, 1, 1, 4, seed=1))
        chosen = nearest(random(3, 1, 1, 4, seed=2), past, 3).visible
        assert chosen is not None
        assert (chosen.sum(-1) == 3).all()

    def test_gradients_flow_through_the_chosen_keys_alone(self) -> None:
        query, key, value = random(2, 1, 1, 4), random(8, 1, 1, 4, seed=1), random(8, 1, 1, 4, seed=2)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        chosen = nearest(query, Past(key, value), 3).visible
        assert chosen is not None
        nearest_attention(query, Past(key, value), 3).square().sum().backward()
        used = chosen[0, 0].any(0)
        for x in (key, value):
            assert x.grad is not None
            assert not x.grad[~used].any()
            assert x.grad[used].abs().amin() > 0
        assert torch.autograd.gradcheck(lambda q, k, v: nearest_attention(q, Past(k, v), 3), leaves)

    @pytest.mark.parametrize("backend", ["sdpa", "eager"])
    def test_queries_in_parts_give_the_same(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Outputs and gradients, the last part shorter than the others."""
        found = []
        for scores in (search.SCORES, 2 * 4 * 9 * 3):
            monkeypatch.setattr(search, "SCORES", scores)
            leaves = [x.requires_grad_() for x in (random(7, 2, 4, 6), random(9, 2, 2, 6, seed=1), random(9, 2, 2, 6))]
            output = nearest_attention(leaves[0], Past(leaves[1], leaves[2]), 4, backend)
            output.square().sum().backward()
            found.append([output, *(x.grad for x in leaves)])
        for whole, parts in zip(*found, strict=True):
            torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("backend", ["sdpa", "eager"])
    def test_a_past_alone_is_a_softmax_over_it(self, backend: str) -> None:
        query, key, value = random(3, 2, 4, 6), random(5, 2, 2, 6, seed=1), random(5, 2, 2, 6, seed=2)
        visible = torch.tensor([[True, True, False, True, True], [False, True, True, False, False]]).T
        found = past_attention(query, Past(key, value, visible), backend)
        for b in range(2):
            for h in range(4):
                scores = query[:, b, h] @ key[visible[:, b], b, h // 2].T / math.sqrt(6)
                expected = scores.softmax(-1) @ value[visible[:, b], b, h // 2]
                torch.testing.assert_close(found[:, b, h], expected, rtol=0, atol=1e-13)


class TestWindow:
    @pytest.mark.parametrize("kv_heads", [4, 2])
    @pytest.mark.parametrize(("window", "block"), [(8, 8), (9, 4), (13, 8), (5, 2)])
    def test_with_the_gate_shut_it_is_sliding_attention(self, window: int, block: int, kv_heads: int) -> None:
        """The same weights, rows at different places of their blocks, another mixer's code."""
        ours = built(kv_heads, queue=15, block=block, window=window, gate_init=-60.0)
        theirs = made("sliding_attention", kv_heads, window=window)
        shared = {name: weight for name, weight in ours.state_dict().items() if not name.startswith("gate.")}
        theirs.load_state_dict(shared)
        x = random(3 * CHUNK, 2, 16)
        for lanes in ((0, 0), (0, -3)):
            found = []
            for mixer in (ours, theirs):
                state, outputs = mixer.initial_state(2, CPU, x.dtype), []
                for begin, end in ((0, 3), (3, 8), (8, 9), (9, 20), (20, 24)):
                    place = Chunk(tuple(start + begin for start in lanes))
                    state = mixer.reset(state, place, CPU, x.dtype)
                    output, state, _ = mixer(x[begin:end], state, place)
                    outputs.append(output)
                found.append(torch.cat(outputs)[3 if lanes[1] else 0 :])
            torch.testing.assert_close(*found, rtol=0, atol=1e-13)

    def test_one_softmax_counts_a_token_once(self) -> None:
        """A query sees each of the queue's tokens in one of its two forms: without a place, or rotated by it."""
        mixer = built(queue=15, window=8, gate="none")
        query, past = random(1, 1, 4, 4), Past(random(15, 1, 4, 4, seed=1), random(15, 1, 4, 4, seed=2))
        state = {**mixer.initial_state(1, CPU, torch.float64), "keys": past.key, "values": past.value}
        for offset in range(CHUNK):
            here = BlockSlice(0, 1, (2 * CHUNK + offset,), CHUNK)
            far, near = mixer.recall(state, here, query)
            seen = [part.visible.expand(1, 1, 1, -1).flatten() for part in (far, near) if part.visible is not None]
            # the newest 7 entries, less those that the query's own block has driven out of its window
            assert seen[1].tolist() == [age <= 7 - offset for age in range(7, 0, -1)]
            assert seen[0].tolist() == [age > 7 - offset for age in range(15, 0, -1)]

    def test_it_needs_no_state_and_no_parameters(self) -> None:
        plain, windowed = built(queue=15), built(queue=15, window=16)
        assert windowed.specs == plain.specs
        assert windowed.state_dict().keys() == plain.state_dict().keys()

    def test_where_nothing_lies_before_the_block_it_adds_nothing(self) -> None:
        """In a document's first block, and in blocks and windows of one token."""
        x = random(CHUNK, 2, 16)
        assert torch.equal(read(built(queue=15, window=16), x)[0], read(built(queue=15), x)[0])
        x = random(3 * CHUNK, 2, 16)
        assert torch.equal(read(built(queue=5, block=1, window=1), x)[0], read(built(queue=5, block=1), x)[0])

    def test_flops_count_what_windows_hold(self) -> None:
        """Query o of a block of 2,048 sees 539 - o tokens before it; from the second of 16 blocks on."""
        model = memory_model(540, chunk_size=512)
        mixer = model.mixer_at(8)
        blocks = 64
        before = sum(max(539 - offset, 0) for offset in range(512)) / 512 * (blocks - 1) / blocks
        # the second block finds 512 tokens in the queue
        before -= sum(max(539 - offset - 512, 0) for offset in range(512)) / 512 / blocks
        found, plain = (
            each.mixing_flops(model, 32_768, causal=True) for each in (mixer.model_copy(update={"window": 540}), mixer)
        )
        assert found["attention"].forward - plain["attention"].forward == pytest.approx(4 * 8 * 90 * before)
        assert found["memory_attention"] == plain["memory_attention"]


class TestGate:
    @pytest.mark.parametrize(("gate", "memory"), [(-40.0, False), (40.0, True)])
    def test_shut_it_leaves_local_attention_and_open_only_the_memory(self, gate: float, memory: bool) -> None:
        x = random(2 * CHUNK, 1, 16)
        output, _ = read(built(queue=8, gate_init=gate), x)
        alone = built(queue=8, gate_init=gate)(x[CHUNK:], built(queue=8).initial_state(1, CPU, x.dtype), Chunk((0,)))
        same = torch.allclose(output[CHUNK:], alone[0], rtol=0, atol=1e-12)
        assert same is not memory
        if memory:  # the same queries get the same answer wherever they stand: the memory has no positions
            repeated = torch.cat((x[:CHUNK], x[CHUNK : CHUNK + 1].expand(CHUNK, 1, 16)))
            answers, _ = read(built(queue=8, gate_init=gate), repeated)
            torch.testing.assert_close(answers[CHUNK:], answers[CHUNK:][:1].expand(CHUNK, 1, 16), rtol=0, atol=1e-12)

    def test_it_learns_once_there_is_a_memory(self) -> None:
        mixer = built(queue=8)
        output, _ = read(mixer, random(2 * CHUNK, 1, 16))
        output[CHUNK:].square().sum().backward()
        assert mixer.gate is not None
        assert mixer.gate.logit.grad is not None
        assert (mixer.gate.logit.grad != 0).all()

    def test_it_has_a_gradient_of_zeros_while_there_is_none(self) -> None:
        """ZeRO 3 keeps the gradient of the step before where a backward pass leaves a parameter out."""
        mixer = built(queue=8)
        read(mixer, random(CHUNK, 1, 16))[0].square().sum().backward()
        assert mixer.gate is not None
        assert mixer.gate.logit.grad is not None
        assert not mixer.gate.logit.grad.any()


def test_normalised_products_are_the_scale_times_the_cosine() -> None:
    mixer = built(queue=8, normalize_keys=True)
    query, key, _ = mixer.project(random(5, 1, 16) * 100)
    products = torch.einsum("tbhd,sbhd->hts", query, key) / mixer.width**0.5
    assert products.abs().max() <= INITIAL_SCALE * (1 + 1e-6)
    torch.testing.assert_close(key.norm(dim=-1), torch.ones(5, 1, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    # the scale starts in float32
    assert torch.allclose(query.norm(dim=-1), torch.tensor(INITIAL_SCALE * 2, dtype=torch.float64), rtol=1e-6)


def test_stopped_gradients_leave_outputs_alone() -> None:
    """The option changes what is learned, not what is computed; keys that only the next chunk reads learn nothing."""
    x = random(2 * CHUNK, 1, 16)
    found = {}
    for stop in (False, True):
        mixer = built(queue=8, stop_gradient=stop)
        output, _ = read(mixer, x)
        output[CHUNK:].square().sum().backward()
        found[stop] = output, mixer.key.weight.grad
        cut = built(queue=8)
        _, state = read(cut, x[:CHUNK])
        cut(x[CHUNK:], detach(state), Chunk((CHUNK,)))[0].square().sum().backward()
        found["cut"] = output, cut.key.weight.grad
    assert torch.equal(found[True][0], found[False][0])
    torch.testing.assert_close(found[True][1], found["cut"][1], rtol=0, atol=1e-12)
    assert (found[True][1] - found[False][1]).abs().max() > 1e-3


PAPER = {"layers": 12, "hidden_size": 720, "heads": 8, "chunk_size": 2048}


def memory_model(queue: int, **size: int) -> ModelConfig:
    mixer = {"kind": "memorizing_attention", "queue": queue}
    return ModelConfig.model_validate({**PAPER, **size, "memory": [{"layers": [8], "mixer": mixer}]})


def numbers(model: ModelConfig) -> int:
    """Numbers of memory per row, from the declarations alone."""
    specs = [spec for layer in range(model.layers) for spec in model.mixer_at(layer).state_specs(model).values()]
    memory = [spec for spec in specs if isinstance(spec, TensorSpec) and spec.kind == "memory"]
    return sum(math.prod(spec.sizes({"batch": 1, "kv_heads": model.resolved_kv_heads})) for spec in memory)


@pytest.mark.parametrize(("queue", "times"), [(540, 1), (1080, 2), (2160, 4), (4320, 8), (8640, 16)])
def test_memory_sizes_of_the_paper_s_table_3(queue: int, times: int) -> None:
    """Table 1: queue x (d_key + d_value) x heads; 1x is Infini-Transformer's d_key x d_value x heads x layers."""
    model = memory_model(queue)
    assert numbers(model) == queue * (90 + 90) * 8 == times * 90 * 90 * 8 * 12 == times * 777_600


@pytest.mark.parametrize(("hidden", "heads", "memory"), [(720, 8, 0.8), (1080, 12, 1.2), (1440, 16, 1.6)])
def test_memory_sizes_of_the_paper_s_table_4(hidden: int, heads: int, memory: float) -> None:
    model = memory_model(540, hidden_size=hidden, heads=heads)
    assert round(numbers(model) / 1e6, 1) == memory


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 8), ({"gate": "none"}, 0), ({"normalize_keys": True}, 16), ({"gate": "none", "normalize_keys": True}, 8)],
)
def test_one_parameter_per_head_as_in_table_1(options: dict[str, object], expected: int) -> None:
    model = memory_model(540)
    mixer = model.mixer_at(8).model_copy(update=options)
    assert mixer.extra_parameters(model) == expected
    with torch.device("meta"):
        made = mixer.build(model, PlainLinears(), 8)
    projections = ("query", "key", "value", "output")
    assert sum(p.numel() for name, p in made.named_parameters() if not name.startswith(projections)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrieval": "topk"}, "top_k None does not go with retrieval topk"),
        ({"top_k": 32}, "top_k 32 does not go with retrieval dense"),
        ({"retrieval": "topk", "top_k": 9, "queue": 8}, "top_k 9 is more than the queue of 8 tokens"),
        ({"block": 3}, "block 3 does not divide model.chunk_size 8"),
        ({"queue": 0}, "greater than 0"),
        ({"queue": 20, "window": 7}, "window 7 does not fit between the block of 8 tokens, .* and 21, a query's own"),
        ({"queue": 20, "window": 22}, "window 22 does not fit between the block of 8 tokens, .* and 21, a query's own"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(**options)


def test_flops_count_what_is_chosen() -> None:
    """Dense: scores and values of 540 keys in all blocks but the first; topk: a search, then 32 keys."""
    per_key = 2 * 8 * 90 * 15 / 16
    dense = memory_model(540).mixer_at(8)
    found = dense.mixing_flops(memory_model(540), 32_768, causal=True)
    assert found["memory_attention"].forward == pytest.approx(2 * per_key * 540)
    assert found["memory_attention"].backward == pytest.approx(4 * per_key * 540)
    topk = dense.model_copy(update={"retrieval": "topk", "top_k": 32})
    found = topk.mixing_flops(memory_model(540), 32_768, causal=True)
    assert found["memory_retrieval"].forward == pytest.approx(per_key * 540)
    assert found["memory_retrieval"].backward == 0
    assert found["memory_attention"].forward == pytest.approx(2 * per_key * 32)
    stopped = dense.model_copy(update={"stop_gradient": True})
    found = stopped.mixing_flops(memory_model(540), 32_768, causal=True)
    assert found["memory_attention"].backward == pytest.approx(2 * per_key * 540)


@pytest.mark.parametrize("size", ["100m", "200m", "400m"])
def test_shipped_models_keep_what_elastic_memory_keeps(size: str) -> None:
    ours, elastic = (shipped(f"{kind}-{size}") for kind in ("memorizing", "elastic"))
    assert numbers(ours.model) == numbers(elastic.model)
    assert [layer for layer in range(12) if ours.model.mixer_at(layer).kind == "memorizing_attention"] == [8]
    assert ours.model_dump(exclude={"model", "name"}) == elastic.model_dump(exclude={"model", "name"})
    extra = parameter_counts(ours.model)["total"] - parameter_counts(elastic.model)["total"]
    assert extra == ours.model.heads
