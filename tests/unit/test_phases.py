"""Phases of a run as configuration: where they begin, what each reads, and what is refused in one line."""

from __future__ import annotations

import pytest

from megamem.config.load import dump_yaml, parse_config
from megamem.config.run import RunConfig
from megamem.data.feeder import Feeder
from megamem.errors import ConfigError, DataError
from megamem.training.checks import open_feeders, steps_of
from megamem.training.phases import phase_after, phases_of, samples_after
from tests.unit.data_helpers import make_shards

LONGER = {"from_step": 4, "sequence_length": 32, "batch_tokens": 64, "micro_batch_size": 1}


def tree(*phases, **sections):
    """A run of 10 steps of 4 rows of 16 tokens, in chunks of 4."""
    training = {"steps": 10, "batch_tokens": 64, "micro_batch_size": 2, "phases": list(phases)}
    return {
        "name": "case",
        "model": {"layers": 2, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4},
        "data": {"sources": "none", "sequence_length": 16, **sections.pop("data", {})},
        "training": {**training, **sections.pop("training", {})},
        **sections,
    }


def config(*phases, **sections):
    return parse_config(RunConfig, tree(*phases, **sections), "file")


def test_each_phase_is_a_run_of_its_own_and_names_only_what_changes():
    first, second, third = config(LONGER, {"from_step": 7, "sources": ["other"], "bptt_chunks": 2}).phases
    assert [phase.training.phases for phase in (first, second, third)] == [()] * 3
    assert [phase.data.sequence_length for phase in (first, second, third)] == [16, 32, 32]
    assert [phase.training.micro_batch_size for phase in (first, second, third)] == [2, 1, 1]
    assert [phase.data.sources[0].path for phase in (first, second, third)] == ["none", "none", "other"]
    assert [phase.bptt_chunks for phase in (first, second, third)] == [4, 8, 2]
    assert [phase.global_rows for phase in (first, second, third)] == [4, 2, 2]
    assert {phase.steps for phase in (first, second, third)} == {10}


def test_a_run_without_phases_is_one():
    run = config()
    (only,) = phases_of(run)
    assert only.config == run
    assert (only.first_step, only.end, only.first_sample) == (0, 10, 0)


def test_beginnings_in_tokens_are_steps_of_the_phases_before():
    run = config({"from_tokens": 192, "batch_tokens": 128}, {"from_tokens": 192 + 256, "sequence_length": 64})
    assert run.phase_starts == (0, 3, 5)


def test_a_resolved_configuration_loads_back():
    run = config(LONGER, {"from_tokens": 7 * 64, "sources": [{"path": "a", "weight": 2}, "b"]})
    import yaml

    assert parse_config(RunConfig, yaml.safe_load(dump_yaml(run)), "file") == run


def test_the_order_goes_on_until_the_data_change():
    """A larger batch reads on; other lengths or sources have an order of their own."""
    larger = {"from_step": 2, "batch_tokens": 128}
    longer = {"from_step": 5, "sequence_length": 32}
    again = {"from_step": 8, "batch_tokens": 64}
    phases = phases_of(config(larger, longer, again))
    assert [phase.first_sample for phase in phases] == [0, 8, 0, 12]
    assert [(phase.first_step, phase.end) for phase in phases] == [(0, 2), (2, 5), (5, 8), (8, 10)]
    assert [phase_after(phases, step).number for step in range(11)] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [samples_after(phases, step) for step in (0, 2, 3, 5, 6, 8, 10)] == [0, 8, 16, 32, 36, 44, 48]


def test_every_phase_reads_on_from_all_before():
    """Two steps of four rows, then three of eight, then four again."""
    phases = phases_of(config({"from_step": 2, "batch_tokens": 128}, {"from_step": 5, "batch_tokens": 64}))
    assert [phase.first_sample for phase in phases] == [0, 8, 8 + 3 * 8]


def test_a_larger_batch_reads_on_where_the_smaller_ones_ended(tmp_path):
    source = make_shards(tmp_path, (200, 300, 250), name="train", seed=0)
    data = config(data={"sources": [str(source)]}).data
    small = Feeder(data, chunk_size=4, global_rows=4, micro_batch_size=4)
    large = Feeder(data, chunk_size=4, global_rows=8, micro_batch_size=8, first_sample=4)
    both = [small.batch(step) for step in (1, 2)]
    batch = large.batch(0)
    assert batch.sample_ids == tuple(range(4, 12)) == both[0].sample_ids + both[1].sample_ids
    assert batch.tokens.tolist() == [
        [*one, *two] for one, two in zip(both[0].tokens.tolist(), both[1].tokens.tolist(), strict=True)
    ]


def test_a_budget_of_tokens_is_counted_phase_by_phase(tmp_path):
    source = str(make_shards(tmp_path, (200, 300, 250), name="train", seed=0))
    larger, padded = {"from_step": 2, "batch_tokens": 128}, {"from_step": 5, "batch_tokens": 64}
    model = {"layers": 2, "hidden_size": 8, "heads": 2, "vocab_size": 512, "chunk_size": 4}
    run = config(larger, padded, data={"sources": [source]}, model=model)
    # 2 steps of 64, 3 of 128, then 64 each, as long as it takes
    assert [steps_of(run, tokens) for tokens in (1, 64, 65, 128, 129, 256, 257, 512, 513, 512 + 64 * 20)] == [
        1, 1, 2, 2, 3, 3, 4, 5, 6, 25,
    ]  # fmt: skip


REFUSALS = {
    "no beginning": ([{"batch_tokens": 128}], {}, "training.phases.0: give either from_step or from_tokens"),
    "two beginnings": (
        [{"from_step": 1, "from_tokens": 64, "batch_tokens": 128}], {},
        "training.phases.0: give either from_step or from_tokens",
    ),
    "nothing": ([{"from_step": 1}], {}, "training.phases.0: changes nothing; name sources, sequence_length"),
    "within a step": (
        [{"from_tokens": 100, "batch_tokens": 128}], {},
        "training.phases.0.from_tokens 100 lies within step 2; the nearest ends of steps are 64 and 128",
    ),
    "backwards": (
        [LONGER, {"from_step": 4, "batch_tokens": 128}], {},
        "training.phases.1 begins after step 4, but the phase before it after step 4",
    ),
    "after the end": (
        [{"from_step": 10, "batch_tokens": 128}], {},
        "training.phases.0 begins after step 10, but the run ends after step 10",
    ),
    "a length that chunks do not divide": (
        [{"from_step": 4, "sequence_length": 30}], {},
        "training.phases.0 (after step 4): data.sequence_length 30 is not divisible by model.chunk_size 4",
    ),
    "a batch of no whole sequences": (
        [LONGER, {"from_step": 6, "sequence_length": 128}], {},
        "training.phases.1 (after step 6): training.batch_tokens 64 is not a multiple of data.sequence_length 128",
    ),
    "streams": ([LONGER], {"data": {"feeding": "streams"}}, "lanes of data.feeding streams cannot change"),
    "a budget": (
        [LONGER], {"training": {"steps": None, "tokens": 640}}, "give training.steps instead of training.tokens",
    ),
    "a source twice": (
        [{"from_step": 4, "sources": ["a", "a"]}], {}, "training.phases.0 (after step 4): sources: a is listed twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    phases, sections, said = REFUSALS[case]
    with pytest.raises(ConfigError) as caught:
        config(*phases, **sections)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_data_of_a_phase_are_said_to_be_its(tmp_path):
    source = str(make_shards(tmp_path, (200, 300, 250), name="train", seed=0))
    phases = [{"from_step": 4, "sequence_length": 32}, {"from_step": 6, "sources": [f"{tmp_path}/books"]}]
    run = config(*phases, data={"sources": [source]}, model=tree()["model"] | {"vocab_size": 4096})
    with pytest.raises(DataError, match=r"^training\.phases\.1: .*/books: no such shard folder"):
        open_feeders(run, dp_rank=0, dp_size=1)
