"""The masked mixer against torch's own convolution, its mask, its map's corner, its split channels, its refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.costs.parameters import parameter_counts
from megamem.errors import ConfigError
from megamem.memory.base import Chunk
from megamem.model.stage import meta_stage
from megamem.ops.token_map import map_tokens
from megamem.parallel.linears import PlainLinears, info, initialize_parameters
from tests.contract.oracles.masked_mixer import run as oracle

CHUNK, WIDTH, HEADS, ROWS = 8, 12, 3, 2
# float64: the same sums in another order
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def model_of(mixer: dict[str, object] | None = None, **changes: object) -> ModelConfig:
    tree = {
        "layers": 2, "hidden_size": WIDTH, "heads": HEADS, "vocab_size": 16, "chunk_size": CHUNK,
        "mixer": {"kind": "masked_mixer", **(mixer or {})}, **changes,
    }  # fmt: skip
    return parse_config(ModelConfig, tree, "test")


def built(model: ModelConfig, linears: PlainLinears | None = None) -> nn.Module:
    """The mixer of a layer in float64, its biases random too."""
    mixer = model.mixer_at(0).build(model, linears or PlainLinears(), 0)
    initialize_parameters(mixer, 0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in mixer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, generator=generator)
    return mixer.double()


def read(mixer: nn.Module, hidden: Tensor, *cuts: int) -> Tensor:
    """What a mixer makes of a document's tokens [tokens, batch, WIDTH], in calls that end at `cuts`."""
    state, outputs, begin = mixer.initial_state(hidden.shape[1], hidden.device, hidden.dtype), [], 0
    for end in (*cuts, len(hidden)):
        mixed, state, _ = mixer(hidden[begin:end], state, Chunk((begin,) * hidden.shape[1]))
        outputs.append(mixed)
        begin = end
    return torch.cat(outputs)


def random(tokens: int = CHUNK, rows: int = ROWS) -> Tensor:
    return torch.randn(tokens, rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def convolution(weight: Tensor, bias: Tensor) -> nn.Conv1d:
    """torch's convolution whose channels are tokens, with what lies above the diagonal taken out of its weight."""
    out, inside, kernel = weight.shape
    made = nn.Conv1d(inside, out, kernel, padding="same", dtype=torch.float64)
    with torch.no_grad():
        made.weight.copy_(weight.movedim(2, 0).tril().movedim(0, 2))
        made.bias.copy_(bias)
    return made


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 15])
def test_the_flat_form_is_a_convolution_over_tokens_as_channels(kernel):
    mixer, hidden = built(model_of({"kernel_width": kernel})), random()
    expected = convolution(mixer.token_map.weight, mixer.token_map.bias)(hidden.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(read(mixer, hidden), expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_the_headed_form_has_a_convolution_for_each_head(kernel):
    mixer, hidden = built(model_of({"form": "headed", "kernel_width": kernel}, bias=True)), random()
    values = F.linear(hidden, mixer.value.weight, mixer.value.bias).chunk(HEADS, -1)
    biases = mixer.token_map.bias.view(HEADS, CHUNK)
    heads = [
        convolution(weight, bias)(value.transpose(0, 1)).transpose(0, 1)
        for weight, bias, value in zip(mixer.token_map.weight, biases, values, strict=True)
    ]
    expected = F.linear(torch.cat(heads, -1), mixer.output.weight, mixer.output.bias)
    torch.testing.assert_close(read(mixer, hidden), expected, **CLOSE)


@pytest.mark.parametrize("form", ["flat", "headed"])
def test_every_bias_is_in_the_equation(form):
    """The laws start from biases of zero."""
    model = model_of({"form": form, "kernel_width": 2, "map_size": 10}, bias=True)
    mixer, hidden = built(model), random(2 * CHUNK + 3, 1)
    weights = {name: parameter.detach() for name, parameter in mixer.named_parameters()}
    expected = oracle(model.mixer_at(0), model, weights, hidden[:, 0]).output
    torch.testing.assert_close(read(mixer, hidden, 5, 6, 13)[:, 0], expected, **CLOSE)


@pytest.mark.parametrize("form", ["flat", "headed"])
def test_masked_weights_have_no_gradient_and_count_for_nothing(form):
    mixer, hidden = built(model_of({"form": form, "kernel_width": 3})), random()
    before = read(mixer, hidden)
    before.square().sum().backward()
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    gradient = mixer.token_map.weight.grad.view(-1, CHUNK, CHUNK, 3)
    assert (gradient[:, later] == 0).all()
    assert (gradient[:, ~later] != 0).all()
    with torch.no_grad():
        mixer.token_map.weight.view(-1, CHUNK, CHUNK, 3)[:, later] = float("inf")
    assert torch.equal(read(mixer, hidden), before)


@pytest.mark.parametrize("form", ["flat", "headed"])
def test_a_shorter_chunk_uses_the_corner_of_the_map(form):
    whole = built(model_of({"form": form}))
    corner = built(model_of({"form": form, "map_size": CHUNK}, chunk_size=3))
    corner.load_state_dict(whole.state_dict())
    hidden = random()
    torch.testing.assert_close(read(corner, hidden[:3]), read(whole, hidden[:3]), **CLOSE)
    # and every chunk begins at the map's first place
    torch.testing.assert_close(read(corner, hidden)[3:6], read(whole, hidden[3:6]), **CLOSE)
    read(corner, hidden).sum().backward()
    assert (corner.token_map.weight.grad.view(-1, CHUNK, CHUNK)[:, 3:] == 0).all()


class Share(PlainLinears):
    """One of several ranks, which sums nothing: what `leave` is given are its terms."""

    def __init__(self, rank: int, size: int) -> None:
        self.tp_rank, self.tp_size = rank, size


@pytest.mark.parametrize("kernel", [1, 2, 3, 9])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_map_runs_of_channels_with_their_neighbors(kernel, ranks):
    """Also where the width does not divide: 12 channels on 5 ranks are 2, 2, 3, 2 and 3."""
    model, hidden = model_of({"kernel_width": kernel}), random()
    whole = built(model)
    parts = [built(model, Share(rank, ranks)) for rank in range(ranks)]
    outputs = [read(part, hidden, 3) for part in parts]
    for rank, output in enumerate(outputs):
        own = torch.zeros(WIDTH, dtype=torch.bool)
        own[WIDTH * rank // ranks : WIDTH * (rank + 1) // ranks] = True
        assert (output[..., ~own] == 0).all()
    expected = read(whole, hidden, 3)
    torch.testing.assert_close(sum(outputs), expected, **CLOSE)
    expected.square().sum().backward()
    (2 * expected.detach() * sum(outputs)).sum().backward()
    for name, parameter in whole.named_parameters():
        assert info(parameter).shard_axis is None
        summed = sum(part.get_parameter(name).grad for part in parts)
        torch.testing.assert_close(summed, parameter.grad, rtol=0, atol=1e-10)


def test_rows_at_other_places_of_their_chunks():
    """Two rows of which one is three tokens behind, in calls that cross borders of both."""
    mixer, hidden = built(model_of({"kernel_width": 3})), random(3 * CHUNK)
    state, outputs = mixer.initial_state(ROWS, hidden.device, hidden.dtype), []
    for begin, end in ((0, 3), (3, 14), (14, 15), (15, 24)):
        mixed, state, _ = mixer(hidden[begin:end], state, Chunk((begin, begin - 3)))
        outputs.append(mixed)
    joined = torch.cat(outputs)
    torch.testing.assert_close(joined[:, 0], read(mixer, hidden[:, :1])[:, 0], **CLOSE)
    torch.testing.assert_close(joined[3:, 1], read(mixer, hidden[3:, 1:])[:, 0], **CLOSE)


def test_nothing_is_kept_at_a_chunks_border():
    for form, name in (("flat", "open_hidden"), ("headed", "open_values")):
        mixer = built(model_of({"form": form}))
        state = mixer.initial_state(ROWS, torch.device("cpu"), torch.float64)
        assert list(state) == [name]
        _, state, _ = mixer(random(CHUNK + 2), state, Chunk((0, 0)))
        assert len(state[name]) == 2
        _, state, _ = mixer(random(CHUNK - 2), state, Chunk((CHUNK + 2,) * 2))
        assert len(state[name]) == 0


def test_map_tokens_by_hand():
    """Two tokens, one row, one group of two channels between zeros, a kernel of three."""
    weight = torch.tensor([[[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0], [5.0, 7.0, 11.0]]]])
    x = torch.tensor([[0.0, 1.0, 10.0, 0.0], [0.0, 2.0, 3.0, 0.0]]).view(2, 1, 1, 4)
    out = map_tokens(weight, torch.tensor([[0.5, -1.0]]), x)
    # 2*1 + 3*10 + 0.5 and 1*1 + 2*10 + 0.5; then 1 + 7*2 + 11*3 - 1 and 10 + 5*2 + 7*3 - 1
    assert out.view(2, 2).tolist() == [[32.5, 21.5], [47.0, 40.0]]


def test_weights_start_as_convolutions_do_in_torch():
    """A third of the inputs' variance for a whole row, whatever the kernel; biases at zero, and they do not decay."""
    for form, kernel in (("flat", 1), ("flat", 4), ("headed", 2)):
        stage = meta_stage(model_of({"form": form, "kernel_width": kernel, "map_size": 128}))
        declared = info(stage.layers["0"].mixer.token_map.weight)
        drawn = declared.init((128, 128, kernel), torch.Generator().manual_seed(0))
        assert drawn.std().item() * (128 * kernel) ** 0.5 == pytest.approx(3**-0.5, rel=0.03)
        assert declared.decay
        assert not info(stage.layers["0"].mixer.token_map.bias).decay


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["flat", "headed"])
def test_parameters_are_counted(form, bias):
    model = model_of({"form": form, "kernel_width": 2, "map_size": 10}, bias=bias, head_dim=5, mlp="gelu", norm="layer")
    built_ones = sum(parameter.numel() for parameter in meta_stage(model).parameters())
    assert parameter_counts(model)["total"] == built_ones
    assert parameter_counts(model)["memory"] == 2 * (1 if form == "flat" else HEADS) * (10 * 10 * 2 + 10)


@pytest.mark.parametrize(
    ("mixer", "changes", "message"),
    [
        (
            {"map_size": 6},
            {},
            "map_size 6 is less than model.chunk_size 8, whose last tokens would have no weights; use at least 8, or "
            "chunks of at most 6 tokens",
        ),
        ({}, {"qk_norm": True}, "qk_norm: no layer has softmax attention"),
        ({}, {"attention_dropout": 0.1}, "attention_dropout 0.1: no layer has softmax attention"),
        ({"form": "round"}, {}, "mixer.form: should be 'flat' or 'headed' (got 'round')"),
        ({"kernel_width": 0}, {}, "mixer.kernel_width: should be greater than 0 (got 0)"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(mixer, changes, message):
    with pytest.raises(ConfigError) as caught:
        model_of(mixer, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_heads_may_have_an_odd_width():
    """Nothing is rotated."""
    assert model_of({"form": "headed"}, head_dim=5).resolved_head_dim == 5


def test_biases_of_mixers_in_sequence_are_counted():
    """Each mixer's own: none of a flat one's, those of four projections of attention, those of two of a headed one."""
    headed = {"kind": "masked_mixer", "form": "headed"}
    mixers = {"kind": "sequential", "mixers": ["masked_mixer", "local_attention", headed]}
    plain, biased = (model_of(mixers, bias=bias, mlp="gelu", head_dim=4) for bias in (False, True))
    for model in (plain, biased):
        assert parameter_counts(model)["total"] == sum(p.numel() for p in meta_stage(model).parameters())
    assert biased.mixer.projection_biases(biased) == 4 * WIDTH + 2 * WIDTH
