"""Identities of Memory Caching and of the memories it keeps, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.errors import ConfigError
from megamem.memory.base import Chunk
from megamem.memory.composite.memory_caching import MemoryCaching
from megamem.memory.recurrent.base import RecurrentMixer
from megamem.ops.deep_memory.kept import Rows, selected_answer, shared_product
from megamem.ops.deep_memory.kept_networks import kept_networks
from tests.unit.caching_helpers import CHUNK, LINEAR, ROWS, TITANS, built, hidden, model_of

TOKENS = 48
MATRIX = {
    "kind": "dla", "network": "linear", "start": "zero", "residual": False, "layer_norm": False, "rate": "fixed",
    "max_rate": 1.0, "normalize": False, "inner_chunk": 4,
}  # fmt: skip
EXACT = 1e-10


def caching(memory: dict[str, Any], **options: Any) -> MemoryCaching:
    return built({"kind": "memory_caching", "memory": memory, **options})


def output(mixer: Any, calls: int = CHUNK) -> Tensor:
    x = hidden(TOKENS)
    state = mixer.initial_state(ROWS, x.device, x.dtype)
    outputs = []
    for begin in range(0, TOKENS, calls):
        made, state, _ = mixer(x[begin : begin + calls], state, Chunk((begin,) * ROWS))
        outputs.append(made)
    return torch.cat(outputs)


def same_weights(mixer: Any, other: Any) -> Any:
    """`mixer` with the weights of `other`, as far as it has such."""
    inner = other.memory if isinstance(other, MemoryCaching) else other
    target = mixer.memory if isinstance(mixer, MemoryCaching) else mixer
    assert isinstance(target, RecurrentMixer)
    target.load_state_dict(inner.state_dict(), strict=False)
    return mixer


def agree(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT)


@pytest.mark.parametrize("segment", [1, 4, 16])
def test_residual_caching_of_linear_attention_is_linear_attention(segment: int) -> None:
    plain = built(LINEAR)
    cached = same_weights(caching(LINEAR, combine="residual", segment=segment), plain)
    agree(output(cached), output(plain))


@pytest.mark.parametrize("combine", ["residual", "grm", "soup", "ssc"])
@pytest.mark.parametrize("memory", [LINEAR, TITANS], ids=["linear", "titans"])
def test_one_segment_is_no_caching(combine: str, memory: dict[str, Any]) -> None:
    plain = built(memory)
    cached = same_weights(caching(memory, combine=combine, segment=CHUNK), plain)
    x = hidden(TOKENS)[:CHUNK]
    states = [mixer.initial_state(ROWS, x.device, x.dtype) for mixer in (cached, plain)]
    agree(cached(x, states[0], Chunk((0,) * ROWS))[0], plain(x, states[1], Chunk((0,) * ROWS))[0])


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("memory", [LINEAR, MATRIX, {"kind": "delta_net"}], ids=["linear", "dla", "delta"])
def test_soup_of_matrices_is_grm(memory: dict[str, Any], gate: str) -> None:
    grm = caching(memory, segment=4, gate=gate)
    soup = caching(memory, segment=4, gate=gate, combine="soup")
    soup.load_state_dict(grm.state_dict())
    agree(output(soup), output(grm))


@pytest.mark.parametrize("memory", [LINEAR, TITANS], ids=["linear", "titans"])
def test_selecting_all_is_grm(memory: dict[str, Any]) -> None:
    grm = caching(memory, segment=4)
    ssc = caching(memory, segment=4, combine="ssc", top_k=TOKENS // 4)
    ssc.load_state_dict(grm.state_dict())
    agree(output(ssc), output(grm))


@pytest.mark.parametrize("inner", [1, 4, 16])
def test_a_matrix_trained_on_the_dot_product_is_linear_attention(inner: int) -> None:
    """Zero start, rate 1, no decay, no residual, whatever the inner chunk; the norm takes out the scale."""
    plain = built(LINEAR)
    agree(output(same_weights(built({**MATRIX, "inner_chunk": inner}), plain)), output(plain))


def test_segments_of_one_token_are_attention_to_products() -> None:
    """softmax over all tokens so far of u . k, times k . q, times v."""
    cached = caching(LINEAR, segment=1)
    x = hidden(TOKENS)
    state = cached.initial_state(ROWS, x.device, x.dtype)
    inputs, _ = cached.memory.inputs(x, state, Chunk((0,) * ROWS))
    router_query = cached.router(x).unflatten(-1, (-1, 4)).permute(1, 2, 0, 3).unflatten(1, (-1, 2))
    scores = router_query @ inputs.key[:, :, None].mT
    past = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    shares = scores.masked_fill(~past, -torch.inf).softmax(-1)
    read = (shares * (inputs.query @ inputs.key[:, :, None].mT)) @ inputs.value[:, :, None]
    agree(output(cached), cached.memory.finish(read, x, inputs))


def test_selected_answers_are_those_of_zero_shares() -> None:
    """Grouped by memory, one product each or all in one launch; gradients too."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    query, up, down = normal(2, 3, 2, 7, 5), normal(2, 3, 4, 6, 5), normal(2, 3, 4, 6, 5)
    chosen = torch.rand(2, 3, 2, 7, 4, generator=generator) < 0.3
    shares = normal(2, 3, 2, 7, 4)

    def all_networks(x: Tensor, kept: Any, share: Tensor) -> Tensor:
        return kept_networks(x, kept, share, None)

    def all_matrices(x: Tensor, kept: Any, share: Tensor) -> Tensor:
        return shared_product(x, kept[0].mT, share)

    def networks(times: Any) -> Any:
        return lambda x, kept, rows: times(rows, F.gelu(times(rows, x, [part.mT for part in kept[0]])), kept[1])

    def matrices(times: Any) -> Any:
        return lambda x, kept, rows: times(rows, x, [part.mT for part in kept[0]])

    def selected(answer: Any, shares: Tensor) -> Tensor:
        """The memories in lists of one, one and two; nobody asks the second."""
        lists = [(up[:, :, part], down[:, :, part]) for part in (slice(1), slice(1, 2), slice(2, 4))]
        return selected_answer(answer, query, lists, shares.split((1, 1, 2), dim=-1), 5)

    chosen[..., 1] = False
    masked = shares * chosen
    for own, every, used in (
        (networks, all_networks, (query, up, down, shares)),
        (matrices, all_matrices, (query, up, shares)),
    ):
        found = []
        for made in (
            selected(own(Rows.one_by_one), masked),
            selected(own(Rows.padded), masked),
            every(query, (up, down), masked),
        ):
            found.append((made, *torch.autograd.grad(made.square().sum(), used, retain_graph=True)))
        for alone, padded, theirs in zip(*found, strict=True):
            agree(alone, theirs)
            agree(padded, theirs)
    assert not selected(networks(Rows.one_by_one), shares * 0).any()


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        ({"memory": "local_attention"}, "memory local_attention is no memory that can be kept; valid: delta_net, dla"),
        ({"memory": "sliding_attention"}, "memory sliding_attention is no memory that can be kept"),
        ({"memory": LINEAR, "segment": 5}, "segment 5 does not divide model.chunk_size 16"),
        ({"memory": TITANS, "segment": 2}, "segment 2 is no multiple of memory.inner_chunk 4"),
        ({"memory": {**TITANS, "inner_chunk": 3}, "segment": 4}, "inner_chunk 3 does not divide model.chunk_size 16"),
        ({"memory": {**TITANS, "start": "zero"}, "segment": 4}, "start zero does not go with network mlp"),
        ({"memory": {**TITANS, "expand_v": 2}, "segment": 4}, "expand_v"),
    ],
)
def test_bad_options_are_named(mixer: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_of({"kind": "memory_caching", **mixer})


def test_the_share_that_is_read_is_stated() -> None:
    """Segments 0 to 7 of four chunks see 0 to 7 kept memories; of these two at most are read."""
    mixer = {"kind": "memory_caching", "memory": LINEAR, "combine": "ssc", "segment": CHUNK // 2}
    model = model_of(mixer)
    config = model.mixer_at(0)
    assert config.summary(model, 4 * CHUNK) == ("memory caching (ssc): a token reads 1.62 of 3.50 kept memories, 46%")
    assert config.summary(model, CHUNK // 2) == "memory caching (ssc): a token reads 0.00 of 0.00 kept memories"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "none"}, "gate none is for combine ssc; grm without gates is combine residual"),
        ({"gate": "none", "combine": "ssc"}, "gate none leaves nothing to train scores with"),
        ({"scores": "token", "router": "query"}, "router query scores segments by their keys"),
        ({"gate": "sigmoid", "temperature": 2.0}, "temperature 2.0 is the softmax's; gate sigmoid has none"),
    ],
)
def test_gates_that_could_not_learn_or_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        caching(LINEAR, segment=4, **options)


def test_equal_scores_of_the_token_weigh_all_segments_alike() -> None:
    """With a router of zeros: shares of 1 / (segments so far), whose sum times their number is the residual answer."""
    token, residual = caching(LINEAR, segment=4, scores="token", ages=2), caching(LINEAR, segment=4, combine="residual")
    same_weights(residual, token)
    torch.nn.init.zeros_(token.router.weight)
    reads = {}
    for name, mixer in (("token", token), ("residual", residual)):
        mixer.memory.finish = lambda read, x, inputs, name=name: reads.setdefault(name, []).append(read) or x
        output(mixer)
    ours, theirs = (torch.cat(reads[name], dim=-2) for name in ("token", "residual"))
    segments = torch.arange(TOKENS) // 4 + 1
    agree(ours * segments[:, None], theirs)


def test_a_high_temperature_evens_shares_out() -> None:
    """At 1e9 every score is as good as zero: the same as gates of zero scores."""
    even = caching(LINEAR, segment=4, temperature=1e9)
    zero = caching(LINEAR, segment=4)
    zero.load_state_dict(even.state_dict())
    torch.nn.init.zeros_(zero.router.weight)
    torch.testing.assert_close(output(even), output(zero), rtol=0, atol=1e-7)  # scores of 1e-9
