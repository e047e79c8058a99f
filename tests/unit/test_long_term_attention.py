"""Attention to regions and words of a long-term memory against loops, and what is noted while a model reads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megamem.errors import ConfigError, DataError
from megamem.evaluation.long_term_memory.analysis import Analysis, LayerAnalysis, analyze
from megamem.evaluation.long_term_memory.attention import BINS, attention_to, histogram
from megamem.evaluation.long_term_memory.cells import Cells, equal_samples, first_cells, later_cells
from megamem.evaluation.long_term_memory.reads import Read, long_term_layers, read_document
from megamem.evaluation.long_term_memory.texts import held_out_texts, least_tokens
from megamem.evaluation.long_term_memory.words import Word, between, split_pieces, split_words
from megamem.evaluation.texts import Text
from megamem.memory.base import Chunk
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.reader import ChunkReader
from tests.unit.evaluation_helpers import CHUNK, VOCABULARY, documents, make_stage, model_config

ROUNDING = 1e-12
"""float64; sums over some hundred numbers, and two implementations of the error function."""


def infinity_stage(**options: object) -> Stage:
    mixer = {"kind": "infinity_former", "basis": 12, "widths": [0.03, 0.1], "samples": 7, **options}
    tree = model_config("local_attention").model_dump(mode="json") | {"memory": [], "mixer": mixer}
    stage = build_stage(type(model_config("local_attention")).model_validate(tree), PlainLinears())
    initialize_parameters(stage, 2)
    return stage.double()


def tokens_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def read_of(begin: int, chunks: int, tokens: int, seed: int) -> Read:
    """Two heads' densities, over `chunks` chunks of 4 tokens."""
    draws = np.random.default_rng(seed)
    borders = np.sort(draws.random(4 * chunks - 1))
    cells = Cells(0, np.concatenate(([0.0], borders, [1.0])))
    return Read(begin, cells, cells, draws.random((2, tokens)), draws.uniform(0.01, 0.4, (2, tokens)))


def slow_mass(read: Read, token: int, low: float, high: float) -> float:
    """Attention of one token between two places, by the error function, a mean over heads."""
    total = 0.0
    for head in range(len(read.mean)):
        mean, scale = read.mean[head, token], read.deviation[head, token] * math.sqrt(2)
        total += (math.erf((high - mean) / scale) - math.erf((low - mean) / scale)) / 2
    return total / len(read.mean)


def test_attention_to_stretches_equals_a_loop() -> None:
    read = read_of(8, 3, 5, seed=1)
    found = attention_to(read, read.cells.borders)
    assert found.shape == (5, 12)
    for token in range(5):
        for stretch in range(12):
            low, high = read.cells.borders[stretch : stretch + 2]
            assert found[token, stretch] == pytest.approx(slow_mass(read, token, low, high), abs=ROUNDING)


def test_the_histogram_is_a_mean_over_documents_of_means_over_tokens() -> None:
    texts = [[read_of(4, 1, 4, 1), read_of(8, 2, 4, 2), read_of(12, 3, 2, 3)], [read_of(4, 1, 3, 4)]]
    found = histogram(texts, 4)
    slow = np.zeros(BINS)
    for reads in texts:
        count = sum(read.mean.shape[1] for read in reads)
        for read in reads:
            for token in range(read.mean.shape[1]):
                for number in range(BINS):
                    slow[number] += slow_mass(read, token, number / BINS, (number + 1) / BINS) / count / len(texts)
    assert found.density / BINS == pytest.approx(slow, abs=ROUNDING)
    assert found.outside == pytest.approx(1 - slow.sum(), abs=ROUNDING)
    assert found.tokens == 13
    # the newest chunk of four tokens begins there, in the two readings that hold more than one
    second, third = texts[0][1].cells.borders, texts[0][2].cells.borders
    assert found.borders == pytest.approx([(second[4] + third[8]) / 2, third[4]], abs=ROUNDING)


@pytest.mark.parametrize("options", [{}, {"sticky": "random", "bins": 9}, {"short_memory": CHUNK}])
def test_what_is_noted_is_what_was_read(options: dict[str, object]) -> None:
    """Each read begins where its chunk does, holds the chunks before, and changes nothing of the reading."""
    stage = infinity_stage(**options)
    tokens = tokens_of(4 * CHUNK + 3)
    plain = read_plainly(stage, tokens)
    found = read_document(stage, tokens)
    assert torch.equal(read_plainly(stage, tokens), plain)
    late = 1 if "short_memory" in options else 0
    for reads in found.values():
        assert [read.begin for read in reads] == [CHUNK * c for c in range(1 + late, 5)]
        assert [(read.cells.first, read.cells.end) for read in reads] == [(0, CHUNK * c) for c in range(1, 5 - late)]
        assert reads[-1].mean.shape == (4, 3)
        assert all(((read.mean > 0) & (read.mean < 1) & (read.deviation > 0)).all() for read in reads)
        regression = next(iter(long_term_layers(stage).values())).long_term.regression
        cells = first_cells(regression, 0)
        for read in reads:
            assert np.array_equal(read.equal.borders, cells.borders)
            assert np.array_equal(read.cells.borders, cells.borders) == ("sticky" not in options or read is reads[0])
            cells = later_cells(regression, cells, equal_samples(regression))
    assert all(layer.long_term.observer is None for layer in long_term_layers(stage).values())


def read_plainly(stage: Stage, tokens: torch.Tensor) -> torch.Tensor:
    reader = ChunkReader(stage)
    groups = reader.begin(Chunk((0,)))
    with torch.no_grad():
        hidden = reader.read(tokens[:, None], Chunk((0,)), groups)
    assert hidden is not None
    return hidden


def test_densities_are_those_of_the_equations() -> None:
    """The mean and variance noted for one head, from the memory's own weights and what it was given to read."""
    stage = infinity_stage()
    memory = stage.layers["1"].mixer.long_term
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = memory.read

    def spy(query: torch.Tensor, coefficients: torch.Tensor, written: list[int]) -> object:
        kept.append((query, coefficients))
        return plain(query, coefficients, written)

    memory.read = spy
    reads = read_document(stage, tokens_of(2 * CHUNK))["layers.1.mixer"]
    query, coefficients = kept[1]
    keys = coefficients[:, 0] @ memory.key.weight.T  # [N, H D]
    scores = torch.einsum("thd,nhd->htn", query[:, 0], keys.unflatten(1, (4, 4))) / 2
    place, width = scores @ memory.focus.weight.T.unbind(1)[0], scores @ memory.focus.weight.T.unbind(1)[1]
    assert reads[0].mean == pytest.approx(torch.sigmoid(place).detach().numpy(), abs=1e-12)
    variance = torch.nn.functional.softplus(width).clamp(min=memory.min_variance)
    assert reads[0].deviation == pytest.approx(variance.sqrt().detach().numpy(), abs=1e-12)


def test_a_memory_that_begins_again_holds_the_chunks_since() -> None:
    stage = infinity_stage(restart_after=2 * CHUNK)
    reads = read_document(stage, tokens_of(6 * CHUNK))["layers.0.mixer"]
    held = [(read.cells.first // CHUNK, read.cells.end // CHUNK) for read in reads]
    assert held == [(0, 1), (0, 2), (2, 3), (2, 4), (4, 5)]


LETTERS = {0: "ab", 1: " cd", 2: "e", 3: "\n", 4: " <f>&", 5: "", 6: "\xc3", 7: "\xa9"}


def decode(ids: object) -> str:
    """Tokens 6 and 7 are the two bytes of one character; what comes first loses its space, as with SentencePiece."""
    parts = b"".join(LETTERS[i].encode("latin-1") for i in ids)
    return parts.decode("utf-8", errors="replace").removeprefix(" ")


def test_words_hold_all_tokens_and_stand_between_white_space() -> None:
    ids = [0, 1, 2, 3, 0, 5, 4, 6, 7, 1, 6]
    words = split_words(ids, decode)
    assert [word.text for word in words] == ["ab", " cde", "\nab", " <f>&é", " cd\ufffd"]
    assert [(word.begin, word.end) for word in words] == [(0, 1), (1, 3), (3, 6), (6, 9), (9, 11)]
    pieces = split_pieces(ids, decode)
    assert [piece.text for piece in pieces][-3:] == ["é", " cd", "\ufffd"]
    assert [piece.begin for piece in pieces] == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]


def test_words_are_cut_to_what_is_held() -> None:
    words = [Word(0, 3, "a"), Word(3, 4, "b"), Word(4, 8, "c")]
    assert between(words, 2, 5) == [Word(2, 3, "a"), Word(3, 4, "b"), Word(4, 5, "c")]


def analyzed(**arguments: object) -> tuple[Analysis, LayerAnalysis]:
    texts = [Text("short", tuple(tokens_of(3 * CHUNK, 1).tolist())), Text("long", tuple(tokens_of(99, 2).tolist()))]
    options = {"chunks": 3, **arguments}
    return analyze(infinity_stage(sticky="spread", bins=9), texts, None, **options)  # type: ignore[arg-type]


def test_an_analysis_shows_the_longest_text_and_the_last_layer() -> None:
    analysis, shown = analyzed()
    assert (analysis.documents, analysis.document) == (2, "long")
    assert [layer.title for layer in analysis.layers] == ["layer 0", "layer 1"]
    assert shown is analysis.layers[1]
    assert len(analysis.words) == 4 * CHUNK + 1
    assert len(shown.remembered) == len(shown.attended) == 3 * CHUNK
    assert shown.borders == (CHUNK, 2 * CHUNK)
    # what was held is all of [0, 1], and attention to it is what does not lie outside
    assert shown.space.sum() == pytest.approx(1, abs=ROUNDING)
    assert shown.equal_space.sum() == pytest.approx(1, abs=ROUNDING)
    assert 3 * CHUNK < shown.predicted <= 4 * CHUNK
    one, last = (analyzed(token=number)[1] for number in (2 * CHUNK, shown.predicted))
    assert len(one.attended) == CHUNK
    assert np.array_equal(last.attention, shown.attention)
    # the sharpest look of the chunk
    others = [analyzed(token=number)[1].attention.max() for number in range(3 * CHUNK + 1, 4 * CHUNK + 1)]
    assert shown.attention.max() == max(others)


def test_layers_may_remember_from_different_tokens_on() -> None:
    """The second layer's memory begins a chunk later, so that it is empty when the token shown is predicted."""
    stage = infinity_stage()
    late = {**stage.config.mixer_at(1).model_dump(mode="json"), "short_memory": CHUNK}
    tree = stage.config.model_dump(mode="json") | {"memory": [{"layers": [1], "mixer": late}]}
    stage = build_stage(type(stage.config).model_validate(tree), PlainLinears())
    initialize_parameters(stage, 2)
    text = Text("text", tuple(tokens_of(50).tolist()))
    analysis, shown = analyze(stage.double(), [text], None, layer=0, token=2 * CHUNK)
    assert shown is analysis.layers[0]
    assert [len(layer.attended) for layer in analysis.layers] == [CHUNK, 0]
    assert [len(layer.attention) for layer in analysis.layers] == [CHUNK, 0]
    with pytest.raises(ConfigError, match=r"--token 16: .* give a number from 17 to 49"):
        analyze(stage, [text], None, layer=1, token=2 * CHUNK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 5}, "--layer 5: has no long-term memory; the layers that have one: 0, 1"),
        ({"token": CHUNK}, "--token 8: is not predicted from a long-term memory; give a number from 9 to 32"),
        ({"token": 4 * CHUNK + 1}, "--token 33: is not predicted"),
    ],
)
def test_a_layer_or_token_that_is_none_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        analyzed(**arguments)


def test_texts_that_read_no_memory_are_refused() -> None:
    stage = infinity_stage(short_memory=2 * CHUNK)
    assert least_tokens(stage) == 3 * CHUNK + 2
    text = Text("a.txt", (1,) * (3 * CHUNK + 1))
    with pytest.raises(DataError, match=r"a\.txt: 25 tokens, .* give a text of at least 26 tokens"):
        analyze(stage, [text], None)
    with pytest.raises(DataError, match="no document has 26 tokens"):
        held_out_texts(documents(10, 24), stage, 3, 8)
    found = held_out_texts(documents(10, 30, 90, 40, 80, 90), stage, 3, 2)
    assert [len(text.ids) for text in found] == [91, 81]
    assert [len(text.ids) for text in held_out_texts(documents(10, 30, 90, 40), stage, 3, 2)] == [91, 41]


def test_a_model_without_a_long_term_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"elastic_memory, local_attention has no .* that have one: infinity_former$"):
        long_term_layers(make_stage("elastic_memory"))
