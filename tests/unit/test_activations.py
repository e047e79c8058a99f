"""Bytes of activations: counted, carried over to other shares, and put together to a step's peak."""

import pytest
import torch

from checkpoints.weights import WeightsHeader, write_weights
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.memory.base import Chunk
from megamem.memory.continuous import gaussian_basis
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import build_stage, meta_stage
from megamem.ops import linear_cross_entropy, rotary
from megamem.pipeline.freezing import freeze, learning_names
from megamem.pipeline.window import Window
from megamem.planning import ledger
from megamem.planning.activations import Activations
from megamem.planning.ledger import Ledger, Storages
from megamem.planning.measured_part import Part, Share, measure_chunks, measure_part
from megamem.planning.peak import step_peak
from megamem.planning.rank_linears import RankLinears
from tests.contract.cases import CASES

CHUNKS = 4


def test_storages_count_once_and_as_long_as_they_live():
    count = Ledger()
    kept = torch.ones(10)
    count.enter_storage(kept, counted=False)
    with count:
        a = torch.ones(100)
        view = a[10:20].view(2, 5)
        b = a + kept[0]
        del a
    assert count.live == 800  # the view keeps all of its storage alive
    del view
    assert count.live == 400
    del b
    assert count.live == 0
    assert Storages.of(count).live(count.time).max() == 800


def test_large_results_are_not_computed_but_have_their_shapes():
    x = torch.ones(256, 256)
    with Ledger() as count:
        product = x @ x.mT
        changed = product.mul_(2).transpose(0, 1)
        chosen = product.topk(3).indices
    assert product.shape == (256, 256)
    assert not product.any()
    assert changed.untyped_storage().data_ptr() == product.untyped_storage().data_ptr()
    assert chosen.dtype == torch.int64
    assert count.live == product.nbytes + chosen.nbytes  # the values chosen are gone, and x is not from here


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("recompute", [False, True, "mixer", pytest.param("mlp", marks=pytest.mark.slow)])
def test_other_shares_lie_on_the_lines(case, recompute):
    """All heads and 7 rows from measurements of a half of the heads with 2 rows and a quarter with 5.

    Within a hundredth: a few operations copy at one shape what they need not copy at another.
    """
    model = case.model(heads=8 * case.queries_per_key)
    found = Activations(model, "fp32", CHUNKS)
    predicted = found.layer(0, Share(7, 1, recompute))
    measured = measure_part(Part(model, torch.float32, range(1), None), CHUNKS, False, Share(7, 1, recompute))
    for here, there in zip(predicted, measured, strict=False):
        assert tuple(here) == pytest.approx(tuple(there.bytes), rel=0.01, abs=0.01 * there.kept)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("end", ["head", "embedding"])
def test_ends_of_a_sequence_parallel_rank(rows, end):
    """With four heads in all: one rank alone runs other operations than those that share a sequence."""
    model = ModelConfig(layers=1, hidden_size=64, heads=4, vocab_size=512, chunk_size=16, mixer="full_attention")
    share = Share(rows, 2, sequence_parallel=True)
    found = Activations(model, "fp32", 1)
    (here,) = getattr(found, end)(share)
    layers = range(1, 1) if end == "head" else range(0)
    (there,) = measure_part(Part(model, torch.float32, layers, None), 1, False, share)
    assert tuple(here) == pytest.approx(tuple(there.bytes), rel=0.01)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("recompute", [True, "mixer", "mlp"])
def test_recomputation_runs_what_the_backward_pass_needs_again(case, recompute):
    """Operation by operation what a run with recomputation was seen to do, though no such run is measured."""
    part = Part(case.model(heads=8 * case.queries_per_key), torch.float32, range(1), None)
    without = measure_chunks(part, 3, False, Share(2, 1))
    with_it = measure_part(part, 3, False, Share(2, 1, recompute))
    for before, seen in zip(without, with_it, strict=True):
        found = before.under(recompute)
        for here, there in zip(found.work, seen.work, strict=True):
            # but for views: a checkpoint detaches what it saves
            assert list(zip(*here[:-1], strict=True)) == list(zip(*there[:-1], strict=True))
        # a function written in Python lets go of what a checkpoint computes again one operation before it ends
        assert found.bytes == pytest.approx(seen.bytes, rel=0 if recompute is True else 0.005)


def test_tables_that_last_are_not_counted():
    """Rotary tables stay for all layers and chunks: who measures first does not find more than who measures again."""
    model = next(case for case in CASES if case.kind == "full_attention").model()
    rotary.consecutive_rotary_tables.cache_clear()
    share = Share(2, 1)
    first, second = (measure_part(Part(model, torch.float32, range(1), None), CHUNKS, True, share) for _ in range(2))
    assert [part.kept for part in first] == [part.kept for part in second]


def test_processes_side_by_side_find_the_same():
    """Each number, for a memory whose bytes grow."""
    model = next(case for case in CASES if case.kind == "full_attention").model(heads=4)
    alone, together = (Activations(model, "fp32", CHUNKS, processes).layer(0, Share(5, 1)) for processes in (1, 2))
    assert alone == together


def test_tokens_are_split_evenly_where_parts_are_measured():
    """64 tokens are not divided by 6 ranks; 12 heads and 768 rows are."""
    small = {"layers": 1, "hidden_size": 96, "heads": 12, "ffn_size": 192, "vocab_size": 768, "chunk_size": 64}
    found = Activations(parse_config(ModelConfig, small, "test"), "fp32", 1)
    whole, split = (Share(4, 2, sequence_parallel=way) for way in (False, True))
    for part in (found.head, found.embedding, lambda share: found.layer(0, share)):
        assert 0 < part(split)[0].kept < part(whole)[0].kept


@pytest.mark.parametrize("mixer", ["local_attention", {"kind": "melodi", "form": "rising", "summaries": 6}])
def test_rows_around_are_split_evenly_where_parts_are_measured(mixer):
    """32 tokens and 6 rows are divided by 2 ranks, not by 4 or 8."""
    model = {
        "layers": 2, "hidden_size": 64, "heads": 8, "vocab_size": 256, "chunk_size": 32, "mixer": mixer,
        "memory": [{"layers": [1], "mixer": {"kind": "melodi", "form": "rising", "summaries": 6}}],
    }  # fmt: skip
    found = Activations(parse_config(ModelConfig, model, "test"), "fp32", 1)
    whole, split = (Share(4, 2, sequence_parallel=way) for way in (False, True))
    for part in (found.head, found.embedding, lambda share: found.layer(0, share)):
        assert 0 < part(split)[0].kept < part(whole)[0].kept


@pytest.mark.parametrize("architecture", ["decoder", {"kind": "recurrent_memory", "memory_tokens": 2}])
def test_ends_of_models_with_rows_around_short_chunks(architecture):
    """Embedding and head are measured within one chunk, which may be shorter than the tokens they usually take."""
    mixer = "local_attention" if isinstance(architecture, dict) else {"kind": "melodi", "form": "rising"}
    model = {
        "layers": 2, "hidden_size": 16, "heads": 2, "vocab_size": 128, "chunk_size": 16, "architecture": architecture,
        "mixer": mixer,
    }  # fmt: skip
    found = Activations(parse_config(ModelConfig, model, "test"), "fp32", 2)
    # the head keeps at least the logits of 3 rows of 16 tokens, the embedding hands on 16 hidden numbers of each
    assert found.head(Share(3, 1))[0].forward >= 3 * 16 * 128 * 4
    assert found.embedding(Share(3, 1))[0].kept >= 3 * 16 * 16 * 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_of_a_head_in_slices(precision, recompute, monkeypatch):
    """Nearly nothing is kept, and the most is that of a slice: as measured at the full size, within a hundredth."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", 2**18)
    small = {"layers": 1, "hidden_size": 32, "heads": 4, "vocab_size": 1024, "chunk_size": 128}
    model = parse_config(ModelConfig, small, "test")
    found, share = Activations(model, precision, 1), Share(5, 1, recompute)
    predicted = found.head(share)[0]
    # ten rows of 64 tokens: 640 x 1,024 numbers of 4 bytes are 2.5 MiB
    part = Part(model, found.dtype, range(1, 1), None)
    (measured,) = measure_part(part, 1, False, Share(10, 1, recompute, loss_slices=16))
    assert tuple(predicted)[:3] == pytest.approx(
        (measured.kept, measured.forward.max(), measured.backward.max()), rel=0.01
    )
    assert predicted.kept < 0.15 * 640 * 1024 * 4
    assert predicted.forward < 0.3 * 640 * 1024 * 4
    work = found.head_work(share)[0]
    products = 2 * 640 * 1024 * 32
    # forward; in the backward pass the logits once more and two products with their gradient
    assert (work.forward.flops.sum(), work.backward.flops.sum()) == pytest.approx((products, 3 * products), rel=0.01)


def test_bytes_of_an_adaptive_head_are_those_of_the_clusters_that_labels_lie_in():
    """Fewer than those of all words for all tokens, more than the shortlist's; the same for each row."""
    model = {"layers": 1, "hidden_size": 32, "heads": 4, "vocab_size": 768, "chunk_size": 64}
    adaptive = {"cutoffs": [64, 256], "divisor": 2}
    one, other = (
        Activations(parse_config(ModelConfig, tree, "test"), "fp32", 1)
        for tree in (model, {**model, "adaptive": adaptive})
    )
    plain, found = (activations.head(Share(4, 1))[0] for activations in (one, other))
    assert 4 * 64 * 64 * 4 < found.kept < plain.kept
    assert found.kept == pytest.approx(2 * other.head(Share(2, 1))[0].kept, rel=0.01)
    assert other.embedding(Share(4, 1))[0].kept > one.embedding(Share(4, 1))[0].kept


MIXERS = {
    "attention": "local_attention",
    "elastic memory": {"kind": "elastic_memory", "order": 16},
    "full attention": "full_attention",
    "lamemo": "lamemo",
    "rising melodi": {"kind": "melodi", "form": "rising", "summaries": 16, "memories": 8},
    "caching": {"kind": "memory_caching", "memory": {"kind": "dla"}, "combine": "grm", "segment": 64},
}


@pytest.mark.parametrize("bptt_chunks", [2, 4])
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_parts_make_up_a_step(mixer, bptt_chunks):
    """Against a ledger over a whole sequence's windows. Above it by what gradients of states share, never below."""
    config = step_config(mixer, bptt_chunks)
    stage = build_stage(config.model, RankLinears(1))
    assert 0.99 < planned(config) / most_bytes(config, stage) < 1.08


@pytest.mark.parametrize("recompute", ["mixer", "mlp"])
@pytest.mark.parametrize("mixer", [MIXERS["elastic memory"], MIXERS["caching"]], ids=["elastic memory", "caching"])
def test_parts_that_are_computed_again_make_up_a_step(mixer, recompute):
    """Likewise where a part of each layer is computed again, which keeps less."""
    config = step_config(mixer, 2, recompute=recompute)
    found = most_bytes(config, build_stage(config.model, RankLinears(1)))
    assert 0.99 < planned(config) / found < 1.08
    assert planned(step_config(mixer, 2)) > 1.1 * planned(config)


@pytest.mark.parametrize("recompute", [False, True, "mixer", "mlp"])
@pytest.mark.parametrize("bptt_chunks", [2, 4])
@pytest.mark.parametrize("mixer", ["elastic memory", "full attention", "caching"])
def test_windows_read_layer_by_layer_make_up_a_step(mixer, bptt_chunks, recompute):
    """Likewise where each layer reads all chunks of a window before the next layer."""
    config = step_config(MIXERS[mixer], bptt_chunks, recompute=recompute, order="layers")
    found = most_bytes(config, build_stage(config.model, RankLinears(1)))
    assert 0.99 < planned(config) / found < 1.08


def test_layer_by_layer_fewer_and_larger_operations_run():
    """As many multiplications; of the operations beside the mixer's a quarter, where windows have four chunks."""
    model = step_config(MIXERS["elastic memory"], CHUNKS).model
    by_chunk = Activations(model, "fp32", CHUNKS).layer_work(0, Share(4, 1))
    (by_layer,) = Activations(model, "fp32", CHUNKS, together=CHUNKS).layer_work(0, Share(4, 1))
    for number in (0, 1):
        chunks, window = [chunk[number] for chunk in by_chunk], by_layer[number]
        assert window.flops.sum() == pytest.approx(sum(chunk.flops.sum() for chunk in chunks), rel=1e-3)
        assert len(window.kinds) < 0.8 * sum(len(chunk.kinds) for chunk in chunks)


@pytest.mark.parametrize("mixer", ["infini_attention", {"kind": "infinity_former", "basis": 32, "samples": 32}])
@pytest.mark.parametrize("recompute", [False, True, "mixer"])
def test_a_frozen_base_keeps_less(mixer, recompute, tmp_path):
    """Likewise where added memories learn alone, in two of three layers: the first has no backward pass.

    What it hands on counts as kept, though nobody keeps it: hence up to a fifth above."""
    free = step_config("local_attention", 2, [{"layers": [1, 2], "mixer": mixer}], recompute)
    whole, plain = (
        dict(meta_stage(model).named_parameters()) for model in (free.model, step_config("local_attention", 2).model)
    )
    path = tmp_path / "start.safetensors"
    write_weights({}, path, WeightsHeader(sorted(set(whole) - set(plain))))
    training = free.training.model_copy(update={"freeze": "base", "init_from": path})
    config = free.model_copy(update={"training": training})
    stage = build_stage(config.model, RankLinears(1))
    freeze(stage, set(whole) - set(plain))
    found = most_bytes(config, stage)
    assert 0.99 < planned(config) / found < 1.2
    assert planned(free) > 1.3 * found


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_frozen_part_keeps_less(part, tmp_path):
    """An encoder that is frozen keeps no graph; through a frozen decoder gradients go, but for the first chunk's.

    That is counted all the same: hence up to a quarter above."""
    encoder = {"layers": 2, "hidden_size": 96, "heads": 3}  # three heads, which only three ranks could share
    architecture = {"kind": "memory_model", "encoder": encoder, "slots": 3}
    free = step_config("local_attention", CHUNKS, architecture=architecture)
    path = tmp_path / "start.safetensors"
    write_weights({}, path)
    training = free.training.model_copy(update={"freeze": part, "init_from": path})
    config = free.model_copy(update={"training": training})
    stage = build_stage(config.model, RankLinears(1))
    freeze(stage, learning_names(config))
    found = most_bytes(config, stage)
    assert 0.99 < planned(config) / found < 1.25
    assert planned(free) > 1.15 * planned(config)


def test_tables_made_while_measuring_are_real():
    """They stay for calls outside of the ledger, which computes no large numbers itself."""
    rotary.consecutive_rotary_tables.cache_clear()
    gaussian_basis.operators.cache_clear()
    regression = gaussian_basis.Regression(gaussian_basis.Basis(64, (0.01, 0.05)), 1.0, 64, 32, 0.5, "zeros")
    device = torch.device("cpu")
    with Ledger():
        cos, sin = rotary.consecutive_rotary_tables(5, 512, 64, rotary.Rotation(1e4), torch.float32, device)
        made = gaussian_basis.operators(regression, torch.float32, device)
    again = rotary.rotary_tables(torch.arange(5, 517)[:, None], 64, rotary.Rotation(1e4), torch.float32)
    assert torch.equal(cos, again[0])
    assert torch.equal(sin, again[1])
    assert gaussian_basis.operators(regression, torch.float32, device) is made
    exact = regression.operator(regression.all_first())[:, : regression.tokens]
    assert torch.equal(made.first, exact.float())


def planned(config):
    """The most bytes of the one rank of a run besides weights and optimizer."""
    return step_peak(config, Activations.of_run(config, device="cpu"), range(3), 0, 1, 1).total


def step_config(mixer, bptt_chunks, memory=(), recompute=False, order="chunks", **model):
    """A run of one sequence of four rows."""
    size, rows = 64, 4
    return parse_config(
        RunConfig,
        {
            "name": "x",
            "model": {
                "layers": 3, "hidden_size": 128, "heads": 4, "vocab_size": 512, "chunk_size": size, "mixer": mixer,
                "memory": memory, **model,
            },
            "data": {"sources": ["x"], "sequence_length": CHUNKS * size},
            "parallel": {"zero_stage": 0},
            "training": {
                "steps": 1, "batch_tokens": CHUNKS * size * rows, "micro_batch_size": rows, "precision": "fp32",
                "bptt_chunks": bptt_chunks, "recompute": recompute, "window_order": order,
            },
        },
        "config",
    )  # fmt: skip


def most_bytes(config, stage):
    """The most bytes that a ledger counts over the windows of a sequence."""
    size, rows, bptt_chunks = config.model.chunk_size, config.training.micro_batch_size, config.bptt_chunks
    stage.recompute = config.training.recompute
    window = Window(stage, NextToken(config.model), order=config.training.window_order)
    tokens = torch.zeros(CHUNKS * size, rows, dtype=torch.int64)
    for _ in range(2):  # the first pass makes tables that stay
        count = Ledger()
        for parameter in stage.parameters():
            parameter.data.zero_()
            parameter.grad = None
            count.enter_storage(parameter, counted=False)
        with count:
            states = stage.initial_states(rows, torch.device("cpu"), torch.float32)
            for first in range(0, CHUNKS, bptt_chunks):
                part = slice(first * size, (first + bptt_chunks) * size)
                places = [Chunk((chunk * size,) * rows) for chunk in range(first, first + bptt_chunks)]
                loss, _, states = window(tokens[part], tokens[part], places, states, torch.tensor(1.0))
                loss.backward()
    return Storages.of(count).live(count.time).max()


def test_what_is_not_computed_is_remembered(monkeypatch):
    """A second look at the same shapes costs no second search."""
    x, asked, search = torch.ones(300, 300), [], ledger._result_shapes
    monkeypatch.setattr(ledger, "_operations", {})
    monkeypatch.setattr(ledger, "_result_shapes", lambda func, *operands: asked.append(func) or search(func, *operands))
    with Ledger():
        x @ x
        x @ x
    assert asked == [torch.ops.aten.mm.default]
