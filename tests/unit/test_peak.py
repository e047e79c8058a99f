"""The moment of a step at which a rank holds most, where gradients are nearly all of it, by hand."""

import pytest

from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.costs.parameters import parameter_counts
from megamem.planning.activations import Activations
from megamem.planning.peak import step_peak

# bytes for each of the rank's parameters, with four data-parallel ranks:
# sums of all in FP32 are 4 and a rank's part of them is 1, gradients of a pass in BF16 are 2 and a rank's part 0.5
BYTES = {
    ("bf16", 1): 4 + 2,  # sums, and what a pass makes
    ("bf16", 2): 1 + 4 + 0.5,  # the rank's sums, the bucket through which gradients leave, its part of what it holds
    ("bf16", 3): 1 + 2 + 4 + 2,  # the rank's sums, what a pass makes, the bucket, weights gathered from the others
    ("fp32", 0): 4 + 4,  # sums, in the place where a pass makes them, and their flat copy at the update
    ("fp32", 1): 4 + 1,  # the part that is updated from
    ("fp32", 2): 1 + 4 + 1,
    ("fp32", 3): 1 + 4 + 4 + 4,
}


@pytest.mark.parametrize(("precision", "zero_stage"), BYTES)
def test_gradients_by_zero_stage(precision: str, zero_stage: int) -> None:
    tree = {
        "name": "case",
        "model": {
            "layers": 32, "hidden_size": 256, "heads": 4, "ffn_size": 512, "vocab_size": 64, "chunk_size": 4,
            "mixer": "local_attention",
        },
        "data": {"sources": "none", "sequence_length": 4},
        "training": {"steps": 2, "batch_tokens": 128, "precision": precision},
        "parallel": {"device": "cpu", "zero_stage": zero_stage},
    }  # fmt: skip
    config = parse_config(RunConfig, tree, "test")
    peak = step_peak(config, Activations.of_run(config, device="cpu"), range(32), 0, 1, 4)
    # activations of four tokens, and a matrix's gradient before it is added, are less than a fiftieth
    assert peak.total / parameter_counts(config.model)["total"] == pytest.approx(BYTES[precision, zero_stage], rel=0.02)
