"""The optimizer beside torch's AdamW, its agreement to skip, decay groups and the schedule."""

import math

import pytest
import torch
from torch import nn

from megamem.config.optimizer import OptimizerConfig
from megamem.parallel.linears import constant, declare
from megamem.pipeline.optimizer import AgreeingAdamW, learning_rate, parameter_groups

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((5, 3), (7,), (2, 4))]


def groups_of(parameters):
    return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]


def fill(parameters, step, bad=None):
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if index == bad:
            parameter.grad.view(-1)[-1] = math.nan


def everything(optimizer, parameters):
    """Values, moments and step counts, in order."""
    names = ("exp_avg", "exp_avg_sq", "step")
    return [t.clone() for p in parameters for t in (p.detach(), *(optimizer.state[p][name] for name in names))]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_it_is_adamw():
    ours, theirs = parameters(), parameters()
    a = AgreeingAdamW(groups_of(ours), CONFIG)
    b = torch.optim.AdamW(groups_of(theirs), lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps)
    for step in range(10):
        fill(ours, step)
        fill(theirs, step)
        for optimizer in (a, b):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (step + 1)
            optimizer.step()
        assert a.bad == 0
    for x, y in zip(ours, theirs, strict=True):
        # the fused kernel rounds in another order than the plain one: 10 steps of a few FP32 units of last place
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_bad_gradient_changes_nothing(bad):
    values = parameters()
    optimizer = AgreeingAdamW(groups_of(values), CONFIG)
    fill(values, 0)
    optimizer.step()
    before = everything(optimizer, values)
    fill(values, 1, bad=bad)
    optimizer.bad = None
    optimizer.step()
    assert optimizer.bad == 1
    assert same(everything(optimizer, values), before)


def test_a_bad_loss_changes_nothing_though_gradients_are_finite():
    values = parameters()
    optimizer = AgreeingAdamW(groups_of(values), CONFIG)
    fill(values, 0)
    optimizer.step()
    before = everything(optimizer, values)
    fill(values, 1)
    optimizer.own_bad, optimizer.bad = torch.ones(()), None
    optimizer.step()
    assert optimizer.bad == 1
    assert same(everything(optimizer, values), before)


def test_a_skipped_step_leaves_no_trace_in_later_ones():
    """With a bad step in between, the result is bitwise that of the good steps alone."""
    with_bad, without = parameters(), parameters()
    for values, bad in ((with_bad, True), (without, False)):
        optimizer = AgreeingAdamW(groups_of(values), CONFIG)
        for step in range(4):
            fill(values, step)
            optimizer.step()
            if bad and step == 1:
                fill(values, 50, bad=1)
                optimizer.step()
    assert same([p.detach() for p in with_bad], [p.detach() for p in without])


def test_several_calls_of_a_step_report_the_worst():
    """DeepSpeed calls once per parameter group; `bad` covers the calls since it was last set to None."""
    values = parameters()
    optimizer = AgreeingAdamW(groups_of(values), CONFIG)
    fill(values, 0, bad=0)
    optimizer.step()
    fill(values, 0)
    optimizer.step()
    assert optimizer.bad == 1
    optimizer.bad = None
    fill(values, 0)
    optimizer.step()
    assert optimizer.bad == 0


def test_groups_follow_the_declarations():
    matrix, norm, embedding = (nn.Parameter(torch.ones(*shape)) for shape in ((2, 2), (2,), (3, 2)))
    for parameter in (matrix, norm, embedding):
        declare(parameter, constant(1.0))
    decayed, plain = parameter_groups(
        [("matrix", matrix), ("norm", norm), ("embedding", embedding)], OptimizerConfig(weight_decay=0.1)
    )
    assert decayed == {"params": [matrix, embedding], "weight_decay": 0.1, "lr_scale": 1.0}
    assert plain == {"params": [norm], "weight_decay": 0.0, "lr_scale": 1.0}


def test_new_parameters_learn_at_their_own_rate():
    names = ("old", "new", "old.norm", "new.norm")
    parameters = {name: nn.Parameter(torch.ones(*((2,) if "norm" in name else (2, 2)))) for name in names}
    for parameter in parameters.values():
        declare(parameter, constant(1.0))
    config = OptimizerConfig(lr=1e-4, new_parameters_lr=1e-3, weight_decay=0.1)
    groups = parameter_groups(parameters.items(), config, new_parameters={"new", "new.norm"})
    found = {(g["weight_decay"], g["lr_scale"]): g["params"] for g in groups}
    assert found == {
        (0.1, 1.0): [parameters["old"]], (0.1, 10.0): [parameters["new"]],
        (0.0, 1.0): [parameters["old.norm"]], (0.0, 10.0): [parameters["new.norm"]],
    }  # fmt: skip
    assert len(parameter_groups(parameters.items(), config)) == 2


def test_a_parameter_without_a_declaration_is_a_defect():
    with pytest.raises(AttributeError):
        parameter_groups([("weight", nn.Parameter(torch.ones(2)))], OptimizerConfig())


class TestSchedule:
    CONFIG = OptimizerConfig(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)

    def test_shape(self):
        rates = [learning_rate(self.CONFIG, step, 100) for step in range(100)]
        assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
        assert rates[10] == 1.0
        assert rates[-1] == pytest.approx(0.2)
        assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))
        # half-way down the cosine lies between two steps: symmetric around the mean of both ends
        assert (rates[54] + rates[55]) / 2 == pytest.approx((1 + 0.2) / 2)

    @pytest.mark.parametrize("steps", [1, 2, 3])
    @pytest.mark.parametrize("warmup_ratio", [0.0, 0.01, 0.5, 0.99])
    def test_short_runs_have_positive_rates(self, steps, warmup_ratio):
        config = OptimizerConfig(lr=1.0, warmup_ratio=warmup_ratio, min_lr_ratio=0.0)
        rates = [learning_rate(config, step, steps) for step in range(steps)]
        assert rates[0] > 0
        assert all(0 <= rate <= 1 for rate in rates)

    def test_without_warmup_it_starts_at_the_peak(self):
        assert learning_rate(OptimizerConfig(lr=3.0, warmup_ratio=0.0), 0, 50) == 3.0


class TestWarmupStableDecay:
    CONFIG = OptimizerConfig(lr=1.0, schedule="wsd", warmup_steps=10, decay_ratio=0.25, min_lr_ratio=0.2)

    @pytest.mark.parametrize(("shape", "half"), [("1-sqrt", 1 - math.sqrt(0.5)), ("linear", 0.5)])
    def test_shape(self, shape, half):
        config = self.CONFIG.model_copy(update={"decay_shape": shape})
        rates = [learning_rate(config, step, 80) for step in range(80)]
        assert rates[:10] == [(step + 1) / 10 for step in range(10)]
        assert rates[10:60] == [1.0] * 50
        assert rates[69] == pytest.approx(0.2 + 0.8 * half), "half of the 20 steps of the decay"
        assert rates[-1] == pytest.approx(0.2)
        assert all(a > b for a, b in zip(rates[59:], rates[60:], strict=False))

    def test_before_the_decay_the_length_does_not_matter(self):
        """So that runs of all lengths begin alike, bit for bit."""
        assert [learning_rate(self.CONFIG, step, 100) for step in range(75)] == [
            learning_rate(self.CONFIG, step, 1000) for step in range(75)
        ]

    def test_steps_count_whatever_the_ratio(self):
        config = OptimizerConfig(lr=1.0, schedule="wsd", warmup_steps=0, decay_steps=3, min_lr_ratio=0.0)
        rates = [learning_rate(config, step, 10) for step in range(10)]
        assert rates == [*[1.0] * 7, *(pytest.approx(1 - math.sqrt(n / 3)) for n in (1, 2, 3))]

    def test_no_decay_is_stable_to_the_end(self):
        config = OptimizerConfig(lr=1.0, schedule="wsd", warmup_steps=0, decay_ratio=0)
        assert {learning_rate(config, step, 10) for step in range(10)} == {1.0}
