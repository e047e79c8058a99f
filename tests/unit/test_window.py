"""Choosing between the states before and after a step, on the device; the order of a window's tokens."""

import math

import torch

from megamem.config.model import ModelConfig
from megamem.model.stage import build_stage
from megamem.pipeline.window import select_states
from megamem.planning.rank_linears import RankLinears

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def state(value, past, open_tokens=0):
    return {
        "sums": torch.full((2, 3), value),
        "past": [{"keys": torch.full((4, 1), value + i)} for i in range(past)],
        "open": torch.full((open_tokens, 1), value),
    }


def by_component(*states):
    return {f"layers.{layer}": state for layer, state in enumerate(states)}


def leaves(states):
    return [
        tensor.tolist()
        for s in states.values()
        for tensor in (s["sums"], s["open"], *(entry["keys"] for entry in s["past"]))
    ]  # fmt: skip


def test_a_good_step_keeps_the_new_states():
    new = by_component(state(5.0, past=3), state(6.0, past=0))
    assert leaves(select_states(GOOD, new, by_component(state(1.0, past=1), state(2.0, past=0)))) == leaves(new)


def test_a_bad_step_keeps_the_old_ones():
    old = by_component(state(1.0, past=2), state(2.0, past=0, open_tokens=3))
    new = by_component(
        {**state(math.nan, past=0), "past": old["layers.0"]["past"]}, state(math.inf, past=0, open_tokens=3)
    )
    assert leaves(select_states(BAD, new, old)) == leaves(old)


def grown(before, dropped=0):
    """The state after a bad step in which a list lost its first entries and got two more."""
    after = state(math.nan, past=2, open_tokens=2)
    kept = [{"keys": entry["keys"].detach()} for entry in before["past"][dropped:]]
    return {**after, "past": [*kept, *after["past"]]}


def test_what_has_grown_in_a_bad_step_becomes_zeros():
    """Its length is known to the host, whether it is good is not: earlier entries stay, the step's own hold nothing."""
    before = state(1.0, past=1)
    chosen = select_states(BAD, by_component(grown(before)), by_component(before))["layers.0"]
    assert chosen["sums"].tolist() == [[1.0] * 3] * 2
    assert [entry["keys"].tolist() for entry in chosen["past"]] == [[[1.0]] * 4, [[0.0]] * 4, [[0.0]] * 4]
    assert chosen["open"].tolist() == [[0.0]] * 2


def test_integers_count_places_whatever_the_step_was_worth():
    before, after = state(1.0, past=1), state(math.nan, past=1)
    after["past"][0]["filled"] = torch.tensor([1, 0])
    chosen = select_states(BAD, by_component(after), by_component(before))["layers.0"]
    assert chosen["past"][0]["filled"].tolist() == [1, 0]
    assert chosen["past"][0]["keys"].tolist() == [[0.0]] * 4


def test_a_bounded_list_that_has_moved_on_keeps_its_places():
    before = state(1.0, past=3)
    chosen = select_states(BAD, by_component(grown(before, dropped=2)), by_component(before))["layers.0"]
    assert [entry["keys"].tolist() for entry in chosen["past"]] == [[[3.0]] * 4, [[0.0]] * 4, [[0.0]] * 4]


def test_another_document_gets_nothing_of_the_one_before():
    before = state(1.0, past=3)
    chosen = select_states(BAD, by_component(grown(before, dropped=3)), by_component(before))["layers.0"]
    assert [entry["keys"].tolist() for entry in chosen["past"]] == [[[0.0]] * 4, [[0.0]] * 4]


def test_ranks_that_split_tokens_get_their_share_of_each_chunk_of_a_window():
    """Three chunks of four tokens for two ranks: each gets halves of chunks, as it would chunk by chunk."""
    model = ModelConfig(layers=1, hidden_size=8, heads=2, vocab_size=16, chunk_size=4)
    tokens = torch.arange(12)[:, None]
    split = build_stage(model, RankLinears(2, sequence_parallel=True)).in_window_order(tokens, 3)
    assert [half.flatten().tolist() for half in split.chunk(2)] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert torch.equal(build_stage(model, RankLinears(2)).in_window_order(tokens, 3), tokens)
