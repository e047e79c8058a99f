"""Layers to stages: the balance against all placements, costs against the model as built and the FLOP formula."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch

from megamem.config.load import merge, parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.flops import flop_costs, flops_by_part, flops_per_token
from megamem.costs.parameters import parameter_costs, parameter_counts
from megamem.costs.parts import PartCosts
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears
from megamem.pipeline import balancing as costs
from megamem.pipeline.balancing import chunk_flops, measured_costs, place, place_by
from megamem.pipeline.placement import balance, contiguous
from megamem.pipeline.schedule import Action
from megamem.training.checkpointing import placed_as_before

CHUNK = 16
ATTENTION = {"kind": "local_attention"}
FULL = {"kind": "full_attention"}
ELASTIC = {"kind": "elastic_memory", "order": 12, "samples": 6}
MODEL = {
    "layers": 5, "hidden_size": 48, "heads": 6, "kv_heads": 2, "vocab_size": 64, "chunk_size": CHUNK,
    "memory": [{"layers": [1], "mixer": ELASTIC}, {"layers": [3, 4], "mixer": FULL}],
}  # fmt: skip
RUN = {
    "name": "case",
    "model": MODEL,
    "data": {"sources": "none", "sequence_length": 4 * CHUNK},
    "training": {"steps": 1, "batch_tokens": 4 * CHUNK, "precision": "fp32"},
    "parallel": {"pp": 3},
}


def model(**changes):
    return parse_config(ModelConfig, merge(MODEL, changes), "test")


def run(**sections):
    return parse_config(RunConfig, merge(RUN, sections), "test")


def compositions(layers, stages):
    """All ways to give every stage at least one layer."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield [end - begin for begin, end in itertools.pairwise((0, *cuts, layers))]


def stage_costs(layer_costs, counts, first_extra=0, last_extra=0):
    found = [sum(layer_costs[layer] for layer in layers) for layers in contiguous(counts)]
    found[0] += first_extra
    found[-1] += last_extra
    return found


# balance


def random_cases(count):
    draw = random.Random(1)
    for _ in range(count):
        layers = draw.randint(1, 9)
        # whole numbers: sums are exact and ties are ties
        layer_costs = [draw.randint(1, 9) for _ in range(layers)]
        yield layer_costs, draw.randint(1, layers), draw.randint(0, 15), draw.randint(0, 15)


def test_no_placement_has_a_cheaper_dearest_stage():
    for layer_costs, stages, first, last in random_cases(500):
        found = balance(layer_costs, stages, first, last)
        assert len(found) == stages
        assert min(found) >= 1
        assert sum(found) == len(layer_costs)
        best = min(max(stage_costs(layer_costs, c, first, last)) for c in compositions(len(layer_costs), stages))
        assert max(stage_costs(layer_costs, found, first, last)) == best, (layer_costs, stages, first, last)


def test_among_these_the_squares_decide_then_layers_in_front():
    """As `balance` promises. Its answer for ([7, 1, 9, 5, 5, 1], 5, 9, 2) has squares of 427, not 415."""

    def rank(counts, layer_costs, first, last):
        found = stage_costs(layer_costs, counts, first, last)
        return max(found), sum(cost * cost for cost in found), [-count for count in counts]

    example = ([7, 1, 9, 5, 5, 1], 5, 9, 2)
    for layer_costs, stages, first, last in (*random_cases(500), example):
        every = compositions(len(layer_costs), stages)
        best = min(every, key=lambda counts: rank(counts, layer_costs, first, last))
        assert balance(layer_costs, stages, first, last) == best, (layer_costs, stages, first, last)


@pytest.mark.parametrize(
    ("layer_costs", "stages", "extras", "counts"),
    [
        ([1] * 8, 4, (0, 0), [2, 2, 2, 2]),
        ([1] * 7, 2, (0, 0), [4, 3]),  # what is left over goes in front
        ([1] * 8, 3, (0, 0), [3, 3, 2]),
        ([1] * 8, 4, (0, 2), [3, 2, 2, 1]),  # the head is as dear as two layers
        ([1] * 6, 2, (4, 0), [1, 5]),
        ([1] * 6, 1, (4, 4), [6]),
        ([9, 1, 1, 1], 2, (0, 0), [1, 3]),
        ([1, 1, 1], 3, (100, 100), [1, 1, 1]),  # no stage is left without layers
    ],
)
def test_balance_by_hand(layer_costs, stages, extras, counts):
    assert balance(layer_costs, stages, *extras) == counts


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"^3 stages for 2 layers$"):
        balance([1.0, 1.0], 3)


def test_contiguous():
    assert contiguous([3, 1, 2]) == [range(3), range(3, 4), range(4, 6)]
    assert contiguous([4]) == [range(4)]


def test_costs_by_stage():
    parts = PartCosts((1, 2, 4, 8), 100, 1000)
    assert parts.by_stage([1, 3]) == [101, 1014]
    assert parts.by_stage([2, 1, 1]) == [103, 4, 1008]
    assert parts.by_stage([4]) == [1115]
    # 103 and 102 with embedding and head, against 107 and 98 of what the layers alone would ask for
    assert place_by(PartCosts((1, 2, 4, 8), 100, 90), 2) == [2, 2]
    assert place_by(PartCosts((1, 2, 4, 8), 0, 0), 2) == [3, 1]


# parameters


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("counts", [[5], [2, 3], [1, 3, 1], [1, 1, 1, 1, 1]])
def test_parameters_are_those_of_the_stages_as_built(tied, counts):
    config = model(tie_embeddings=tied, head_dim=10, ffn_size=130, vocab_size=77)
    built = []
    for layers in contiguous(counts):
        with torch.device("meta"):
            stage = build_stage(config, PlainLinears(), layers)
        built.append(sum(parameter.numel() for parameter in stage.parameters()))
    found = parameter_costs(config).by_stage(counts)
    if tied and len(counts) == 1:  # one matrix; the costs are about stages and count it on both ends
        found[0] -= 77 * 48
    assert found == built
    # tied: the matrix lies on the first stage and on the last
    copies = 77 * 48 if tied and len(counts) > 1 else 0
    assert sum(built) == parameter_counts(config)["total"] + copies


# operations


@pytest.mark.parametrize("mixer", [ATTENTION, FULL, {**FULL, "max_chunks": 2}, ELASTIC], ids=str)
@pytest.mark.parametrize("chunks", [1, 2, 4, 7])
def test_operations_are_those_of_the_whole_model(mixer, chunks):
    for config in (model(mixer=mixer), model(mixer=mixer, memory=[])):
        parts = flop_costs(config, chunks * CHUNK)
        total = flops_per_token(config, chunks * CHUNK)["training"]
        # 1e-12: the order of some hundred float64 additions
        assert math.fsum(parts.layers) + parts.head == pytest.approx(total, rel=1e-12)
        assert parts.embedding == 0
        assert math.fsum(parts.by_stage([2, 3])) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("mixer", [ATTENTION, FULL, {**FULL, "max_chunks": 2}, ELASTIC], ids=str)
@pytest.mark.parametrize("chunks", [1, 2, 4, 7])
def test_chunks_average_to_the_sequence(mixer, chunks):
    config, counts = model(mixer=mixer), [1, 3, 1]
    cost = chunk_flops(config, chunks, counts)
    parts = flops_by_part(config, chunks * CHUNK).values()
    for kind, exact in (("forward", sum(p.forward for p in parts)), ("backward", sum(p.backward for p in parts))):
        found = [cost(stage, Action(kind, 0, chunk)) for stage in range(3) for chunk in range(chunks)]
        # 1e-12: as above
        assert math.fsum(found) / chunks == pytest.approx(exact, rel=1e-12)
    # and each stage's share is that of its layers
    whole = flop_costs(config, chunks * CHUNK).by_stage(counts)
    for stage in range(3):
        found = [cost(stage, Action(kind, 0, c)) for kind in ("forward", "backward") for c in range(chunks)]
        assert math.fsum(found) / chunks == pytest.approx(whole[stage], rel=1e-12)


def by_chunk(mixer, kind):
    cost = chunk_flops(model(mixer=mixer, memory=[]), 6, [5])
    return [cost(0, Action(kind, 0, chunk)) for chunk in range(6)]


def test_full_attention_costs_more_with_each_chunk():
    config = model()
    for kind, factor in (("forward", 1), ("backward", 2)):
        found = by_chunk(FULL, kind)
        # 5 layers attend to 16 more keys: a score and a weighted value each, 2 operations a product
        step = factor * 5 * 4 * config.heads * config.resolved_head_dim * CHUNK
        # 1e-9: differences of sums up to 6 chunks long
        assert [b - a for a, b in itertools.pairwise(found)] == pytest.approx([step] * 5, rel=1e-9)


def test_a_bounded_context_costs_more_up_to_its_bound():
    found = by_chunk({**FULL, "max_chunks": 2}, "forward")
    assert found[0] < found[1] < found[2]
    # 1e-9: as above
    assert found[3:] == pytest.approx([found[2]] * 3, rel=1e-9)


def test_a_fixed_state_costs_the_same_once_there_is_something_to_recall():
    assert by_chunk(ATTENTION, "forward") == pytest.approx([by_chunk(ATTENTION, "forward")[0]] * 6, rel=1e-9)
    found = by_chunk(ELASTIC, "forward")
    assert found[0] < found[1]
    assert found[1:] == pytest.approx([found[1]] * 5, rel=1e-9)


def test_the_sequence_does_not_matter_but_the_stage_does():
    cost = chunk_flops(model(), 4, [1, 3, 1])
    assert cost(1, Action("forward", 0, 2)) == cost(1, Action("forward", 5, 2))
    assert len({cost(stage, Action("forward", 0, 2)) for stage in range(3)}) == 3


# measurement


def test_measured_costs_are_times():
    """Of each kind of layer once: layers of one kind cost the same."""
    found = measured_costs(run(), torch.device("cpu"))
    assert len(found.layers) == 5
    assert all(math.isfinite(cost) and cost > 0 for cost in found.layers)
    assert found.layers[0] == found.layers[2]
    assert found.layers[3] == found.layers[4]
    assert len(set(found.layers)) == 3
    assert found.embedding == 0
    assert math.isfinite(found.head)
    assert found.head >= 0


RISING = {"kind": "melodi", "form": "rising", "summaries": 20}


@pytest.mark.parametrize(
    ("mixer", "architecture"),
    [(ATTENTION, {"kind": "recurrent_memory", "memory_tokens": 3}), (RISING, {"kind": "decoder"})],
    ids=["recurrent memory", "rising summaries"],
)
def test_measured_layers_are_the_models_own_and_read_all_rows(monkeypatch, mixer, architecture):
    """Each is built as it stands in the model, and gets a chunk with the rows around it."""
    config = run(model={"memory": [], "mixer": mixer, "architecture": architecture})
    built, read = [], []

    def build(model, linears, layers):
        stage = build_stage(model, linears, layers)
        built.append((layers.start, [name for name, _ in stage.layers.named_parameters()]))
        read_chunk = stage.read_chunk
        stage.read_chunk = lambda x, *rest: read.append(x.shape[0]) or read_chunk(x, *rest)
        return stage

    monkeypatch.setattr(costs, "build_stage", build)
    found = measured_costs(config, torch.device("cpu"))
    assert all(math.isfinite(cost) and cost > 0 for cost in found.layers)
    assert set(read) == {config.model.rows_per_chunk}
    whole = [name for name, _ in build_stage(config.model, PlainLinears()).layers.named_parameters()]
    for layer, names in built:
        assert names == [name for name in whole if name.startswith(f"{layer}.")]


@pytest.mark.parametrize(("with_head", "head"), [(25.0, 22.0), (2.0, 0.0)])
def test_the_head_is_what_it_adds_to_the_last_layer(monkeypatch, with_head, head):
    """A clock may say that head and layer together take less than the layer; a cost is never negative."""
    measured = []

    def measure(config, device, layer, *, with_head):
        measured.append((layer, with_head))
        return {0: 1.0, 1: 2.0, 3: 3.0}[layer] if not with_head else answer

    answer = with_head
    monkeypatch.setattr(costs, "_measure", measure)
    found = measured_costs(run(), torch.device("cpu"))
    assert found == PartCosts((1.0, 2.0, 1.0, 3.0, 3.0), 0.0, head)
    assert sorted(measured) == [(0, False), (1, False), (3, False), (4, True)]


# place


def test_a_list_is_taken_as_it_is():
    assert place(run(parallel={"placement": [1, 1, 3]})) == [1, 1, 3]


def test_by_operations_and_by_parameters():
    """A vocabulary of 1,024: its head weighs on the last stage, its embedding on the first, but only as parameters."""
    shape = {"vocab_size": 1024, "layers": 8, "memory": []}
    by_flops, by_parameters = (place(run(model=shape, parallel={"placement": how})) for how in ("flops", "parameters"))
    config = model(**shape)
    assert by_flops == place_by(flop_costs(config, 4 * CHUNK), 3)
    assert by_parameters == place_by(parameter_costs(config), 3)
    assert by_flops == [3, 3, 2]
    assert by_parameters == [2, 4, 2]
    assert place(run(model=shape)) == by_flops


def test_without_processes_a_measurement_is_replaced_by_operations():
    assert place(run(parallel={"placement": "measured"})) == place(run())


def test_one_rank_measures_for_all(monkeypatch):
    """Ranks that measured for themselves would disagree about who holds a layer."""
    sent = []
    monkeypatch.setattr(costs, "measured_costs", lambda config, device: PartCosts((1, 1, 1, 9, 9), 0, 0))
    monkeypatch.setattr(costs.dist, "broadcast", lambda tensor, src: sent.append(tensor.clone()))
    config = run(parallel={"placement": "measured"})
    assert place(config, SimpleNamespace(rank=0, device=torch.device("cpu"))) == [3, 1, 1]
    assert sent[0].tolist() == [3, 1, 1]

    def receive(tensor, src):
        assert src == 0
        tensor.copy_(sent[0])

    monkeypatch.setattr(costs, "measured_costs", lambda config, device: pytest.fail("measured twice"))
    monkeypatch.setattr(costs.dist, "broadcast", receive)
    assert place(config, SimpleNamespace(rank=1, device=torch.device("cpu"))) == [3, 1, 1]


def test_a_run_that_goes_on_is_not_measured_again():
    saved = SimpleNamespace(run=lambda: {"placement": [3, 2]})
    measured = run(parallel={"placement": "measured", "pp": 2})
    assert placed_as_before(measured, saved).parallel.placement == (3, 2)
    assert placed_as_before(measured, None) == measured
    on_three = run(parallel={"placement": "measured", "pp": 3})
    assert placed_as_before(on_three, saved) == on_three, "other stages are measured anew"
    counted = run(parallel={"placement": "flops", "pp": 2})
    assert placed_as_before(counted, saved) == counted
