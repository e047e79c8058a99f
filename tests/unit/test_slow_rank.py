"""Who the others wait for, from the shares of time that ranks wait in collectives."""

import numpy as np
import pytest

from megamem.training.slow_rank import LEAST_BEATS, POLLS_PER_BEAT, SHARE_BEATS, WaitShares, slow_rank


def named(*shares, stage_size=None):
    found = slow_rank(dict(enumerate(shares)), stage_size or len(shares))
    return None if found is None else found.rank


def test_the_rank_that_waits_least_while_the_others_wait():
    assert named(0.6, 0.55, 0.05, 0.62) == 2
    assert named(0.5, 0.1) == 1


def test_even_ranks_are_not_slow():
    assert named(0.1, 0.12, 0.08, 0.11) is None
    assert named(0.3, 0.45) is None


def test_slow_links_are_not_a_slow_rank():
    """All wait most of the time, one of them a little less."""
    assert named(0.9, 0.88, 0.65, 0.91) is None


def test_what_costs_little_is_not_worth_a_line():
    assert named(0.15, 0.16, 0.0, 0.15) is None


def test_ranks_of_different_stages_are_not_compared():
    """Two stages of two ranks; those of the first wait for the second stage by design."""
    assert named(0.7, 0.72, 0.05, 0.06, stage_size=2) is None
    assert named(0.7, 0.72, 0.4, 0.06, stage_size=2) == 3
    assert named(0.7, 0.1, 0.0, stage_size=1) is None


def test_the_stage_that_loses_most():
    assert named(0.5, 0.2, 0.9, 0.1, stage_size=2) == 3


def test_half_of_the_ranks_are_slow():
    """Of a slow host the rank that waits least is named."""
    assert named(0.6, 0.6, 0.6, 0.6, 0.1, 0.08, 0.1, 0.11) == 5


def test_ranks_of_which_too_little_is_known_are_left_out():
    assert named(None, 0.6, 0.05) == 2
    assert named(None, 0.05) is None


def test_nothing_is_said_before_enough_was_seen():
    shares = WaitShares()
    assert shares.add(0, 0, 0) is None
    for beat in range(1, LEAST_BEATS):
        assert shares.add(0, POLLS_PER_BEAT * beat, beat) is None
    assert shares.add(0, POLLS_PER_BEAT * LEAST_BEATS, LEAST_BEATS) == pytest.approx(1 / POLLS_PER_BEAT)


def test_shares_are_of_the_window():
    """A rank that waited all the time, then never."""
    shares, polls, waited = WaitShares(), 0, 0
    for _ in range(SHARE_BEATS):
        polls, waited = polls + POLLS_PER_BEAT, waited + POLLS_PER_BEAT
        shares.add(0, polls, waited)
    assert shares.add(0, polls, waited) == 1
    for _ in range(SHARE_BEATS + 1):
        polls += POLLS_PER_BEAT
        share = shares.add(0, polls, waited)
    assert share == 0


def test_a_pause_leaves_too_little_to_say_anything():
    shares, polls = WaitShares(), POLLS_PER_BEAT * SHARE_BEATS
    shares.add(0, 0, 0)
    assert shares.add(0, polls, 0) == 0
    for _ in range(SHARE_BEATS):  # no training, no polls
        share = shares.add(0, polls, 0)
    assert share is None


def test_chance_names_nobody():
    """Looks at 64 even ranks, as few as count, over and over: no false alarm in 2,000 windows.

    The least of 64 shares lies some 2.4 standard deviations (0.029) below the median; LAG is 6.9 of them.
    """
    generator = np.random.default_rng(0)
    for busy in (0.3, 0.5):
        waited = generator.binomial(LEAST_BEATS * POLLS_PER_BEAT, busy, size=(1000, 64)) / (
            LEAST_BEATS * POLLS_PER_BEAT
        )
        assert not [row for row in waited if named(*row.tolist()) is not None]
