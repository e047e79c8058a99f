"""Transformer-XL and Compressive Transformer: against one pass over the whole text, their options, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.errors import ConfigError
from megamem.memory.base import Chunk, States
from megamem.memory.shared.segment_attention import SegmentAttention
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import Stage, build_stage
from megamem.ops.attention.relative import relative_attention, sinusoids
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.train_chunk import loss_names
from megamem.pipeline.window import Window

CHUNK, CHUNKS = 6, 4
TOKENS = CHUNK * CHUNKS


def model_of(mixer: dict[str, object], **shape: object) -> ModelConfig:
    tree = {
        "layers": 2, "hidden_size": 16, "heads": 2, "ffn_size": 24, "vocab_size": 32, "chunk_size": CHUNK,
        "mixer": mixer, "init_std": 0.3, **shape,
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "test")


def built(model: ModelConfig) -> Stage:
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, 1)
    return stage.double()


def ids() -> Tensor:
    return torch.randint(32, (TOKENS + 1, 1), generator=torch.Generator().manual_seed(2))


def losses_by_chunk(stage: Stage, tokens: Tensor) -> Tensor:
    """Losses of all tokens, read chunk by chunk, [tokens]."""
    states: States = stage.initial_states(1, torch.device("cpu"), torch.float64)
    losses = []
    for begin in range(0, TOKENS, CHUNK):
        part = slice(begin, begin + CHUNK)
        hidden, states, _ = stage(tokens[part], states, Chunk((begin,)))
        losses.append(stage.token_losses(hidden, tokens[begin + 1 : begin + CHUNK + 1])[:, 0])
    return torch.cat(losses)


def attend_whole(mixer: SegmentAttention, normed: Tensor) -> Tensor:
    """The layer's attention over the whole text at once [tokens, width]: gradients stop where another chunk is read."""
    tokens, width = len(normed), mixer.width
    chunk = torch.arange(tokens) // CHUNK
    same = (chunk[:, None] == chunk)[..., None]
    query = mixer.query(normed).view(tokens, -1, width)
    content, distance = mixer.biases(query)
    outputs = []
    for head in range(query.shape[1]):
        sides = []
        for layer in (mixer.key, mixer.value):
            own, other = (layer(x).view(tokens, -1, width)[:, head] for x in (normed, normed.detach()))
            sides.append(torch.where(same, own, other))  # [query, key, width]
        key, value = sides
        scores = (content[:, head, None] * key).sum(-1)
        back = (torch.arange(tokens)[:, None] - torch.arange(tokens)).clamp(min=0)
        waves = torch.stack([wave(d, normed.shape[1]) for d in range(tokens)])
        by_distance = mixer.distance_key(waves).view(tokens, -1, width)[:, head]
        scores = scores + (distance[:, head, None] * by_distance[back]).sum(-1)
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        shares = (scores / math.sqrt(width)).masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((shares[..., None] * value).sum(1))
    return mixer.output(torch.cat(outputs, dim=1))


def wave(distance: int, width: int) -> Tensor:
    angles = torch.tensor([distance / 10_000 ** (2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    return torch.cat((angles.sin(), angles.cos()))


def losses_at_once(stage: Stage, tokens: Tensor) -> Tensor:
    """Losses of all tokens, the whole text read in one pass, [tokens]."""
    hidden = stage.embedding(tokens[:-1])[:, 0]
    for layer in stage.own_layers:
        hidden = hidden + attend_whole(layer.mixer, layer.mixer_norm(hidden))
        hidden = hidden + layer.mlp(layer.mlp_norm(hidden), Chunk((0,)))
    return stage.token_losses(stage.norm(hidden)[:, None], tokens[1:])[:, 0]


def test_segments_equal_one_pass_over_the_whole_text() -> None:
    """With a memory that covers the text: the same positions, gradients stopped at the same borders."""
    stage, tokens = built(model_of({"kind": "transformer_xl", "memory_length": TOKENS})), ids()
    found = []
    for read in (losses_by_chunk, losses_at_once):
        losses = read(stage, tokens)
        grads = torch.autograd.grad(losses.sum(), list(stage.parameters()))
        found.append((losses, grads))
    (chunked, grads), (whole, expected) = found
    # float64; sums over other columns
    assert (chunked - whole).abs().max() < 1e-10
    for (name, _), mine, theirs in zip(stage.named_parameters(), grads, expected, strict=True):
        assert (mine - theirs).abs().max() < 1e-10 * max(1.0, float(theirs.abs().max())), name


def test_each_layer_reaches_one_memory_length_further() -> None:
    """With a memory of one chunk, two layers see two chunks back, and not three."""
    stage, tokens = built(model_of({"kind": "transformer_xl"})), ids()
    before = losses_by_chunk(stage, tokens).detach()
    for chunk, reached in ((0, False), (1, True), (2, True)):
        changed = tokens.clone()
        changed[chunk * CHUNK] = (changed[chunk * CHUNK] + 1) % 32
        last = losses_by_chunk(stage, changed).detach()[3 * CHUNK :]
        assert bool((last != before[3 * CHUNK :]).any()) == reached, chunk


def test_memory_length_is_no_property_of_the_weights() -> None:
    """Weights trained with one memory are read with another; a longer one changes only what it lets queries see."""
    short, long = (model_of({"kind": "transformer_xl", "memory_length": n}) for n in (CHUNK, 3 * CHUNK))
    a, b = built(short), built(long)
    b.load_state_dict(a.state_dict())
    tokens = ids()
    first, second = losses_by_chunk(a, tokens), losses_by_chunk(b, tokens)
    assert (first[: 2 * CHUNK] - second[: 2 * CHUNK]).abs().max() < 1e-12  # they see the same, in another tensor shape
    assert (first[2 * CHUNK :] - second[2 * CHUNK :]).abs().max() > 1e-3


def test_same_length_gives_every_query_as_many_keys() -> None:
    """Uniform attention to values that count up: the output is their mean over the last five."""
    mixer = built(model_of({"kind": "transformer_xl", "memory_length": 5, "same_length": True})).own_layers[0].mixer
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        mixer.value.weight[0, 0] = mixer.output.weight[0, 0] = 1.0
        hidden = torch.zeros(TOKENS, 1, 16, dtype=torch.float64)
        hidden[:, 0, 0] = torch.arange(TOKENS)
        state = mixer.initial_state(1, hidden.device, hidden.dtype)
        output, _, _ = mixer(hidden, state, Chunk((0,)))
    for t in range(TOKENS):
        seen = range(max(0, t - 4), t + 1)
        assert float(output[t, 0, 0]) == pytest.approx(sum(seen) / len(seen), abs=1e-12), t


def test_clamped_distances() -> None:
    table = sinusoids(8, 3, 6, torch.float64, torch.device("cpu"))
    for row, distance in enumerate((3, 3, 3, 3, 3, 2, 1, 0)):
        assert (table[row] - wave(distance, 6)).abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_given_as_a_bias_agrees(dtype: torch.dtype) -> None:
    """The same scores through torch's own attention with a mask, as CUDA gets them."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 2, 4, 8), (5, 2, 4, 8), (9, 2, 2, 8), (9, 2, 2, 8), (10, 4, 8))
    content, distance, key, value, table = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    unseen = torch.arange(9) > torch.arange(4, 9)[:, None]
    ours, counted, _ = relative_attention(content, distance, key, value, table, unseen, count=True)
    exact, *_ = relative_attention(*(x.double() for x in (content, distance, key, value, table)), unseen, fused=False)
    # rounding of inputs' products to the dtype: half a unit in the last place, a few times
    assert (ours.double() - exact).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    assert counted is not None
    # every query of every head spends an attention of one
    assert counted.sum(0).tolist() == pytest.approx([20.0, 20.0], rel=1e-5)


@pytest.mark.parametrize("masked", ["causal", "window", "rows"])
@pytest.mark.parametrize("queries", [5, 128, 300])
def test_attention_block_by_block_has_the_gradients_of_the_whole(queries: int, masked: str) -> None:
    """Queries of one block, of a full one and of three, against operations that torch differentiates itself."""
    keys, generator = queries + 40, torch.Generator().manual_seed(0)
    shapes = ((queries, 2, 4, 8), (queries, 2, 4, 8), (keys, 2, 2, 8), (keys, 2, 2, 8), (keys + 1, 4, 8))
    given = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    columns = torch.arange(keys)
    distances = torch.arange(40, keys)[:, None] - columns
    unseen = distances < 0
    if masked == "window":
        unseen = unseen | (distances >= 40)
    if masked == "rows":
        unseen = unseen | (columns < torch.tensor([0, 30])[:, None, None])
    found = []
    for fused in (True, False):
        out, *_ = relative_attention(*given, unseen, fused=fused)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found.append((out, *torch.autograd.grad(out, given, weights)))
    for ours, whole in zip(*found, strict=True):
        # sums of 340 terms in another order: some hundred units in the last place
        assert (ours - whole).abs().max() < 1e-12 * max(1.0, whole.abs().max().item())


@pytest.mark.parametrize(
    ("mixer", "shape", "message"),
    [
        ({"kind": "compressive_transformer", "ratio": 4}, {}, "ratio 4 does not divide model.chunk_size 6"),
        ({"kind": "compressive_transformer", "memory_length": 8, "ratio": 2}, {}, "memory_length 8 is no multiple"),
        ({"kind": "compressive_transformer", "memory_length": 4, "ratio": 2}, {}, "use 6"),
        ({"kind": "compressive_transformer", "reconstruction_weight": 0}, {}, "reconstruction_weight"),
        ({"kind": "transformer_xl"}, {"scale_embedding": True, "mup": {"base_width": 8}}, "scale_embedding true does"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    mixer: dict[str, object], shape: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of(mixer, **shape)


def test_norms_behind_a_relu_mlp_and_scaled_embeddings() -> None:
    """The layer of the first Transformers, computed by hand."""
    options = {"norm_position": "post", "norm": "layer", "mlp": "relu", "scale_embedding": True, "bias": True}
    stage, tokens = built(model_of({"kind": "transformer_xl"}, layers=1, **options)), ids()[:CHUNK]
    states = stage.initial_states(1, torch.device("cpu"), torch.float64)
    hidden, _, _ = stage(tokens, states, Chunk((0,)))
    layer = stage.own_layers[0]
    x = stage.embedding(tokens) * 4.0
    mixed, _, _ = layer.mixer(x, states["layers.0"], Chunk((0,)))
    x = torch.nn.functional.layer_norm(x + mixed, (16,), layer.mixer_norm.weight, layer.mixer_norm.bias, 1e-5)
    inner = layer.mlp.up(x).clamp(min=0) @ layer.mlp.down.weight.T + layer.mlp.down.bias
    x = torch.nn.functional.layer_norm(x + inner, (16,), layer.mlp_norm.weight, layer.mlp_norm.bias, 1e-5)
    # nothing normalizes once more in front of the head
    assert (hidden - x).abs().max() < 1e-12
    assert "norm.weight" not in dict(stage.named_parameters())


def test_the_reconstruction_trains_the_compression_alone() -> None:
    """Also where a call is longer than the cache, so that what leaves it has a gradient of its own."""
    model = model_of({"kind": "compressive_transformer", "ratio": 2}, layers=1)
    mixer = built(model).own_layers[0].mixer
    x = torch.randn(TOKENS, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    state = mixer.initial_state(1, torch.device("cpu"), torch.float64)
    mixed, _, losses = mixer.forward(x, state, Chunk((0,)))
    losses["reconstruction"].backward(retain_graph=True)
    trained = {name for name, p in mixer.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert trained == {"compressor.weight", "compressor.bias"}
    assert x.grad is None or not x.grad.any()
    mixed.sum().backward()
    assert x.grad is not None
    assert x.grad.any()


def test_a_step_sums_the_layers_own_losses_by_name() -> None:
    """The window's loss is the objective's plus the auxiliary ones, which come back by name behind it."""
    stage, tokens = built(model_of({"kind": "compressive_transformer", "ratio": 2})), ids()
    window = Window(stage, NextToken(stage.config))
    assert loss_names(stage, window.objective) == ("next_token", "reconstruction")
    states = stage.initial_states(1, torch.device("cpu"), torch.float64)
    places = [Chunk((begin,)) for begin in range(0, TOKENS, CHUNK)]
    loss, sums, _ = window(tokens[:-1], tokens[1:], places, states, torch.tensor(0.5, dtype=torch.float64))
    # a token-weighted sum over the two chunks that leave the cache, of two layers
    expected, states = 0.0, stage.initial_states(1, torch.device("cpu"), torch.float64)
    for place in places:
        begin = place.starts[0]
        _, states, auxiliary = stage(tokens[begin : begin + CHUNK], states, place)
        expected += float(auxiliary["reconstruction"].detach()) * CHUNK
    assert expected > 0
    assert float(sums[1]) == pytest.approx(expected, rel=1e-12)
    assert float(loss.detach()) == pytest.approx(0.5 * float(sums.sum()), rel=1e-12)
