"""Titans in BF16 beside float64, by the weights that it starts from: the figures of docs/mechanisms/deep.md."""

import pytest

from tests.contract import driver, test_bfloat16
from tests.contract.case import Case


@pytest.mark.parametrize(("start", "bound"), [(0.02, 7e-3), (0.1, 9e-3)])
def test_rounding_does_not_grow_from_usual_weights(start, bound, monkeypatch):
    """Law 7 with heads of 16 channels: 0.6 % from weights as models start with, 0.7 % from five times as large ones.

    (0.3, which the laws' own cases start from, gives 11 %: so these have a large eps inside of the layer norm.)
    """
    found = {}
    monkeypatch.setattr(test_bfloat16, "within", lambda name, value, limit: found.setdefault(name, (value, limit)))
    monkeypatch.setattr(test_bfloat16, "make", lambda *given: driver.make(*given, heads=2, head_dim=16))
    test_bfloat16.test_bfloat16_follows_float64_over_a_long_stream(
        Case("titans", "usual", {"inner_chunk": 4}, init_std=start)
    )
    assert found["7 BF16: relative error, mean of the stream"][0] < bound
    assert all(value <= limit for value, limit in found.values())
