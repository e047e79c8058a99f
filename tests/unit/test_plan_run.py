"""Whole plans: bytes, traffic, time, and the search for a layout."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.config.load import load_config
from megamem.config.run import RunConfig
from megamem.costs.flops import flops_per_token
from megamem.costs.parameters import parameter_counts
from megamem.costs.state_bytes import model_state_bytes, split_state_bytes
from megamem.errors import ConfigError, LayoutError, MegamemError
from megamem.pipeline.balancing import place
from megamem.pipeline.schedule import chunk_schedule
from megamem.pipeline.simulate import even_cost, simulate
from megamem.planning.activations import Activations
from megamem.planning.machines import ACHIEVED, machine
from megamem.planning.plan import data_parallel, make_plan
from megamem.planning.roofline import Rates
from megamem.planning.search import Search
from megamem.planning.step_time import Layout, StageWork, step_time
from megamem.planning.traffic import StageParameters, traffic
from tests.unit.shipped import model_file, shipped

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "recipes"
BOOKS = CONFIGS / "books.yaml"
H100 = machine("h100", 8)
ARITHMETIC = H100.model_copy(
    update={
        "latency": 0.0,
        "reached": Rates(
            matmul={"fp32": 5e13, "bf16": 5e13, "tf32": 5e13}, attention=5e13, attention_backward=5e13,
            memory=1e30, kernel=0, launch=0,
        )
    }
)  # fmt: skip
"""A device on which nothing takes time but products of matrices, and the bytes that go between devices."""


def books(*overrides: str) -> RunConfig:
    return load_config(RunConfig, BOOKS, ["parallel.tp=1", "training.batch_tokens=65536", *overrides])


def plan(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *(str(argument) for argument in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_plan_as_json():
    found = json.loads(
        plan(BOOKS, "parallel.tp=1", "training.batch_tokens=65536", "--devices", 1, "--device", "cpu", "--json")
    )
    config = books()
    assert found["parameters"] == parameter_counts(config.model)
    assert found["flops_per_token"] == flops_per_token(config.model, config.data.sequence_length)
    assert found["devices"] == found["layout"]["dp"] == 1
    (rank,) = found["ranks"]
    parts = ("weights", "optimizer", "gradients", "in_flight", "working", "states", "borders", "gathered")
    assert rank["total"] == pytest.approx(sum(rank[part] for part in parts), abs=len(parts))
    assert rank["weights"] == rank["parameters"] * 4
    assert found["no_recompute" if config.training.recompute else "recompute"][0]["total"] < rank["total"]
    seconds = found["step_seconds"]
    assert seconds["total"] == pytest.approx(sum(value for name, value in seconds.items() if name != "total"))
    assert found["days"] == pytest.approx(config.steps * seconds["total"] / 86_400)
    assert found["tokens_per_second"] == pytest.approx(config.training.batch_tokens / seconds["total"])
    assert found["checkpoint"]["bytes"] == 12 * parameter_counts(config.model)["total"]


def test_a_plan_in_words():
    text = plan(BOOKS, "parallel.pp=2", "--device", "a100")
    assert "stage 1" in text
    assert "sequences of 2,048" in text
    assert "fits: the fullest rank takes" in text
    assert "tokens/s, MFU" in text


def test_recomputation_and_short_windows_take_less():
    """Of the same run; the time of recomputation is a forward more."""
    config = books()
    whole = make_plan(config, 1, H100)
    again = make_plan(books("training.recompute=true"), 1, H100)
    short = make_plan(books("training.bptt_chunks=2"), 1, H100)
    assert again.total == pytest.approx(whole.switched_ranks[0].total)
    assert again.total < short.total < whole.total
    # memories have 1-gradient products
    assert again.time.compute.total == pytest.approx(whole.time.compute.total * 4 / 3, rel=0.05)


def test_compute_is_flops_over_the_rate_of_the_device():
    """Operations that the layers run, against the formulas; attention's backward computes the scores once more."""
    config = books()
    seconds = make_plan(config, 2, ARITHMETIC).time
    flops = flops_per_token(config.model, config.data.sequence_length)["training"] * config.training.batch_tokens / 2
    assert seconds.compute.total == pytest.approx(flops / 5e13, rel=0.05)
    assert seconds.tensor == 0.0
    assert seconds.bubble == 0.0
    gradients = 4 * parameter_counts(config.model)["total"]
    # ZeRO 1 over two ranks: half of the gradients summed on each, FP32 weights gathered
    assert seconds.data == pytest.approx((gradients / 2 + gradients / 2) / (ACHIEVED * 450e9))


@pytest.mark.parametrize(("recompute", "sums"), [("false", 2 + 2), ("true", 2 + 3), ("mixer", 2 + 2), ("mlp", 2 + 2)])
def test_two_ranks_share_the_work_and_sum_around_it(recompute, sums):
    """Tensor parallelism by hand: half of the operations each; two sums forward in each of 4 layers and two backward,
    of which recomputation of layers repeats the first, one for the embedding and one for the head. Recomputation of a
    part ends at what its last product reads."""
    local = ("parallel.tp=2", "model.memory=[]", "model.mixer=local_attention")
    config = books(*local, f"training.recompute={recompute}")
    assert config.model.layers == 4
    seconds = make_plan(config, 1, ARITHMETIC).time
    plain = make_plan(books(*local, "training.recompute=false"), 1, ARITHMETIC).time
    flops = flops_per_token(config.model, config.data.sequence_length)["training"]
    assert plain.compute.total == pytest.approx(flops * config.training.batch_tokens / 2 / 5e13, rel=0.05)
    assert seconds.compute.total <= plain.compute.total * 4 / 3, "a forward more, and no sum among the operations"
    summed = config.training.batch_tokens * config.model.hidden_size * 4  # bytes of a step's hidden chunks, FP32
    # a ring of two: each rank sends half of the bytes twice
    all_sums = 4 * sums + 2
    assert seconds.tensor == pytest.approx(all_sums * (2 * summed / 2) / (ACHIEVED * 450e9))
    assert seconds.bubble == 0.0
    # where a sequence is split, what is computed again gathers its tokens first: half of a sum for each part
    split = books(*local, f"training.recompute={recompute}", "parallel.sequence_parallel=true")
    gathers = 0 if recompute == "false" else 2
    assert make_plan(split, 1, ARITHMETIC).time.tensor == pytest.approx(
        seconds.tensor * (all_sums + gathers) / all_sums
    )


def test_each_sum_and_each_transfer_has_a_latency():
    """Beside its bytes: two sums a layer in each direction of each chunk, the embedding's and the head's; transfers."""
    late = ARITHMETIC.model_copy(update={"latency": 1.0})
    local = ("model.memory=[]", "model.mixer=local_attention")
    config = books("parallel.tp=2", *local)
    chunks = config.training.batch_tokens // config.model.chunk_size // config.training.micro_batch_size
    sums = (4 * config.model.layers + 2) * chunks
    times = [make_plan(config, 1, machine).time.tensor for machine in (ARITHMETIC, late)]
    assert times[1] - times[0] == pytest.approx(sums)
    piped = books("parallel.pp=2", *local)
    early, slow = (make_plan(piped, 1, machine).time.bubble for machine in (ARITHMETIC, late))
    assert slow - early >= 2  # there and back at least once


def test_stages_wait_for_each_others_sums_too():
    """Where sums take nearly all of the time, the schedule is that of sums: two layers on each of two stages, the
    embedding's sum forward on the first, the head's backward on the last. Transfers go between nodes."""
    slow = ARITHMETIC.model_copy(update={"link": 1e6, "per_node": 2})
    local = ("model.memory=[]", "model.mixer=local_attention")
    config = books("parallel.tp=2", "parallel.pp=2", "parallel.placement=[2, 2]", *local)
    seconds = make_plan(config, 1, slow).time
    sequences = config.training.batch_tokens // config.data.sequence_length // config.training.micro_batch_size
    assert seconds.tensor > 1000 * seconds.compute.total
    made = {(0, "forward"): 5, (0, "backward"): 4, (1, "forward"): 4, (1, "backward"): 5}
    orders = chunk_schedule(2, sequences, config.chunks, config.bptt_chunks)
    whole = simulate(orders, config.bptt_chunks, lambda stage, action: made[stage, action.kind])
    # but for the operations, which the output head makes a little more on the last stage
    assert seconds.bubble_share == pytest.approx(whole.makespan / (9 * sequences * config.chunks) - 1, rel=1e-2)


@pytest.mark.parametrize(("sequences", "window"), [(2, 8), (16, 8), (16, 2), (64, 4)])
def test_long_schedules_are_played_in_part(sequences, window):
    """The rest of a full pipeline takes what it takes its slowest stage; exact to a chunk's time."""
    overrides = ["parallel.pp=4", "parallel.dp=1", f"training.bptt_chunks={window}", "training.micro_batch_size=1"]
    config = books(*overrides, f"training.batch_tokens={sequences * 2048}", "data.sequence_length=2048")
    counts = tuple(place(config))
    layout = Layout(config, 1, counts)
    quiet = H100.model_copy(update={"link": 1e30, "network": 1e30, "latency": 0.0})
    work = StageWork(Activations.of_run(config), quiet.reached)
    found = step_time(layout, [StageParameters(0, 0)] * 4, quiet, work)
    whole = simulate(chunk_schedule(4, sequences, config.chunks, window), window, seconds_of(work.stages(layout)))
    together = found.compute.total + found.bubble
    assert together == pytest.approx(whole.makespan, rel=1 / (3 * sequences * config.chunks))


def seconds_of(passes):
    """Seconds of an action, of the times by stage and chunk."""
    return lambda stage, action: passes[stage][action.chunk][action.kind == "backward"].total


def test_long_uneven_schedules_with_transfers():
    """Chunks that cost more later on and slow links: a full pipeline's pace is still that of the whole schedule."""
    memory = "{kind: full_attention}"
    overrides = ["parallel.pp=4", "training.micro_batch_size=1", f"training.batch_tokens={32 * 4096}"]
    config = books(*overrides, "data.sequence_length=4096", "model.memory=[]", f"model.mixer={memory}")
    counts = tuple(place(config))
    slow = ARITHMETIC.model_copy(update={"link": 1e8, "network": 1e8})
    work = StageWork(Activations.of_run(config), slow.reached)
    layout = Layout(config, 1, counts)
    found = step_time(layout, [StageParameters(0, 0)] * 4, slow, work)
    transfer = config.model.chunk_size * 192 * 4 / (ACHIEVED * 1e8)
    orders = chunk_schedule(4, 32, config.chunks, config.bptt_chunks)
    whole = simulate(orders, config.bptt_chunks, seconds_of(work.stages(layout)), transfer)
    assert found.compute.total + found.bubble == pytest.approx(whole.makespan, rel=0.01)
    assert found.bubble > 0.1 * found.compute.total


def test_sums_between_nodes_use_all_cards_of_a_group():
    """Eight ranks of a node, eight cards; a group of every fourth rank has two of them."""
    assert H100.rate(8) == ACHIEVED * 450e9
    assert H100.rate(64) == ACHIEVED * 400e9
    assert H100.rate(16, apart=4) == ACHIEVED * 100e9
    assert H100.rate(8, apart=8) == ACHIEVED * 50e9
    assert H100.hop(2, 4) == ACHIEVED * 450e9
    assert H100.hop(4, 4) == ACHIEVED * 50e9


def test_zero3_gathers_as_often_as_deepspeed_lets_go():
    """Once a window while a model and a backward pass lie within 1e9 parameters, else for each chunk and pass."""
    config = books("parallel.zero_stage=3", "training.recompute=false", "training.micro_batch_size=1")
    windows = config.accumulation_steps(2)
    rows = config.model.rows_per_chunk
    small, large = (
        traffic(config, range(4), 0, StageParameters(count, count), 2, rows).data / count
        for count in (10**8, 2 * 10**9)
    )
    assert small == windows * (4 / 2 + 4 / 2)
    assert large == windows * (4 / 2 + 2 * config.bptt_chunks * 4 / 2)


def test_streams_carry_the_states_of_all_micro_batches():
    windows = make_plan(books(), 1, H100)
    streams = make_plan(books("data.feeding=streams", "data.documents=pad"), 1, H100)
    carried = streams.ranks[0].peak.states - windows.ranks[0].peak.states
    assert carried == (2 * books().accumulation_steps(1) + 1) * sum(windows.states.values())


def test_even_stages_idle_as_the_formula_says():
    """(P - 1) / (M C), of even chunks."""
    timeline = simulate(chunk_schedule(4, 8, 4, 2), 2, even_cost())
    assert timeline.bubble == pytest.approx(3 / 32)


def test_traffic_by_hand():
    """8 rows of 2,048 tokens, width 192, FP32: rings send twice (n - 1) / n of what is summed."""
    config = books("parallel.tp=2", "parallel.pp=2", "parallel.zero_stage=0", "training.recompute=false")
    rows = config.global_rows // 2
    hidden = rows * 2048 * 192 * 4
    first = traffic(config, range(2), 0, StageParameters(1_000, 1_000), 2, config.model.rows_per_chunk)
    assert first.tensor == (2 * 2 * 2 + 1) * 2 * hidden / 2  # two layers, two sums each way, the embedding's
    assert first.pipeline == hidden
    assert first.data == 2 * 4_000 / 2
    again = books("parallel.tp=2", "parallel.pp=2", "parallel.zero_stage=0", "training.recompute=true")
    # the first sum of each layer again
    repeated = traffic(again, range(2), 0, StageParameters(1_000, 1_000), 2, again.model.rows_per_chunk)
    assert repeated.tensor == (5 * 2 + 1) * 2 * hidden / 2


def test_rows_beside_the_tokens_travel_with_them():
    """2,048 tokens in chunks with 64 summary rows each: through layers and over the border, not into the embedding."""
    layout = ("parallel.tp=2", "parallel.pp=2", "parallel.zero_stage=0", "training.recompute=false")
    config = books(*layout, "model.memory=[]", "model.mixer={kind: melodi, form: rising, summaries: 64}")
    tokens = config.global_rows // 2 * 2048 * 192 * 4
    hidden = tokens * (config.model.chunk_size + 64) // config.model.chunk_size
    first = traffic(config, range(2), 0, StageParameters(1_000, 1_000), 2, config.model.rows_per_chunk)
    assert first.tensor == 2 * (2 * 2 * 2 * hidden + tokens) / 2
    assert first.pipeline == hidden


def test_states_are_split_into_fixed_and_banks():
    model = shipped("titans-grm-760m").model

    parts = split_state_bytes(model, 2, torch.float32, 1, 3)
    assert parts["banks"] > 0
    assert sum(parts.values()) == sum(model_state_bytes(model, 2, torch.float32, 1, 3 * model.chunk_size).values())


# search


def test_a_search_finds_the_best_that_fits():
    """Against all layouts looked at one by one."""
    config = books()
    small = H100.model_copy(update={"memory": 0.4e9, "reserve": 0.0, "per_node": 4})
    search = Search(config, 4, small)
    found = search.run(top=5)
    fits = []
    for layout in search.layouts():
        made = make_plan(layout.config, layout.dp_size, small, activations=search.activations)
        if made.total <= small.memory and layout.config.bptt_chunks == config.bptt_chunks:
            fits.append(made.time.total)
    assert found.best
    assert found.best[0].time.total == pytest.approx(min(fits))
    windows = sum(layout.config.bptt_chunks == config.bptt_chunks for layout in search.layouts())
    assert 0 < len(fits) < windows
    for candidate in found.best:
        assert candidate.total <= small.memory
        # what is printed can be trained so
        RunConfig.model_validate(candidate.layout.config.model_dump())


def test_configured_windows_come_first():
    found = Search(books(), 2, H100).run(top=100)
    windows = [candidate.layout.config.bptt_chunks for candidate in found.best]
    assert windows == sorted(windows, reverse=True)
    assert len(set(windows)) > 1


def test_if_nothing_fits_the_least_is_said():
    recipe = [CONFIGS / "memory_caching_1.3b.yaml", "--model", model_file("elastic-1.3b")]
    text = plan(*recipe, "data.sequence_length=2048", "--devices", 1, "--device", "h100", "--search",
                "training.batch_tokens=65536", "model.layers=200")  # fmt: skip
    assert "no layout of elastic-1.3b fits into 1 x H100" in text
    assert "least of 24: parallel.pp=1 parallel.tp=1" in text  # 6 micro-batches, four ways to recompute


def test_a_batch_that_does_not_divide():
    text = plan(BOOKS, "training.batch_tokens=2048", "training.micro_batch_size=1", "--devices", 56, "--search")
    assert "no layout: 1 sequences of a step (training.batch_tokens) on 56 devices" in text


def test_a_search_in_words():
    """The table's cells are those of the JSON; the line below can be typed."""
    arguments = (BOOKS, "training.batch_tokens=65536", "parallel.dp=null", "--devices", 4, "--search")
    found = json.loads(plan(*arguments, "--json"))
    text = plan(*arguments)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert len(lines) == len(found["layouts"]) == 10
    for cells, layout in zip(lines, found["layouts"], strict=True):
        assert layout["pp"] * layout["tp"] * layout["dp"] == 4
        names = ("pp", "tp", "dp", "zero_stage", "micro_batch_size", "bptt_chunks")
        assert cells[:6] == [str(layout[name]) for name in names]
        assert cells[6] == {True: "yes", False: "no"}.get(layout["recompute"], layout["recompute"])
        assert cells[7] == f"{layout['bytes'] / 2**30:.1f}"
        assert cells[8] == f"{layout['step_seconds']['total']:.3f}"
        assert float(cells[10]) == pytest.approx(layout["tokens_per_second"] / 1e6, rel=1e-3)
        assert layout["tokens_per_second"] == pytest.approx(65536 / layout["step_seconds"]["total"])
    words = text.replace("\n", " ")
    assert f"{found['possible']:,} layouts divide model and batch; bytes of {found['tried']} were looked at" in words
    overrides = re.search(r"the first: (.*)", words)[1].split()
    first = load_config(RunConfig, BOOKS, ["training.batch_tokens=65536", *overrides])
    best = found["layouts"][0]
    assert (first.parallel.pp, first.parallel.tp, first.parallel.dp) == (best["pp"], best["tp"], best["dp"])
    assert (first.training.recompute, first.bptt_chunks) == (best["recompute"], best["bptt_chunks"])


def test_a_checkpoint_of_streams_holds_their_states():
    """12 bytes for each parameter, and what every row of the batch remembers; written by each node's disk."""
    for overrides, devices, nodes in (((), 1, 1), (("training.micro_batch_size=1",), 16, 2)):
        config = books("data.feeding=streams", "data.documents=pad", *overrides)
        made = make_plan(config, devices, machine("h100", devices))
        states = model_state_bytes(config.model, config.global_rows, torch.float32, 1, config.data.sequence_length)
        size = 12 * parameter_counts(config.model)["total"] + sum(states.values())
        assert made.checkpoint == {"bytes": size, "seconds": pytest.approx(size / nodes / 2e9)}


# refusals


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((BOOKS, "--device", "tpu"), ConfigError, "--device 'tpu' is not known; one of h100, h200, a100, cpu"),
        ((BOOKS, "--search"), ConfigError, "--search needs --devices N"),
        ((BOOKS, "--devices", 3, "parallel.tp=2", "parallel.dp=null"), LayoutError, "give a multiple of 2 devices"),
        ((BOOKS, "--devices", 10), LayoutError, "5 data-parallel ranks"),
        ((BOOKS, "--stages", 2), ConfigError, "a whole plan goes with --devices"),
    ],
)
def test_refusals(arguments, kind, said):
    with pytest.raises(MegamemError) as caught:
        plan(*arguments)
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_devices_say_the_data_parallel_size():
    assert data_parallel(books("parallel.tp=2", "parallel.dp=null"), 8) == 4
    assert data_parallel(books("parallel.dp=2"), None) == 2
