"""Which steps are spikes: by the window's mean and deviation, never at the start, and not for good."""

from __future__ import annotations

import math

import pytest
import torch

from megamem.pipeline.spikes import SpikeGuard

CPU = torch.device("cpu")


def judged(guard, values):
    """Whether each (loss, gradient norm) is a spike."""
    return [bool(guard.judge(*(torch.tensor(v, dtype=torch.float64) for v in pair))) for pair in values]


def quiet(count, seed=0, loss=3.0, norm=1.0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return [(loss + 0.1 * a, norm + 0.05 * b) for a, b in noise.tolist()]


def test_by_mean_and_deviation_of_the_window():
    """Just below and just above k deviations over the mean, as the standard library computes them."""
    import statistics

    before = quiet(20)
    losses = [loss for loss, _ in before[-16:]]
    border = statistics.fmean(losses) + 4 * statistics.stdev(losses)
    for loss, spike in ((border - 1e-9, False), (border + 1e-9, True)):
        guard = SpikeGuard(4.0, 16, CPU)
        judged(guard, before)
        assert judged(guard, [(loss, 1.0)]) == [spike]


@pytest.mark.parametrize("spike", [(9.0, 1.0), (3.0, 5.0)])
def test_loss_and_norm_each_count(spike):
    guard = SpikeGuard(6.0, 16, CPU)
    assert judged(guard, [*quiet(16), spike, (3.0, 1.0)]) == [False] * 16 + [True, False]


def test_low_values_are_none():
    guard = SpikeGuard(6.0, 16, CPU)
    judged(guard, quiet(16))
    assert judged(guard, [(0.1, 0.001)]) == [False]


def test_none_before_half_the_window():
    guard = SpikeGuard(3.0, 16, CPU)
    values = quiet(7)
    assert judged(guard, [*values, (1e6, 1e6)]) == [False] * 8
    guard = SpikeGuard(3.0, 16, CPU)
    assert judged(guard, [*quiet(8), (1e6, 1e6)]) == [False] * 8 + [True]


def test_no_false_ones_in_a_quiet_run():
    """Six deviations of a normal distribution: 1e-9 a step; estimated from 64 steps and more, still below 1e-6."""
    assert not any(judged(SpikeGuard(6.0, 128, CPU), quiet(1000, seed=1)))


@pytest.mark.parametrize("not_finite", [math.nan, math.inf])
def test_what_is_not_finite_is_no_spike_and_not_remembered(not_finite):
    guard, other = SpikeGuard(6.0, 8, CPU), SpikeGuard(6.0, 8, CPU)
    before = quiet(6)
    assert judged(guard, [*before, (not_finite, 1.0), (9.0, 1.0)]) == [False] * 7 + [True]
    judged(other, before)
    assert torch.equal(guard.history[-8:-2], other.history[-6:])
    assert guard.history[-2].isnan().tolist() == [True, False]


def test_a_loss_that_stays_high_is_soon_accepted():
    """Of a window of 128 and 6 deviations: a jump is far only while it is less than a 37th of the window."""
    guard = SpikeGuard(6.0, 128, CPU)
    judged(guard, quiet(128))
    assert sum(judged(guard, [(30.0 + loss, norm) for loss, norm in quiet(40, seed=2)])) == math.ceil(128 / 37)
