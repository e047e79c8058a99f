"""What a run prints of its pipeline before its first step."""

from types import SimpleNamespace

import pytest

from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.costs.parameters import parameter_counts
from megamem.training.description import describe_stages

TREE = {
    "name": "case",
    "model": {"layers": 4, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4},
    "data": {"sources": "none", "sequence_length": 16},
    "training": {"steps": 1, "batch_tokens": 64, "precision": "fp32"},
}
RECURRENT = {"architecture": {"kind": "recurrent_memory", "memory_tokens": 2}}


def described(counts, accumulation, **model):
    """The lines of stages with so many layers each, and so many micro-batches."""
    parallel = {"pp": len(counts), "placement": counts} if len(counts) > 1 else {}
    config = parse_config(RunConfig, {**TREE, "model": {**TREE["model"], **model}, "parallel": parallel}, "test")
    begins = [sum(counts[:stage]) for stage in range(len(counts))]
    placement = [range(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
    return config, describe_stages(SimpleNamespace(config=config, placement=placement, micro_batches=accumulation))


def test_one_stage_has_nothing_to_say():
    assert described([4], 4)[1] == []


def test_stages_by_hand():
    """A layer has 4 d d + 3 * 64 d + 2 d parameters; local attention over 4 tokens has 2.5 keys on average."""
    config, (first, last, bubble) = described([1, 3], 4)
    layer, vocabulary = 4 * 64 + 3 * 64 * 8 + 16, 16 * 8
    assert parameter_counts(config.model)["total"] == 4 * layer + 2 * vocabulary + 8
    flops = 2 * (4 * 64 + 3 * 64 * 8) + 2 * 2 * 2.5 * 8
    fast, slow = flops, 3 * flops + 2 * vocabulary
    share = fast / (fast + slow)
    assert first == (
        f"stage 0: layers 0-0, embedding: {layer + vocabulary:,} parameters, {share:.1%} of the operations, "
        "at most 5 chunks in flight"
    )
    assert last == (
        f"stage 1: layers 1-3, head: {3 * layer + vocabulary + 8:,} parameters, {1 - share:.1%} of the operations, "
        "at most 4 chunks in flight"
    )
    # the second stage works all the time but for the first unit's forward and the last one's backward on the first
    ours, whole = (2 * (units * slow + fast) / (units * (slow + fast)) - 1 for units in (16, 4))
    assert bubble == (
        f"bubble: {ours:.1%} of the working time, {whole:.1%} over whole sequences (simulated with each stage's "
        "operations)"
    )


@pytest.mark.parametrize(("accumulation", "warned"), [(1, True), (2, True), (4, False)])
def test_too_few_micro_batches_for_a_memory_that_spans_the_model_are_said(accumulation, warned):
    _, lines = described([1, 1, 1, 1], accumulation, **RECURRENT)
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == warned
    for line in warnings:
        assert line.startswith(f"warning: {accumulation} micro-batches cannot keep 4 stages busy: a memory that spans")
        assert line.endswith("; use at least 4 micro-batches")
    assert not [line for line in described([1, 1, 1, 1], accumulation)[1] if line.startswith("warning")]
