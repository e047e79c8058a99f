"""Micro-batches that take turns, since a memory goes from the last stage to the first: orders, times and what is held.

Costs are whole numbers, so that times are exact and compared without tolerance.
"""

import itertools
import random
from graphlib import TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.pipeline.schedule import (
    Action,
    backward_order,
    bubble,
    chunk_schedule,
    forward_order,
    groups_of,
    peak_units,
)
from megamem.pipeline.simulate import even_cost, simulate

WINDOWS = [(chunks, bptt) for chunks in (1, 2, 3, 4, 6, 8) for bptt in range(1, chunks + 1) if chunks % bptt == 0]


def schedule(stages, micro_batches, chunks, bptt):
    return chunk_schedule(stages, micro_batches, chunks, bptt, interleaved=True)


def played(stages, micro_batches, chunks, bptt, cost=None, transfer=0.0):
    """The schedule as it runs; raises DeadlockError if it cannot."""
    return simulate(schedule(stages, micro_batches, chunks, bptt), bptt, cost, transfer, last_to_first=True)


def short(actions):
    return " ".join(f"{action.kind[0]}{action.micro_batch}{action.chunk}" for action in actions)


# groups


@pytest.mark.parametrize(
    ("micro_batches", "stages", "sizes"),
    [(1, 4, [1]), (3, 4, [3]), (4, 4, [4]), (7, 4, [7]), (8, 4, [4, 4]), (9, 4, [5, 4]), (11, 3, [4, 4, 3])],
)
def test_groups_by_hand(micro_batches, stages, sizes):
    assert [len(group) for group in groups_of(micro_batches, stages, interleaved=True)] == sizes


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 12))
def test_groups_are_the_smallest_that_keep_all_stages_busy(micro_batches, stages):
    groups = groups_of(micro_batches, stages, interleaved=True)
    sizes = [len(group) for group in groups]
    assert [m for group in groups for m in group] == list(range(micro_batches))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(stages, micro_batches)
    # one group more would be too many: some would be smaller than the pipeline is long
    assert micro_batches < (len(groups) + 1) * stages


# orders


def test_orders_by_hand():
    groups = groups_of(5, 2, interleaved=True)
    assert short(forward_order(groups, 2)) == "f00 f10 f20 f01 f11 f21 f30 f40 f31 f41"
    assert short(backward_order(groups, 2, 2)) == "b01 b11 b21 b00 b10 b20 b31 b41 b30 b40"
    assert short(backward_order(groups, 2, 1)) == "b00 b10 b20 b01 b11 b21 b30 b40 b31 b41"


def test_a_schedule_by_hand():
    first, last = schedule(2, 2, 2, 2)
    assert short(first) == "f00 f10 f01 f11 b01 b11 b00 b10"
    assert short(last) == "f00 f10 f01 b01 f11 b11 b00 b10"


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from(WINDOWS))
def test_every_stage_runs_every_unit_once_each_way_in_one_order(stages, micro_batches, window):
    groups, (chunks, bptt) = groups_of(micro_batches, stages, interleaved=True), window
    forwards, backwards = forward_order(groups, chunks), backward_order(groups, chunks, bptt)
    units = set(itertools.product(range(micro_batches), range(chunks)))
    for order in (forwards, backwards):
        assert len(order) == len(units)
        assert {(action.micro_batch, action.chunk) for action in order} == units
    for order in schedule(stages, micro_batches, chunks, bptt):
        assert [action for action in order if action.kind == "forward"] == forwards
        assert [action for action in order if action.kind == "backward"] == backwards


# times


@pytest.mark.parametrize("stages", range(1, 7))
def test_enough_micro_batches_hide_the_way_back(stages):
    for more, (chunks, bptt) in itertools.product(range(5), WINDOWS):
        timeline = played(stages, stages + more, chunks, bptt)
        assert timeline.bubble == bubble(stages, stages + more, chunks), (more, chunks, bptt)
        assert timeline.makespan == 3 * ((stages + more) * chunks + stages - 1), (more, chunks, bptt)


@pytest.mark.parametrize("stages", range(2, 9))
def test_few_micro_batches_wait_but_not_for_ever(stages):
    """Stages that ran all their forwards ahead waited for each other for ever: 4 of them with one micro-batch."""
    for micro_batches, (chunks, bptt) in itertools.product(range(1, stages), WINDOWS):
        timeline = played(stages, micro_batches, chunks, bptt)
        assert len(timeline.events) == 2 * stages * micro_batches * chunks
        if (
            bptt == chunks
        ):  # one micro-batch goes through all stages in every chunk, the others follow it through the last
            assert timeline.makespan == 3 * (stages * chunks + micro_batches - 1), (micro_batches, chunks)
        assert timeline.bubble >= bubble(stages, micro_batches, chunks), (micro_batches, chunks, bptt)


def test_the_example_of_the_documentation():
    """docs/pipeline.md: four stages, two micro-batches of eight chunks."""
    timeline = played(4, 2, 8, 8)
    assert (round(timeline.bubble, 2), round(bubble(4, 2, 8), 2)) == (1.06, 0.19)


def test_the_way_back_takes_time_both_ways():
    """Two stages, one micro-batch of two chunks: three borders each way, the memory's among them."""
    timeline = played(2, 1, 2, 2, transfer=10)
    events = sorted(timeline.events, key=lambda event: event.start)
    assert [(event.stage, short([event.action]), event.start) for event in events] == [
        (0, "f00", 0), (1, "f00", 11), (0, "f01", 22), (1, "f01", 33),
        (1, "b01", 34), (0, "b01", 46), (1, "b00", 58), (0, "b00", 70),
    ]  # fmt: skip
    assert timeline.makespan == 72
    aside = simulate(schedule(2, 1, 2, 2), 2, transfer=10)
    assert aside.makespan < timeline.makespan, "a memory of layers goes no such way"


def waits(orders, bptt, transfer):
    """For each (stage, action): what it waits for, with the delay. Written down apart from the simulator."""
    last = len(orders) - 1
    needs = {}
    for stage, order in enumerate(orders):
        for before, action in zip([None, *order], order, strict=False):
            m, c = action.micro_batch, action.chunk
            found = {} if before is None else {(stage, before): 0}
            if action.kind == "forward":
                found |= {(stage, Action("forward", m, c - 1)): 0} if c else {}
                found |= {(stage - 1, action): transfer} if stage else {}
                found |= {(last, Action("forward", m, c - 1)): transfer} if c and not stage else {}
            else:
                inside = (c + 1) // bptt == c // bptt
                found |= {(stage, Action("forward", m, c)): 0}
                found |= {(stage, Action("backward", m, c + 1)): 0} if inside else {}
                found |= {(stage + 1, action): transfer} if stage < last else {}
                found |= {(0, Action("backward", m, c + 1)): transfer} if inside and stage == last else {}
            needs[stage, action] = found
    return needs


@pytest.mark.parametrize("seed", range(20))
def test_starts_are_the_longest_paths(seed):
    draw = random.Random(seed)
    stages, micro_batches, transfer = draw.randint(2, 5), draw.randint(1, 6), draw.randint(0, 3)
    chunks, bptt = draw.choice(WINDOWS)
    orders = schedule(stages, micro_batches, chunks, bptt)
    costs = {(stage, action): draw.randint(1, 9) for stage, order in enumerate(orders) for action in order}
    needs = waits(orders, bptt, transfer)
    starts = {}
    for node in TopologicalSorter(needs).static_order():
        starts[node] = max((starts[need] + costs[need] + delay for need, delay in needs[node].items()), default=0)
    timeline = played(stages, micro_batches, chunks, bptt, lambda stage, action: costs[stage, action], transfer)
    assert {(event.stage, event.action): event.start for event in timeline.events} == starts


# what is held


@pytest.mark.parametrize("stages", range(1, 9))
def test_most_units_held_are_those_of_the_formula(stages):
    for micro_batches, (chunks, bptt) in itertools.product(range(1, 10), WINDOWS):
        timeline = played(stages, micro_batches, chunks, bptt, even_cost(1, 3))
        found = [timeline.peak_units(stage) for stage in range(stages)]
        sizes = (stages, micro_batches, chunks, bptt)
        assert found == [peak_units(stage, *sizes, interleaved=True) for stage in range(stages)], sizes
        if micro_batches >= stages:  # docs/pipeline.md
            group = len(groups_of(micro_batches, stages, interleaved=True)[0])
            units = micro_batches * chunks
            assert found == [min(stages - stage + (bptt - 1) * group, units) for stage in range(stages)], sizes
