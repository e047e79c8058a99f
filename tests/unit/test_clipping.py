"""The gradient norm of a model without ZeRO, and what clipping makes of the gradients."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamem.pipeline.base import TrainingEngine

SPLIT, WHOLE, TIED = torch.tensor([3.0, -4.0]), torch.tensor([[1.0, 2.0]]), torch.tensor([8.0])
"""Gradients of a parameter that tensor-parallel ranks split, of one that all hold, and of a further stage's copy."""


def rank(tp_rank=0, grad_clip=0.0, copies=False):
    """A rank with these gradients, as `TrainingEngine._clip_plain` sees it."""
    parameters = []
    for gradient, split, replica in ((SPLIT, True, False), (WHOLE, False, False), (TIED, False, True)):
        if replica and not copies:
            continue
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        parameter.tensor_model_parallel = split
        if replica:
            parameter.ds_pipe_replicated = True
        parameters.append(parameter)
    parameters.append(nn.Parameter(torch.zeros(3)))  # frozen: no gradient
    return SimpleNamespace(
        topology=SimpleNamespace(device=torch.device("cpu"), tp_rank=tp_rank, model_group=None),
        stage=SimpleNamespace(parameters=lambda: parameters),
        config=SimpleNamespace(optimizer=SimpleNamespace(grad_clip=grad_clip)),
        gradients=[parameter.grad for parameter in parameters[:-1]],
    )


def norms_of(ranks, monkeypatch):
    """The norm that each rank finds: sums over ranks are those of their own sums of squares."""
    own = []
    monkeypatch.setattr(dist, "all_reduce", lambda total, group=None: own.append(float(total)))
    for each in ranks:
        TrainingEngine._clip_plain(each)
    monkeypatch.setattr(dist, "all_reduce", lambda total, group=None: total.fill_(sum(own)))
    return [float(TrainingEngine._clip_plain(each)) for each in ranks]


def test_what_several_ranks_hold_counts_once(monkeypatch):
    """Two tensor-parallel ranks, and a stage with a copy of the first one's parameter."""
    ranks = [rank(0), rank(1), rank(0, copies=True)]
    expected = (3 * SPLIT.square().sum() + 2 * WHOLE.square().sum()).sqrt()
    assert norms_of(ranks, monkeypatch) == [pytest.approx(float(expected))] * 3


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(("grad_clip", "scale"), [(0.0, 1.0), (100.0, 1.0), (1.0, 1 / 30**0.5)])
def test_gradients_above_the_limit_come_down_to_it_and_others_stay(monkeypatch, grad_clip, scale, copies):
    """3, 4, 1 and 2 have the norm root of 30; a copy is scaled with the rest."""
    monkeypatch.setattr(dist, "all_reduce", lambda total, group=None: None)
    one = rank(grad_clip=grad_clip, copies=copies)
    assert float(TrainingEngine._clip_plain(one)) == pytest.approx(30**0.5)
    before = [SPLIT, WHOLE, TIED][: len(one.gradients)]
    for gradient, was in zip(one.gradients, before, strict=True):
        torch.testing.assert_close(gradient, scale * was, rtol=1e-6, atol=0)
