"""The simulator against longest paths and sums done by hand, and the formulas of schedules against the simulator.

Costs are whole numbers throughout, so that times are exact and compared without tolerance.
"""

import itertools
import json
import random
from graphlib import CycleError, TopologicalSorter

import pytest

from megamem.pipeline.schedule import Action, bubble, chunk_schedule, forward_order, groups_of, peak_units
from megamem.pipeline.simulate import DeadlockError, Timeline, chunk_cost, even_cost, simulate

CHUNKS = (1, 2, 4, 8, 16)
WINDOWS = [(chunks, bptt) for chunks in CHUNKS for bptt in range(1, chunks + 1) if chunks % bptt == 0]


def forward(sequence, chunk):
    return Action("forward", sequence, chunk)


def backward(sequence, chunk):
    return Action("backward", sequence, chunk)


def times(timeline, stage):
    """(action in short, start, end) of a stage, first to last."""
    events = sorted((event for event in timeline.events if event.stage == stage), key=lambda event: event.start)
    return [(f"{e.action.kind[0]}{e.action.micro_batch}{e.action.chunk}", e.start, e.end) for e in events]


# formulas


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("sequences", [1, 2, 3, 8])
def test_formulas_equal_the_simulator(stages, sequences):
    for chunks, bptt in WINDOWS:
        timeline = simulate(chunk_schedule(stages, sequences, chunks, bptt), bptt)
        assert timeline.bubble == bubble(stages, sequences, chunks), (chunks, bptt)
        assert timeline.makespan == 3 * (sequences * chunks + stages - 1), (chunks, bptt)
        for stage in range(stages):
            found, formula = timeline.peak_units(stage), peak_units(stage, stages, sequences, chunks, bptt)
            assert found == formula, (chunks, bptt, stage)


@pytest.mark.parametrize("cost", [even_cost(1, 1), even_cost(3, 1), even_cost(2, 7)])
def test_the_bubble_does_not_depend_on_what_a_backward_costs(cost):
    for stages, sequences, (chunks, bptt) in itertools.product((2, 5), (1, 3), WINDOWS):
        timeline = simulate(chunk_schedule(stages, sequences, chunks, bptt), bptt, cost)
        assert timeline.bubble == bubble(stages, sequences, chunks), (stages, sequences, chunks, bptt)


@pytest.mark.parametrize(("stages", "sequences"), itertools.product((1, 2, 4, 8), (1, 2, 4, 16)))
def test_one_chunk_per_sequence_is_1f1b(stages, sequences):
    """Narayanan et al. 2019 and 2021: (M + P - 1) (f + b) in all, bubble (P - 1) / M, min(P - p, M) activations."""
    timeline = simulate(chunk_schedule(stages, sequences, 1, 1), 1, even_cost(2, 5))
    assert timeline.makespan == (sequences + stages - 1) * 7
    assert timeline.bubble == (stages - 1) / sequences
    assert [timeline.peak_units(stage) for stage in range(stages)] == [
        min(stages - stage, sequences) for stage in range(stages)
    ]


def test_the_example_of_the_design():
    """8 stages, 8 sequences of 16 chunks."""
    whole_sequences = simulate(chunk_schedule(8, 8, 1, 1), 1, even_cost(16, 32))
    full, single = (simulate(chunk_schedule(8, 8, 16, bptt), bptt) for bptt in (16, 1))
    assert full.bubble == single.bubble == 0.0546875
    assert whole_sequences.bubble == 0.875
    assert (full.makespan, whole_sequences.makespan) == (405, 720)
    assert (full.peak_units(0), single.peak_units(0), 16 * whole_sequences.peak_units(0)) == (23, 8, 128)


# timelines by hand


def test_a_full_window_by_hand():
    timeline = simulate(chunk_schedule(2, 1, 2, 2), 2)
    assert times(timeline, 0) == [("f00", 0, 1), ("f01", 1, 2), ("b01", 5, 7), ("b00", 7, 9)]
    assert times(timeline, 1) == [("f00", 1, 2), ("f01", 2, 3), ("b01", 3, 5), ("b00", 5, 7)]
    assert (timeline.makespan, timeline.busy(0), timeline.busy(1), timeline.bubble) == (9, 6, 6, 0.5)


def test_windows_of_one_chunk_by_hand():
    timeline = simulate(chunk_schedule(2, 2, 2, 1), 1)
    assert times(timeline, 0) == [
        ("f00", 0, 1), ("f01", 1, 2), ("b00", 4, 6), ("f10", 6, 7), ("b01", 7, 9), ("f11", 9, 10), ("b10", 10, 12),
        ("b11", 13, 15),
    ]  # fmt: skip
    assert times(timeline, 1) == [
        ("f00", 1, 2), ("b00", 2, 4), ("f01", 4, 5), ("b01", 5, 7), ("f10", 7, 8), ("b10", 8, 10), ("f11", 10, 11),
        ("b11", 11, 13),
    ]  # fmt: skip


def test_what_crosses_a_border_takes_its_time():
    timeline = simulate(chunk_schedule(2, 2, 1, 1), 1, transfer=0.5)
    assert times(timeline, 0) == [("f00", 0, 1), ("f10", 1, 2), ("b00", 5, 7), ("b10", 8, 10)]
    assert times(timeline, 1) == [("f00", 1.5, 2.5), ("b00", 2.5, 4.5), ("f10", 4.5, 5.5), ("b10", 5.5, 7.5)]


def test_memory_and_its_gradient_cross_no_border():
    orders = chunk_schedule(1, 2, 4, 2)
    assert simulate(orders, 2, transfer=100) == simulate(orders, 2)


def test_an_evaluation_has_no_backwards():
    timeline = simulate([forward_order(groups_of(2, 1, False), 3)] * 4, 1)
    assert timeline.makespan == 2 * 3 + 4 - 1
    assert {event.action.kind for event in timeline.events} == {"forward"}


def test_unequal_stages_idle_for_each_other():
    def cost(stage, action):
        return (1, 3)[stage] * (1 if action.kind == "forward" else 2)

    timeline = simulate(chunk_schedule(2, 1, 1, 1), 1, cost)
    # down the stages 1 + 3, back up 6 + 2; of these 12 the first stage works 3 and the second 9
    assert (timeline.makespan, timeline.busy(0), timeline.busy(1)) == (12, 3, 9)
    assert timeline.bubble == (9 + 3) / (3 + 9)


def test_an_uneven_split_costs_what_the_slowest_stage_takes():
    """The same work, shared evenly by four stages or not: the slowest sets the pace of all."""

    def makespan(shares):
        def cost(stage, action):
            return shares[stage] * (1 if action.kind == "forward" else 2)

        return simulate(chunk_schedule(4, 4, 4, 1), 1, cost).makespan

    assert makespan((4, 4, 4, 4)) == 3 * 4 * (16 + 3)
    # 16 units on the slow stage, and one unit each through the others before and behind it
    assert makespan((2, 2, 2, 10)) == 3 * (16 * 10 + 3 * 2)


@pytest.mark.parametrize("bptt", [1, 2, 4])
def test_chunks_that_grow_make_the_bubble_larger(bptt):
    """Attention to all that came before: a later chunk takes longer, and its neighbours wait."""
    orders = chunk_schedule(4, 4, 4, bptt)
    bubbles = []
    for slope in (0, 1, 2, 4):
        forwards = [4 + slope * chunk for chunk in range(4)]
        bubbles.append(simulate(orders, bptt, chunk_cost(forwards, [2 * f for f in forwards])).bubble)
    assert bubbles[0] == bubble(4, 4, 4)
    assert bubbles == sorted(set(bubbles))


def test_chunk_costs_are_taken_by_kind_and_chunk():
    timeline = simulate(chunk_schedule(1, 2, 3, 3), 3, chunk_cost([1, 2, 4], [8, 16, 32]))
    spans = {f"{e.action.kind[0]}{e.action.chunk}": e.end - e.start for e in timeline.events}
    assert spans == {"f0": 1, "f1": 2, "f2": 4, "b0": 8, "b1": 16, "b2": 32}
    assert timeline.busy(0) == timeline.makespan == 2 * 63
    assert timeline.bubble == 0


# earliest starts


def graph(orders, bptt, transfer):
    """For each (stage, action): what it waits for, with the delay. Written down apart from the simulator."""
    needs = {}
    for stage, order in enumerate(orders):
        for index, action in enumerate(order):
            s, c, waits = action.micro_batch, action.chunk, {}
            if index:
                waits[stage, order[index - 1]] = 0
            if action.kind == "forward":
                waits |= {(stage, forward(s, c - 1)): 0} if c else {}
                waits |= {(stage - 1, action): transfer} if stage else {}
            else:
                waits[stage, forward(s, c)] = 0
                waits |= {(stage, backward(s, c + 1)): 0} if (c + 1) // bptt == c // bptt else {}
                waits |= {(stage + 1, action): transfer} if stage + 1 < len(orders) else {}
            needs[stage, action] = waits
    return needs


@pytest.mark.parametrize("seed", range(20))
def test_starts_are_the_longest_paths(seed):
    """No execution of the same orders is faster: each action starts as soon as the longest chain before it is done."""
    draw = random.Random(seed)
    stages, sequences, transfer = draw.randint(1, 5), draw.randint(1, 4), draw.randint(0, 3)
    chunks, bptt = draw.choice([(1, 1), (2, 2), (4, 1), (4, 2), (4, 4), (6, 3)])
    orders = chunk_schedule(stages, sequences, chunks, bptt)
    costs = {(stage, action): draw.randint(1, 9) for stage, order in enumerate(orders) for action in order}
    needs = graph(orders, bptt, transfer)
    starts = {}
    for node in TopologicalSorter(needs).static_order():
        starts[node] = max((starts[need] + costs[need] + delay for need, delay in needs[node].items()), default=0)
    timeline = simulate(orders, bptt, lambda stage, action: costs[stage, action], transfer)
    assert {(event.stage, event.action): event.start for event in timeline.events} == starts
    assert all(event.end - event.start == costs[event.stage, event.action] for event in timeline.events)
    assert timeline.makespan == max(starts[node] + costs[node] for node in starts)
    assert [timeline.busy(p) for p in range(stages)] == [sum(costs[p, a] for a in orders[p]) for p in range(stages)]


@pytest.mark.parametrize("seed", range(10))
def test_peak_is_the_most_that_is_held_at_any_start(seed):
    draw = random.Random(seed)
    chunks, bptt = draw.choice([(4, 2), (4, 4), (6, 3)])
    orders = chunk_schedule(4, 3, chunks, bptt)
    costs = {(stage, action): draw.randint(1, 9) for stage, order in enumerate(orders) for action in order}
    timeline = simulate(orders, bptt, lambda stage, action: costs[stage, action])
    for stage in range(4):
        own = {event.action: event for event in timeline.events if event.stage == stage}
        held = [
            (event.start, own[backward(action.micro_batch, action.chunk)].end)
            for action, event in own.items()
            if action.kind == "forward"
        ]
        assert timeline.peak_units(stage) == max(sum(a <= begin < b for a, b in held) for begin, _ in held)


# orders that cannot run


def test_exactly_the_orders_without_a_cycle_can_run():
    """All 24 x 24 orders of one window of two chunks on two stages."""
    actions = [forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)]
    possible = 0
    for orders in itertools.product(itertools.permutations(actions), repeat=2):
        try:
            TopologicalSorter(graph(orders, 2, 0)).prepare()
        except CycleError:
            with pytest.raises(DeadlockError):
                simulate(orders, 2)
        else:
            assert len(simulate(orders, 2).events) == 8
            possible += 1
    # memory forces forward 0, forward 1, backward 1, backward 0 on every stage
    assert possible == 1


GOOD = [forward(0, 0), backward(0, 0)]
IMPOSSIBLE = {
    "chunks swapped": (
        [[forward(0, 1), forward(0, 0)]],
        ["stage 0 at forward of micro-batch 0, chunk 1"],
    ),
    "missing below": (
        [[forward(0, 0)], [forward(0, 0), forward(0, 1)]],
        ["stage 1 at forward of micro-batch 0, chunk 1"],
    ),
    "missing above": (
        [GOOD, [forward(0, 0)]],
        ["stage 0 at backward of micro-batch 0, chunk 0"],
    ),
    "backward before forward": (
        [GOOD, GOOD[::-1]],
        ["stage 0 at backward of micro-batch 0, chunk 0", "stage 1 at backward of micro-batch 0, chunk 0"],
    ),
    "each waits for the other": (
        [
            [forward(0, 0), backward(0, 0), forward(1, 0), backward(1, 0)],
            [forward(0, 0), forward(1, 0), backward(0, 0), backward(1, 0)],
        ],
        ["stage 0 at backward of micro-batch 0, chunk 0", "stage 1 at forward of micro-batch 1, chunk 0"],
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_deadlock_names_what_each_stage_waits_for(case):
    orders, stuck = IMPOSSIBLE[case]
    with pytest.raises(DeadlockError) as caught:
        simulate(orders, 1)
    assert str(caught.value) == f"the schedule cannot be carried out: {', '.join(stuck)} wait for what never comes"


def test_a_schedule_for_shorter_windows_cannot_run_longer_ones():
    """The first backward waits for the gradient of a chunk that the last stage has not even seen."""
    with pytest.raises(DeadlockError, match=r"stage 1 at backward of micro-batch 0, chunk 0 wait"):
        simulate(chunk_schedule(2, 1, 2, 1), 2)


def test_timelines_survive_json():
    timeline = simulate(chunk_schedule(3, 2, 4, 2), 2, even_cost(1.25, 2.5), transfer=0.1)
    text = json.dumps(timeline.to_dict())
    again = Timeline.from_dict(json.loads(text))
    assert again == timeline
    assert len(again.events) == 3 * 2 * 2 * 4
    assert json.dumps(again.to_dict()) == text
