"""The order of windows on one stage, and of forwards and backwards on all stages of a pipeline."""

import itertools
from collections import deque

import pytest

from megamem.pipeline.schedule import (
    Action,
    WindowPass,
    backward_order,
    chunk_schedule,
    forward_order,
    groups_of,
    stage_order,
    window_schedule,
)

SIZES = [(sequences, chunks, bptt) for sequences in (1, 3) for chunks in (1, 4, 6) for bptt in (1, 2, 3, chunks)]
VALID = sorted({size for size in SIZES if size[1] % size[2] == 0})
PIPELINES = [(stages, *size) for stages in (1, 2, 3, 8) for size in VALID]


def in_a_row(count):
    """Groups of micro-batches of which each is read to its end before the next."""
    return groups_of(count, 1, interleaved=False)


over_pipelines = pytest.mark.parametrize(("stages", "sequences", "chunks", "bptt"), PIPELINES)


@pytest.mark.parametrize(("sequences", "chunks", "bptt"), VALID)
def test_every_chunk_runs_once_in_order(sequences, chunks, bptt):
    passes = list(window_schedule(sequences, chunks, bptt))
    units = [(p.micro_batch, chunk) for p in passes for chunk in p.chunks]
    assert units == list(itertools.product(range(sequences), range(chunks)))
    assert all(len(p.chunks) == bptt for p in passes)
    assert len(passes) == sequences * chunks // bptt


@pytest.mark.parametrize(("sequences", "chunks", "bptt"), VALID)
def test_only_the_first_window_of_a_sequence_begins(sequences, chunks, bptt):
    begins = [(p.micro_batch, p.first) for p in window_schedule(sequences, chunks, bptt) if p.begins]
    assert begins == [(sequence, 0) for sequence in range(sequences)]


def test_a_window_is_inclusive():
    window = WindowPass(micro_batch=1, first=2, last=3)
    assert list(window.chunks) == [2, 3]
    assert not window.begins


@pytest.mark.parametrize(("chunks", "bptt"), [(4, 3), (2, 4), (5, 2)])
def test_windows_that_do_not_divide_are_refused(chunks, bptt):
    with pytest.raises(ValueError, match=f"bptt_chunks {bptt} does not divide {chunks} chunks"):
        list(window_schedule(1, chunks, bptt))


def of_kind(order, kind):
    return [(action.micro_batch, action.chunk) for action in order if action.kind == kind]


@over_pipelines
def test_every_stage_runs_every_unit_once_each_way(stages, sequences, chunks, bptt):
    units = set(itertools.product(range(sequences), range(chunks)))
    orders = chunk_schedule(stages, sequences, chunks, bptt)
    assert len(orders) == stages
    for order in orders:
        assert len(order) == 2 * len(units)
        assert set(of_kind(order, "forward")) == set(of_kind(order, "backward")) == units


@over_pipelines
def test_all_stages_agree_on_the_order_of_each_way(stages, sequences, chunks, bptt):
    """What crosses a border is not labelled: it must arrive in the order in which the other side asks for it."""
    windows = [range(first, first + bptt) for first in range(0, chunks, bptt)]
    forwards = list(itertools.product(range(sequences), range(chunks)))
    backwards = [(s, c) for s in range(sequences) for window in windows for c in reversed(window)]
    for order in chunk_schedule(stages, sequences, chunks, bptt):
        assert of_kind(order, "forward") == forwards
        assert of_kind(order, "backward") == backwards


@over_pipelines
def test_a_backward_follows_its_window_s_forwards(stages, sequences, chunks, bptt):
    """The gradient of a chunk includes what later chunks of its window read of its memory."""
    for order in chunk_schedule(stages, sequences, chunks, bptt):
        place = {action: index for index, action in enumerate(order)}
        for action in order:
            if action.kind == "backward":
                last = action.chunk // bptt * bptt + bptt - 1
                for chunk in range(action.chunk, last + 1):
                    assert place[Action("forward", action.micro_batch, chunk)] < place[action]


@over_pipelines
def test_forwards_warm_up_then_alternate_then_backwards_drain(stages, sequences, chunks, bptt):
    total = sequences * chunks
    for stage, order in enumerate(chunk_schedule(stages, sequences, chunks, bptt)):
        # a forward per stage that a unit has yet to pass, and the window's other chunks
        warm_up = min(stages - 1 - stage + bptt - 1, total)
        kinds = "".join(action.kind[0] for action in order)
        assert kinds == "f" * warm_up + "fb" * (total - warm_up) + "b" * warm_up


def carry_out(orders, bptt):
    """Run the orders as processes do, borders being queues without labels. Returns what is left of each order."""
    left = [deque(order) for order in orders]
    hidden = [deque() for _ in orders]  # in front of each stage: sent up by the stage below
    gradients = [deque() for _ in orders]  # sent down by the stage above
    done = [set() for _ in orders]
    last = len(orders) - 1
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(left):
            if not order:
                continue
            action = order[0]
            unit, forward = (action.micro_batch, action.chunk), action.kind == "forward"
            if stage != (0 if forward else last):
                inbox = (hidden if forward else gradients)[stage]
                if not inbox:
                    continue
                assert inbox.popleft() == unit, f"stage {stage} takes something else for its {action}"
            if forward:
                assert unit[1] == 0 or ("forward", unit[0], unit[1] - 1) in done[stage], "no memory yet"
            else:
                assert ("forward", *unit) in done[stage]
                closes_window = unit[1] % bptt == bptt - 1
                assert closes_window or ("backward", unit[0], unit[1] + 1) in done[stage], "no gradient of the memory"
            done[stage].add((action.kind, *unit))
            order.popleft()
            if forward and stage < last:
                hidden[stage + 1].append(unit)
            if not forward and stage > 0:
                gradients[stage - 1].append(unit)
            moved = True
    return [list(order) for order in left]


@over_pipelines
def test_orders_can_be_carried_out_over_unlabelled_channels(stages, sequences, chunks, bptt):
    """Independent of the simulator: nobody waits for ever, and everybody takes what he wanted."""
    orders = chunk_schedule(stages, sequences, chunks, bptt)
    assert carry_out(orders, bptt) == [[]] * stages


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_forwards_alone_are_an_evaluation(stages):
    order = forward_order(in_a_row(3), 4)
    assert of_kind(order, "forward") == list(itertools.product(range(3), range(4)))
    assert not of_kind(order, "backward")
    assert carry_out([order] * stages, 1) == [[]] * stages


def test_channels_notice_stages_that_disagree():
    """The check above can fail: one stage goes through the sequences in another order, or asks for too much."""
    above = [Action("forward", 1, 0), Action("forward", 0, 0)]
    with pytest.raises(AssertionError, match="stage 1 takes something else"):
        carry_out([forward_order(in_a_row(2), 1), above], 1)
    assert carry_out([forward_order(in_a_row(1), 1), forward_order(in_a_row(1), 2)], 1) == [
        [],
        [Action("forward", 0, 1)],
    ]


def test_an_example_by_hand():
    """Two stages, one sequence of four chunks in windows of two."""
    first, last = ([str(a) for a in stage_order(stage, 2, 1, 4, 2)] for stage in range(2))
    assert [words.replace(" of micro-batch 0, chunk ", " ") for words in first] == [
        "forward 0", "forward 1", "forward 2", "backward 1", "forward 3", "backward 0", "backward 3", "backward 2",
    ]  # fmt: skip
    assert [words.replace(" of micro-batch 0, chunk ", " ") for words in last] == [
        "forward 0", "forward 1", "backward 1", "forward 2", "backward 0", "forward 3", "backward 3", "backward 2",
    ]  # fmt: skip


@pytest.mark.parametrize(("chunks", "bptt"), [(4, 3), (2, 4), (5, 2)])
@pytest.mark.parametrize(
    "make",
    [lambda count, *sizes: backward_order(in_a_row(count), *sizes), lambda *sizes: stage_order(0, 2, *sizes)],
    ids=["backwards", "stage"],
)
def test_windows_that_do_not_divide_are_refused_by_pipelines(make, chunks, bptt):
    with pytest.raises(ValueError, match=f"bptt_chunks {bptt} does not divide {chunks} chunks"):
        make(2, chunks, bptt)


@pytest.mark.parametrize("stages", [1, 3])
def test_chunk_schedule_refuses_them_too(stages):
    with pytest.raises(ValueError, match="bptt_chunks 4 does not divide 6 chunks"):
        chunk_schedule(stages, 1, 6, 4)
