"""Programs of stages, and the claim that no wait for a whole device can stop a pipeline.

The oracle is a graph of hosts, streams and kernels (`tests/unit/streams.py`).
"""

import itertools
import random

import pytest

from megamem.pipeline.hazards import HazardError, check
from megamem.pipeline.program import POSTED, Receive, Send, reading_programs, training_programs
from megamem.pipeline.schedule import Action, bubble, chunk_schedule
from megamem.pipeline.simulate import even_cost, simulate
from tests.unit.streams import deadlocks, makespan, posted_two_ahead, sends, used, waits

SIZES = [
    (stages, micro_batches, chunks, bptt)
    for stages in (1, 2, 3, 4, 8)
    for micro_batches in (1, 2, 5, 9)
    for chunks, bptt in ((1, 1), (2, 2), (4, 1), (4, 2), (6, 6))
]
EVEN = even_cost()


def after_each(programs):
    """A sync behind every operation of every stage."""
    return {(stage, n) for stage, program in enumerate(programs) for n in range(len(program))}


def assert_complete(programs, bptt, spanning):
    """What an action uses is received before it, not long before, and sent right behind its action."""
    for stage, program in enumerate(programs):
        posted, waiting = set(), {"hidden chunk": 0, "gradient": 0, "memory": 0, "gradient of the memory": 0}
        for step in program:
            if isinstance(step, Receive):
                posted.add(step.transfer)
                waiting[step.transfer.channel] += 1
                assert step.transfer.target == stage
                at_source = programs[step.transfer.source]
                assert at_source[at_source.index(step.transfer.action) + 1] == Send(step.transfer)
            elif isinstance(step, Action):
                needed = used(stage, len(programs), step, bptt, spanning)
                assert posted.issuperset(needed), step
                assert max(waiting["hidden chunk"], waiting["gradient"]) <= POSTED
                for transfer in needed:
                    waiting[transfer.channel] -= 1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_training_has_no_hazards(interleaved, keep):
    for sizes in SIZES:
        programs = training_programs(*sizes, interleaved, keep)
        check(programs)
        assert_complete(programs, sizes[3], interleaved)
        actions = [[step for step in program if isinstance(step, Action)] for program in programs]
        assert actions == chunk_schedule(*sizes, interleaved)


@pytest.mark.parametrize("stages", range(1, 9))
def test_reading_has_no_hazards(stages):
    for calls in (1, 2, 7):
        for leaves in (None, lambda action: True, lambda action: action.chunk % 3 == 2):
            programs = reading_programs(stages, calls, leaves)
            check(programs)
            spanning = leaves is not None and leaves(Action("forward", 0, 0))
            assert_complete(programs, 1, spanning)


def test_programs_by_hand():
    """Three stages, four chunks, no gradients between them."""
    first, _, last = training_programs(3, 1, 4, 1)
    assert short(first) == "F0 s0 F1 s1 F2 s2 r0 B0 F3 s3 r1 B1 r2 B2 r3 B3"
    assert short(last) == "r0 r1 F0 B0 s0 F1 r2 B1 s1 F2 r3 B2 s2 F3 B3 s3"
    first, last = reading_programs(2, 3, lambda action: True)
    assert short(first) == "F0 s0 r0 F1 s1 r1 F2 s2 r2"
    assert short(last) == "r0 F0 s0 r1 F1 s1 r2 F2 s2"


def short(program):
    def word(step):
        if isinstance(step, Action):
            return f"{step.kind[0].upper()}{step.chunk}"
        return f"{'s' if isinstance(step, Send) else 'r'}{step.transfer.action.chunk}"

    return " ".join(map(word, program))


# receives posted two ahead at the start


@pytest.mark.parametrize("sizes", [(2, 1, 2, 1), (4, 4, 4, 4), (4, 4, 4, 1), (8, 2, 6, 3)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_receives_that_are_always_two_ahead_are_a_hazard(sizes, interleaved):
    programs = posted_two_ahead(chunk_schedule(*sizes, interleaved), sizes[3], interleaved)
    assert not deadlocks(waits(programs, sizes[3], interleaved)), "without a sync it runs"
    assert deadlocks(waits(programs, sizes[3], interleaved, after_each(programs)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_so_they_are_in_every_pipeline(interleaved):
    for sizes in SIZES:
        programs = posted_two_ahead(chunk_schedule(*sizes, interleaved), sizes[3], interleaved)
        if sizes[0] == 1:
            check(programs)
        else:
            with pytest.raises(HazardError):
                check(programs)


def test_a_hazard_names_what_each_stage_waits_for():
    with pytest.raises(HazardError) as caught:
        check(posted_two_ahead(chunk_schedule(2, 1, 2, 1), 1))
    assert str(caught.value) == (
        "a wait for the whole device can stop the pipeline: "
        "stage 0 at receiving the gradient of the backward of micro-batch 0, chunk 0 from stage 1, "
        "stage 1 at receiving the hidden chunk of the forward of micro-batch 0, chunk 0 from stage 0"
    )


def test_one_stream_for_all_receives_and_sends_of_a_rank_would_stop_them_without_any_sync():
    programs = posted_two_ahead(chunk_schedule(4, 4, 4, 4), 4)
    assert deadlocks(waits(programs, 4, False, pairs=False))


def test_a_gradient_received_right_behind_its_forward_is_a_hazard():
    """Its sender first needs forwards that this stage has yet to run: as many as it is ahead."""
    orders = chunk_schedule(3, 1, 4, 1)
    programs = training_programs(3, 1, 4, 1)
    check(programs)
    first = [step for step in programs[0] if not isinstance(step, Receive)]
    sent = sends(orders, 1, False)
    for step in programs[0]:
        if isinstance(step, Receive):
            first.insert(first.index(*sent[0, Action("forward", 0, step.transfer.action.chunk)]) + 1, step)
    with pytest.raises(
        HazardError, match="stage 0 at receiving the gradient of the backward of micro-batch 0, chunk 0"
    ):
        check([first, *programs[1:]])


# the check against the oracle


def moved(programs, bptt, interleaved, draw):
    """The programs with some receives elsewhere, before their uses, those of a channel still in their order."""
    found = []
    for stage, program in enumerate(programs):
        uses = {
            transfer: action
            for action in program
            if isinstance(action, Action)
            for transfer in used(stage, len(programs), action, bptt, interleaved)
        }
        new = list(program)
        for step in [step for step in program if isinstance(step, Receive)]:
            if draw.random() < 0.4:
                at = new.index(step)
                same = [n for n, other in enumerate(new) if of_channel(other, step.transfer.channel)]
                use = new.index(uses[step.transfer])
                first = max((n + 1 for n in same if n < at), default=0)
                last = min([n - 1 for n in same if n > at] + [use - 1])
                new.pop(at)
                new.insert(draw.randint(first, max(last, first)), step)
        found.append(new)
    return found


def of_channel(step, channel):
    return isinstance(step, Receive) and step.transfer.channel == channel


def trial(seed):
    """Programs with receives moved at random, their window and whether a memory spans them, and if they are refused."""
    draw = random.Random(seed)
    sizes = draw.choice([(2, 1, 2, 1), (2, 2, 2, 2), (3, 1, 4, 2), (3, 3, 2, 1)])
    interleaved = draw.random() < 0.5
    programs = moved(training_programs(*sizes, interleaved), sizes[3], interleaved, draw)
    try:
        check(programs)
    except HazardError:
        return programs, sizes[3], interleaved, True
    return programs, sizes[3], interleaved, False


SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_check_is_a_sync_behind_every_operation(seed):
    """Streams make no difference then, and fewer syncs stop nothing that these do not."""
    programs, bptt, interleaved, hazard = trial(seed)
    draw, everywhere = random.Random(seed), after_each(programs)
    for pairs, pending in itertools.product((True, False), (0, None)):
        options = {"pairs": pairs, "pending": pending}
        assert deadlocks(waits(programs, bptt, interleaved, everywhere, **options)) == hazard
        some = {place for place in everywhere if draw.random() < 0.3}
        assert hazard or not deadlocks(waits(programs, bptt, interleaved, some, **options))


def test_trials_have_hazards_and_have_none():
    assert 5 <= sum(trial(seed)[-1] for seed in SEEDS) <= 25


@pytest.mark.parametrize("ours", [True, False])
def test_every_choice_of_syncs(ours):
    """Behind the first six operations of two stages: all 2^12, for receives two ahead and for ours."""
    programs = training_programs(2, 1, 2, 1) if ours else posted_two_ahead(chunk_schedule(2, 1, 2, 1), 1)
    places = sorted(place for place in after_each(programs) if place[1] < 6)
    assert len(places) == 12
    stopped = sum(
        deadlocks(waits(programs, 1, False, set(itertools.compress(places, chosen))))
        for chosen in itertools.product((0, 1), repeat=len(places))
    )
    assert (stopped == 0) == ours


# time


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_bubble_is_that_of_the_schedule(interleaved):
    """On CUDA a receive waits for what its stage computes before it; where chunks travel in no time that costs none."""
    for sizes in [(2, 4, 4, 2), (4, 4, 4, 1), (4, 5, 4, 4), (8, 8, 2, 2)]:
        graph = waits(training_programs(*sizes, interleaved), sizes[3], interleaved, pending=sizes[0] + 1)
        time = makespan(graph, EVEN, 0)
        assert time == simulate(chunk_schedule(*sizes, interleaved), sizes[3], last_to_first=interleaved).makespan
        assert time / (3 * sizes[1] * sizes[2]) - 1 == pytest.approx(bubble(*sizes[:3]))


@pytest.mark.parametrize("sizes", [(4, 4, 4, 1), (4, 4, 4, 4), (8, 4, 4, 4), (4, 8, 1, 1)])
def test_travelling_is_hidden_nearly_as_well_as_with_receives_two_ahead(sizes):
    """A transfer takes a tenth of a forward. docs/pipeline.md."""
    orders, work = chunk_schedule(*sizes), 3 * sizes[1] * sizes[2]
    times = [
        makespan(waits(programs, sizes[3], False, pending=sizes[0] + 1), EVEN, 0.1)
        for programs in (training_programs(*sizes), posted_two_ahead(orders, sizes[3]))
    ]
    assert 0 <= (times[0] - times[1]) / work <= 0.005
