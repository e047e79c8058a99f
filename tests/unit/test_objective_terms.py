"""What is logged of an objective's further losses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megamem.training.callbacks import objective_terms
from megamem.training.callbacks.objective_terms import ObjectiveTerms


def test_further_losses_are_logged_per_predicted_token(monkeypatch):
    """Over the steps since the last log line, but for those that were not finite."""
    monkeypatch.setattr(objective_terms.dist, "all_reduce", lambda *_, **__: None)
    callback = ObjectiveTerms(("next_token", "z_loss", "other"))
    trainer = SimpleNamespace(topology=SimpleNamespace(dp_size=1, dp_group=None))
    for predicted, bad, further in ((4.0, 0, (1.0, 2.0)), (6.0, 0, (3.0, 4.0)), (5.0, 1, (math.nan, math.inf))):
        losses = torch.tensor([9.0, *further])
        callback.after_step(
            trainer, SimpleNamespace(losses=losses, predicted=torch.tensor(predicted), bad=torch.tensor(bad))
        )
    record = {}
    callback.at_log(trainer, record)
    assert record == {"z_loss": pytest.approx(0.4), "other": pytest.approx(0.6)}
