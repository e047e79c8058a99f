"""Every refusal of `RunConfig` in one line that names field, value and what would be valid; its arithmetic."""

from pathlib import Path

import pytest
import yaml

from megamem.config.load import dump_yaml, merge, parse_config
from megamem.config.run import RunConfig
from megamem.errors import ConfigError

TREE = {
    "name": "case",
    "model": {"layers": 2, "hidden_size": 48, "heads": 6, "kv_heads": 2, "vocab_size": 64, "chunk_size": 16},
    "data": {"sources": "none", "sequence_length": 64},
    "training": {"steps": 10, "batch_tokens": 512},
}


def config(**sections):
    return parse_config(RunConfig, merge(TREE, sections), "file")


REFUSALS = {
    "both budgets": (
        {"training": {"tokens": 100}}, ["training: give either steps or tokens"],
    ),
    "no budget": ({"training": {"steps": None}}, ["training: give either steps or tokens"]),
    "chunk longer than sequence": (
        {"model": {"chunk_size": 128}}, ["model.chunk_size 128 is longer than data.sequence_length 64"],
    ),
    "sequence not divisible by chunk": (
        {"model": {"chunk_size": 24}}, ["data.sequence_length 64 is not divisible by model.chunk_size 24"],
    ),
    "bptt": ({"training": {"bptt_chunks": 3}}, ["training.bptt_chunks 3 does not divide the 4 chunks"]),
    "a window in which a memory is written but not read": (
        {"training": {"bptt_chunks": 1}, "model": {"memory": [{"layers": [1], "mixer": "melodi"}]}},
        ["training.bptt_chunks 1", "melodi (model layer 1)", "use at least 2"],
    ),
    "layer by layer in a pipeline": (
        {"training": {"window_order": "layers"}, "parallel": {"pp": 2}},
        ["training.window_order layers does not go with parallel.pp 2; use chunks"],
    ),
    "another architecture layer by layer": (
        {"training": {"window_order": "layers"}, "model": {"architecture": "recurrent_memory"}},
        ["training.window_order layers does not go with model.architecture recurrent_memory; use chunks"],
    ),
    "side rows layer by layer": (
        {"training": {"window_order": "layers"}, "model": {"mixer": "lamemo"}},
        ["training.window_order layers does not go with the side rows of lamemo (model layer 0); use chunks"],
    ),
    "dropout layer by layer": (
        {"training": {"window_order": "layers"}, "model": {"dropout": 0.1}},
        ["training.window_order layers does not go with model.dropout 0.1; use chunks"],
    ),
    "learned positions layer by layer": (
        {"training": {"window_order": "layers"}, "model": {"positions": "learned", "max_positions": 64}},
        ["training.window_order layers does not go with model.positions learned; use chunks"],
    ),
    "stride": (
        {"evaluation": {"sliding_stride": 5}}, ["evaluation.sliding_stride 5 does not divide model.chunk_size 16"],
    ),
    "batch not of sequences": (
        {"training": {"batch_tokens": 100}}, ["training.batch_tokens 100 is not a multiple of data.sequence_length 64"],
    ),
    "micro batch": (
        {"training": {"micro_batch_size": 3}}, ["training.micro_batch_size 3 does not divide the 8 sequences"],
    ),
    "profile after the end": (
        {"logging": {"profile_steps": [3, 11]}}, ["logging.profile_steps [3, 11]", "10 of the run"],
    ),
    "profile backwards": ({"logging": {"profile_steps": [3, 2]}}, ["logging.profile_steps [3, 2]"]),
    "heads and TP": ({"parallel": {"tp": 4}}, ["model.heads 6 is not divisible by parallel.tp 4"]),
    "key/value heads and TP": ({"parallel": {"tp": 3}}, ["model.kv_heads 2 is not divisible by parallel.tp 3"]),
    "MLP and TP": (
        {"parallel": {"tp": 2}, "model": {"ffn_size": 101}}, ["model.ffn_size 101 is not divisible by parallel.tp 2"],
    ),
    "vocabulary and TP": (
        {"parallel": {"tp": 2}, "model": {"vocab_size": 65}}, ["model.vocab_size 65 is not divisible by parallel.tp 2"],
    ),
    "sequence parallel": (
        {"parallel": {"tp": 2, "sequence_parallel": True}, "model": {"chunk_size": 1}},
        ["parallel.sequence_parallel: model.chunk_size 1 is not divisible by parallel.tp 2"],
    ),
    "sequence parallel and an odd number of tokens with as many rows": (
        {
            "parallel": {"tp": 2, "sequence_parallel": True}, "training": {"bptt_chunks": 2},
            "model": {"chunk_size": 1, "mixer": {"kind": "melodi", "form": "rising", "summaries": 1}},
        },
        ["parallel.sequence_parallel: model.chunk_size 1 is not divisible by parallel.tp 2"],
    ),
    "sequence parallel and an odd number of rows": (
        {
            "parallel": {"tp": 2, "sequence_parallel": True}, "training": {"bptt_chunks": 2},
            "model": {"chunk_size": 8, "mixer": {"kind": "melodi", "form": "rising", "summaries": 3}},
        },
        [
            "parallel.sequence_parallel: model.chunk_size 8 with 3 rows beside the tokens is not divisible by "
            "parallel.tp 2"
        ],
    ),
    "BF16 without ZeRO": (
        {"parallel": {"zero_stage": 0}},
        ["parallel.zero_stage 0", "training.precision bf16", "use zero_stage 1, 2 or 3, or precision fp32"],
    ),
    "ZeRO 3 with tied embeddings": (
        {"parallel": {"zero_stage": 3}, "model": {"tie_embeddings": True}},
        ["parallel.zero_stage 3", "model.tie_embeddings true", "use zero_stage 2 or untied"],
    ),
    "ZeRO 3 with exact resets": (
        {"parallel": {"zero_stage": 3}, "data": {"documents": "join", "reset": "exact"}},
        ["parallel.zero_stage 3 does not go with data.reset exact", "use zero_stage 2"],
    ),
    "exact resets beside memory rows": (
        {
            "model": {"architecture": {"kind": "recurrent_memory", "memory_tokens": 2}},
            "data": {"documents": "join", "reset": "exact"},
            "training": {"micro_batch_size": 2},
        },
        ["data.reset exact with the 4 rows", "needs training.micro_batch_size 1, parallel.pp 1", "data.documents pack"],
    ),
    "streams that never forget": (
        {
            "model": {"memory": [{"layers": [1], "mixer": {"kind": "full_attention"}}]},
            "data": {"feeding": "streams", "documents": "join"},
        },
        [
            "data.feeding streams with data.reset none: full_attention (model layer 1) would keep every chunk of an",
            "bound its max_chunks, or set data.reset exact",
        ],
    ),
    "ZeRO 3 recomputing mixers": (
        {"parallel": {"zero_stage": 3}, "training": {"recompute": "mixer"}, "data": {"documents": "pack"}},
        ["parallel.zero_stage 3", "training.recompute mixer", "use zero_stage 2 or recompute false"],
    ),
    "no such part": (
        {"training": {"recompute": "attention"}},
        ["training.recompute: should be false, true, 'mixer' or 'mlp' (got 'attention')"],
    ),
    "ZeRO 3 recomputing streams": (
        {"parallel": {"zero_stage": 3}, "training": {"recompute": True}, "data": {"feeding": "streams"}},
        ["parallel.zero_stage 3", "training.recompute true", "use zero_stage 2 or recompute false"],
    ),
    "more stages than layers": (
        {"parallel": {"pp": 3}}, ["parallel.pp 3 is more than the 2 layers of the model (model.layers)"],
    ),
    "no stages": ({"parallel": {"pp": 0}}, ["parallel.pp: should be greater than 0 (got 0)"]),
    "ZeRO 2 and stages": (
        {"parallel": {"pp": 2, "zero_stage": 2}},
        ["parallel.zero_stage 2 does not go with parallel.pp 2", "use zero_stage 0 or 1"],
    ),
    "ZeRO 3 and stages": (
        {"parallel": {"pp": 2, "zero_stage": 3}},
        ["parallel.zero_stage 3 does not go with parallel.pp 2", "use zero_stage 0 or 1"],
    ),
    "placement of too few stages": (
        {"parallel": {"pp": 2, "placement": [2]}},
        ["parallel.placement [2] names 1 stages, but parallel.pp is 2"],
    ),
    "placement of too many stages": (
        {"parallel": {"placement": [1, 1]}},
        ["parallel.placement [1, 1] names 2 stages, but parallel.pp is 1"],
    ),
    "placement of nothing": (
        {"parallel": {"placement": []}}, ["parallel.placement [] names 0 stages, but parallel.pp is 1"],
    ),
    "placement of too few layers": (
        {"model": {"layers": 4}, "parallel": {"pp": 2, "placement": [1, 2]}},
        ["parallel.placement [1, 2] places 3 layers, but the model has 4 (model.layers)"],
    ),
    "placement of too many layers": (
        {"parallel": {"pp": 2, "placement": [1, 2]}},
        ["parallel.placement [1, 2] places 3 layers, but the model has 2 (model.layers)"],
    ),
    "placement without layers on a stage": (
        {"parallel": {"pp": 2, "placement": [2, 0]}}, ["parallel.placement [2, 0] leaves stage 1 without layers"],
    ),
    "negative placement": (
        {"parallel": {"pp": 2, "placement": [3, -1]}},
        ["parallel.placement: [3, -1] is neither flops, parameters or measured nor a list of layers per stage"],
    ),
    "unknown placement": (
        {"parallel": {"pp": 2, "placement": "even"}},
        ["parallel.placement: 'even' is neither flops, parameters or measured nor a list of layers per stage"],
    ),
    "record without stages": (
        {"logging": {"record_step": 3}}, ["logging.record_step 3 needs a pipeline, but parallel.pp is 1"],
    ),
    "record after the end": (
        {"parallel": {"pp": 2}, "logging": {"record_step": 11}},
        ["logging.record_step 11", "is beyond the 10 steps of the run"],
    ),
    "record before the start": (
        {"parallel": {"pp": 2}, "logging": {"record_step": 0}},
        ["logging.record_step: should be greater than 0 (got 0)"],
    ),
    "stall after the collectives": (
        {"parallel": {"timeout_s": 60, "stall_timeout_s": 60}},
        ["parallel.stall_timeout_s 60 must be below parallel.timeout_s 60"],
    ),
    "name": ({"name": "../elsewhere"}, ["name:", "'../elsewhere'"]),
    "empty name": ({"name": ""}, ["name:", "at least 1 character"]),
    "warm-up": ({"optimizer": {"warmup_ratio": 1.0}}, ["optimizer.warmup_ratio: should be less than 1 (got 1.0)"]),
    "warm-up longer than the run": (
        {"optimizer": {"warmup_steps": 11}}, ["optimizer: 11 steps of warm-up and 0 of decay are more than the 10"],
    ),
    "no room for the decay": (
        {"optimizer": {"schedule": "wsd", "warmup_steps": 4, "decay_steps": 7}},
        ["optimizer: 4 steps of warm-up and 7 of decay are more than the 10 of the run"],
    ),
    "kept after the end": (
        {"checkpoint": {"keep_steps": [5, 12]}}, ["checkpoint.keep_steps: 12 is beyond the 10 steps of the run"],
    ),
    "beta": ({"optimizer": {"betas": [0.9, 1.0]}}, ["optimizer.betas.1: should be less than 1 (got 1.0)"]),
    "clip": ({"optimizer": {"grad_clip": -1}}, ["optimizer.grad_clip: should be greater than or equal to 0 (got -1)"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    sections, said = REFUSALS[case]
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    message = str(caught.value)
    assert message.startswith("file: ")
    assert "\n" not in message
    for part in said:
        assert part in message


def test_arithmetic():
    run = config(training={"micro_batch_size": 2, "bptt_chunks": 2}, runs_folder="somewhere")
    assert (run.chunks, run.bptt_chunks, run.global_rows, run.steps) == (4, 2, 8, 10)
    assert [run.accumulation_steps(dp) for dp in (1, 2, 4)] == [4, 2, 1]
    assert run.run_folder == Path("somewhere/case")
    assert config().bptt_chunks == 4


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"pp": 2}},
        {"parallel": {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True}},
        {"parallel": {"pp": 2, "zero_stage": 0}, "training": {"precision": "fp32"}},
        {"parallel": {"pp": 2}, "model": {"tie_embeddings": True}, "training": {"recompute": True, "bptt_chunks": 1}},
        {"parallel": {"pp": 2, "placement": "measured"}},
        {"parallel": {"pp": 2, "placement": "parameters"}},
        {"parallel": {"pp": 2, "placement": [1, 1]}},
        {"parallel": {"pp": 3, "placement": [1, 4, 1]}, "model": {"layers": 6}},
        {"parallel": {"placement": [2]}},
        {"parallel": {"pp": 2}, "logging": {"record_step": 1}},
        {"parallel": {"pp": 2}, "logging": {"record_step": 10}},
        {"parallel": {"zero_stage": 3}},
    ],
    ids=str,
)
def test_stages_that_fit(sections):
    """And they come back from the YAML that is saved with the run."""
    run = config(**sections)
    assert run.parallel.pp == sections["parallel"].get("pp", 1)
    placement = sections["parallel"].get("placement", "flops")
    assert run.parallel.placement == (tuple(placement) if isinstance(placement, list) else placement)
    assert parse_config(RunConfig, yaml.safe_load(dump_yaml(run)), "saved") == run


def test_a_memory_that_is_read_in_its_own_chunk_trains_in_any_window():
    memory = [{"layers": [1], "mixer": {"kind": "melodi", "block": 8}}]
    assert config(model={"memory": memory}, training={"bptt_chunks": 1}).bptt_chunks == 1


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (512, 1), (513, 2), (5120, 10)])
def test_a_token_budget_is_rounded_up(tokens, steps):
    assert config(training={"steps": None, "tokens": tokens}).steps == steps


def test_a_batch_that_data_parallel_ranks_cannot_share():
    run = config(training={"micro_batch_size": 4})
    with pytest.raises(ValueError, match="8 sequences cannot be split into micro-batches of 4 on 3") as caught:
        run.accumulation_steps(3)
    assert str(caught.value).endswith("use a multiple of 12")


def test_configurations_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        config().name = "other"
