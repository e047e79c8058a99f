"""What a run under any layout must agree on with one process without DeepSpeed."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.training_cases import reference

STEPS, SOME, LR = 20, 6, 1e-3
ANYWHERE = {"documents": "join", "reset": "exact"}
"""Documents begin at any token."""


def case(tp: int, zero: int, bptt: int = 4, micro: int = 1, **more: Any) -> dict[str, Any]:
    """A case for `train_case`; `more` are sections of the configuration, and `steps`."""
    training = {"bptt_chunks": bptt, "micro_batch_size": micro, **more.pop("training", {})}
    parallel = {"tp": tp, "zero_stage": zero, **more.pop("parallel", {})}
    steps = more.pop("steps", 2)
    return {"config": {"training": training, "parallel": parallel, **more}, "steps": steps, "lr": LR}


known = cache(reference)


def expected(case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """(gradients, losses, weights) of one process with one autograd graph per window, after as many steps."""
    config = case["config"]
    model = json.dumps(config.get("model", {}), sort_keys=True)
    documents = config.get("data", {}).get("documents", "pack")
    objective = json.dumps(config["training"].get("objective", "next_token"), sort_keys=True)
    return known(case["steps"], config["training"]["bptt_chunks"], LR, model, documents, objective=objective)


def assert_gradients(case: dict[str, Any], found: dict[str, Any]) -> None:
    """Every gathered gradient, and the global norm."""
    gradients, _, _ = expected(case)
    assert_gradients_are(gradients, found)


def assert_gradients_are(gradients: dict[str, torch.Tensor], found: dict[str, Any]) -> None:
    """Every gathered gradient of a case, and the global norm, against those of one process."""
    global_norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert found["gradients"].keys() == gradients.keys()
    for parameter, exact in gradients.items():
        # FP32 sums in another order: 1e-5 of the gradient, or of a small share of the whole for tiny ones
        limit = 1e-5 * max(exact.norm(), 1e-3 * global_norm / len(gradients) ** 0.5)
        error = (found["gradients"][parameter] - exact).norm()
        assert error <= limit, f"{parameter}: {error:.2e} over {limit:.2e}"
    assert found["grad_norm"] == pytest.approx(global_norm.item(), rel=1e-5)


def assert_losses_and_weights(case: dict[str, Any], found: dict[str, Any]) -> None:
    """Loss of each step and the weights after the last."""
    gradients, losses, weights = expected(case)
    global_norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    # 20 AdamW steps may amplify FP32 rounding of near-zero gradients to about lr * 1e-2 per weight
    assert found["losses"] == pytest.approx(losses, abs=1e-4)
    assert found["weights"].keys() == weights.keys()
    for parameter, exact in weights.items():
        if gradients[parameter].norm() < 1e-7 * global_norm:
            # a bias of keys adds the same to all scores of a query, and softmax takes it out; a decay scales a deep
            # memory's weights, and its layer norm takes nearly all of that out: what is left is of the order of
            # rounding, which AdamW scales up to a full step
            assert parameter.endswith(("key.bias", "log_decay.start", "log_decay.weight.weight")), parameter
            continue
        error = (found["weights"][parameter] - exact).norm() / exact.norm()
        assert error < 1e-3, f"{parameter}: {error:.2e}"
