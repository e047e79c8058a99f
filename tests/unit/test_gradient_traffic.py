"""Planned sums of gradients over data-parallel ranks: bytes by the collective, and what the backward pass hides."""

from pathlib import Path

import pytest

from megamem.config.load import load_config
from megamem.config.run import RunConfig
from megamem.pipeline.deepspeed_settings import BUCKET
from megamem.planning.machines import machine
from megamem.planning.plan import make_plan
from megamem.planning.step_time import Layout, waiting_for_gradients
from megamem.planning.traffic import StageParameters, traffic

BOOKS = Path(__file__).resolve().parents[2] / "configs" / "recipes" / "books.yaml"
COUNT = 4 * BUCKET
"""Parameters of a rank."""
RATE = 4.0 * BUCKET
"""Bytes per second: a bucket takes half a second on two ranks, all gradients two."""


def run(zero: int, precision: str = "bf16") -> RunConfig:
    """4 sequences of 8 chunks of 256 tokens in a step, windows of two chunks, one row a micro-batch."""
    return load_config(
        RunConfig,
        BOOKS,
        [
            "parallel.tp=1",
            f"parallel.zero_stage={zero}",
            f"training.precision={precision}",
            "training.batch_tokens=8192",
            "training.micro_batch_size=1",
            "training.bptt_chunks=2",
        ],
    )


@pytest.mark.parametrize(
    ("zero", "precision", "gradients", "weights"),
    [
        (0, "fp32", 2 * 4 / 2, 0),  # an all-reduce sends every sum to everybody
        (1, "fp32", 4 / 2, 4 / 2),
        (1, "bf16", 4 / 2, 2 / 2),
        (2, "bf16", 8 * 4 / 2, 2 / 2),  # 2 micro-batches of 4 windows, each of which sums
    ],
)
def test_bytes_of_two_ranks(zero: int, precision: str, gradients: float, weights: float) -> None:
    """By parameter."""
    config = run(zero, precision)
    assert (config.chunks, config.micro_batches(2)) == (8, 2)
    sent = traffic(config, range(4), 0, StageParameters(1_000, 1_000), 2, config.model.rows_per_chunk)
    assert (sent.gradients, sent.weights) == (1_000 * gradients, 1_000 * weights)
    assert sent.data == sent.gradients + sent.weights


def waiting(config: RunConfig, backward: list[float], count: int = COUNT) -> float:
    return waiting_for_gradients(Layout(config, 2, (4,)), StageParameters(count, count), RATE, backward)


def test_the_last_bucket_is_waited_for_and_what_the_backward_of_a_chunk_does_not_hide() -> None:
    """Under ZeRO 1 the last window counts, in it its first chunk, which is the last that its backward comes to."""
    others = [9.0] * 8
    hides = [*others[:6], 0.7, 9.0]
    assert waiting(run(1), hides) == pytest.approx(0.5 + (2 - 0.5 - 0.7))
    assert waiting(run(1), others) == pytest.approx(0.5)
    assert waiting(run(1), others, BUCKET // 2) == pytest.approx(0.25), "one bucket, and not a full one"
    assert waiting(run(1), [0.0] * 8) == pytest.approx(2.0), "no time to hide in: all of it is waited for"


def test_every_window_waits_under_zero_2() -> None:
    backward = [0.3, 9.0, 0.7, 9.0, 9.0, 9.0, 0.0, 9.0]
    per_micro_batch = sum(0.5 + max(0.0, 1.5 - first) for first in (0.3, 0.7, 9.0, 0.0))
    assert waiting(run(2), backward) == pytest.approx(2 * per_micro_batch)


@pytest.mark.parametrize(("zero", "passes", "bytes_"), [(0, 1, 2), (1, 1, 1), (2, 8, 1)])
def test_fp32_hides_nothing(zero: int, passes: int, bytes_: int) -> None:
    assert waiting(run(zero, "fp32"), [9.0] * 8) == pytest.approx(passes * bytes_ * 2.0)


def test_zero_3_hides_nothing() -> None:
    assert waiting(run(3), [9.0] * 8) == pytest.approx(8 * 2.0)


def test_plans_use_it() -> None:
    """The planned wait is the weights', and for the gradients of a model that fits into a bucket all of them."""
    config, device = run(1), machine("h100", 8)
    plan = make_plan(config, 2, device)
    (sent,) = plan.traffic
    assert plan.time.data == pytest.approx((sent.gradients + sent.weights) / device.rate(2))
    assert plan.to_dict()["traffic"][0]["data"] == sent.data  # type: ignore[index]
