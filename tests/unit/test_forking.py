"""Requests that share their first tokens: read once, forked, and the same figures as each request read alone."""

import random

import pytest
import torch

from megamem.config.model import ModelConfig
from megamem.evaluation import forking
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.shared_prefixes import Batch, find_groups, plan_batches
from megamem.memory.base import Chunk
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.reader import select_rows
from tests.unit.evaluation_helpers import CHUNK, CPU, MIXERS, TOLERANCE, VOCABULARY, make_stage, model_config

MORE = {
    "titans": {"kind": "titans", "inner_chunk": 4},
    "delta_net": {"kind": "delta_net"},
    "memory_caching": {
        "kind": "memory_caching",
        "memory": {"kind": "linear_attention"},
        "segment": 4,
        "combine": "grm",
    },
    "transformer_xl": {"kind": "transformer_xl", "memory_length": 8},
}


def stage_of(kind):
    """A model with the mechanism in its second layer, in float64."""
    if kind in MIXERS:
        return make_stage(kind)
    tree = model_config("local_attention").model_dump()
    stage = build_stage(
        ModelConfig.model_validate({**tree, "memory": [{"layers": [1], "mixer": MORE[kind]}]}), PlainLinears()
    )
    initialize_parameters(stage, 1)
    return stage.to(torch.float64)


def requests(seed=0, contexts=5, choices=3, length=None):
    """Several contexts with several continuations each, and how many tokens are scored.

    length: of all contexts; each has its own if not given."""
    draws = random.Random(seed)

    def tokens(count):
        return [draws.randrange(VOCABULARY) for _ in range(count)]

    sequences, scored = [], []
    for _ in range(contexts):
        context = tokens(length or draws.randrange(1, 5 * CHUNK))
        for _ in range(choices):
            choice = tokens(draws.randrange(1, 2 * CHUNK))
            sequences.append(context + choice)
            scored.append(len(choice))
    order = list(range(len(sequences)))
    draws.shuffle(order)
    return [sequences[i] for i in order], [scored[i] for i in order]


def slow_logits(stage, tokens):
    """Logits after each token, read one by one from a fresh memory."""
    states, found = stage.initial_states(1, CPU, torch.float64), []
    with torch.no_grad():
        for at, token in enumerate(tokens):
            hidden, states, _ = stage(torch.tensor([[token]]), states, Chunk((at,)))
            found.append(stage.logits(hidden)[0, 0])
    return torch.stack(found)


def slow_score(stage, sequence, count):
    logits = slow_logits(stage, sequence[:-1])[-count:].log_softmax(-1)
    target = torch.tensor(sequence[-count:])
    return float(logits.gather(1, target[:, None]).sum()), bool((logits.argmax(-1) == target).all())


@pytest.mark.parametrize("kind", [*MIXERS, *MORE])
class TestEveryMechanism:
    def test_scores_are_those_of_sequences_read_alone(self, kind):
        stage = stage_of(kind)
        sequences, scored = requests()
        found = Evaluator(stage, rows=4).score(sequences, scored)
        for (nats, likeliest), sequence, count in zip(found, sequences, scored, strict=True):
            expected, expected_flag = slow_score(stage, sequence, count)
            assert nats == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
            assert likeliest == expected_flag
        assert stage.training

    def test_continuations_are_those_of_prompts_read_alone(self, kind):
        stage = stage_of(kind)
        prompts, _ = requests(contexts=3)
        limits = [3 + i % (2 * CHUNK) for i in range(len(prompts))]
        evaluator = Evaluator(stage, rows=4)
        found = evaluator.continue_greedily(prompts, limits)
        alone = [evaluator.generate([p], limit)[0] for p, limit in zip(prompts, limits, strict=True)]
        assert found == alone


@pytest.mark.parametrize("kind", ["elastic_memory", "titans"])
def test_contexts_of_one_length_are_forked_side_by_side(kind):
    """Each request goes on behind its own context, of several that were read in one batch."""
    stage = stage_of(kind)
    sequences, scored = requests(contexts=4, choices=2, length=2 * CHUNK + 1)
    most = [len(sequence) - count - 1 for sequence, count in zip(sequences, scored, strict=True)]
    assert any(batch.shared and len(set(batch.sources)) == 4 for batch in plan_batches(sequences, most, 8))
    found = Evaluator(stage, rows=8).score(sequences, scored)
    for (nats, _), sequence, count in zip(found, sequences, scored, strict=True):
        assert nats == pytest.approx(slow_score(stage, sequence, count)[0], rel=TOLERANCE, abs=TOLERANCE)


def test_the_likeliest_continuation_is_flagged():
    stage = stage_of("elastic_memory")
    evaluator = Evaluator(stage, rows=3)
    prompt = [3, 9, 2]
    (best,) = evaluator.continue_greedily([prompt], [4])
    other = [*best[:3], (best[3] + 1) % VOCABULARY]
    (one, flag), (_, wrong) = evaluator.score([prompt + best, prompt + other], [4, 4])
    assert flag
    assert not wrong
    assert one == pytest.approx(slow_score(stage, prompt + best, 4)[0], rel=TOLERANCE)


def test_continuations_end_with_a_token_and_with_a_stop():
    evaluator = Evaluator(stage_of("elastic_memory"), rows=4)
    prompts, _ = requests(contexts=3)
    free = evaluator.continue_greedily(prompts, [12] * len(prompts))
    end = free[0][2]
    for row, whole in zip(evaluator.continue_greedily(prompts, [12] * len(prompts), end_token=end), free, strict=True):
        assert row == (whole[: whole.index(end) + 1] if end in whole else whole)
    stopped = evaluator.continue_greedily(prompts, [12] * len(prompts), stop=lambda i, new: len(new) == 1 + i % 3)
    assert [len(row) for row in stopped] == [1 + i % 3 for i in range(len(prompts))]


class CountingStage:
    """Counts the tokens that a stage reads."""

    def __init__(self, stage):
        self.read = 0
        stage.register_forward_pre_hook(lambda _, inputs: setattr(self, "read", self.read + inputs[0].numel()))


def test_a_context_with_eight_questions_is_read_once():
    stage = stage_of("elastic_memory")
    draws = random.Random(1)
    contexts = [[draws.randrange(VOCABULARY) for _ in range(100)] for _ in range(4)]
    prompts = [c + [draws.randrange(VOCABULARY) for _ in range(5 + q % 3)] for c in contexts for q in range(8)]
    counter = CountingStage(stage)
    Evaluator(stage, rows=8).continue_greedily(prompts, [2] * len(prompts))
    once = sum(map(len, contexts)) + sum(len(prompt) - 100 for prompt in prompts) + 2 * len(prompts)
    assert once - 2 * len(prompts) <= counter.read <= once + 2 * len(prompts)
    counter.read = 0
    Evaluator(stage, rows=8).score(prompts, [1] * len(prompts))
    assert counter.read <= once


def test_states_are_copied_only_where_several_requests_need_them(monkeypatch):
    """Of texts that share nothing each is read into the states that it goes on with: no memory for two of them."""
    copied = []
    monkeypatch.setattr(forking, "select_rows", lambda *parts: copied.append(parts[2]) or select_rows(*parts))
    stage, alike = make_stage("full_attention"), [[1, 2, 3] * CHUNK + [i] for i in range(5)]
    apart = [[i, *range(2 * CHUNK), i] for i in range(5)]
    scores = [Evaluator(stage, rows=2).score(texts, [1] * 5) for texts in (apart, alike)]
    assert copied == [[0, 0], [0, 0]], "five of one text in batches of two; nobody needs it after the last"
    for texts, found in zip((apart, alike), scores, strict=True):
        for text, (nats, _) in zip(texts, found, strict=True):
            assert nats == pytest.approx(slow_score(stage, text, 1)[0], abs=TOLERANCE)


def test_progress_is_told_within_a_batch():
    """After each call of the model: a watchdog waits for one, not for a batch of long texts."""
    told = []
    evaluator = Evaluator(make_stage("elastic_memory"), rows=2)
    evaluator.score([[1] * (6 * CHUNK), [2] * (6 * CHUNK)], [1, 1], progress=lambda *counts: told.append(counts))
    assert told[-1] == (1, 1)
    assert told[:-1] == [(0, 1)] * (len(told) - 1)
    assert len(told) > 6, "a call for each chunk"
    told.clear()
    evaluator.score([[1, 2, 3]], [1])
    assert not told


@pytest.mark.parametrize(("sequences", "scored"), [([[1, 2]], [2]), ([[1, 2]], [0]), ([[1]], [1])])
def test_what_cannot_be_scored_is_refused(sequences, scored):
    with pytest.raises(ValueError, match="cannot be scored"):
        Evaluator(stage_of("local_attention")).score(sequences, scored)


class TestPlan:
    def test_groups_share_what_they_say_and_hold_everything_once(self):
        sequences, scored = requests(seed=3, contexts=40)
        most = [len(s) - n - 1 for s, n in zip(sequences, scored, strict=True)]
        groups = find_groups(sequences, most)
        assert sorted(i for group in groups for i in group.members) == list(range(len(sequences)))
        for group in groups:
            assert group.shared <= min(most[i] for i in group.members)
            assert len({tuple(sequences[i][: group.shared]) for i in group.members}) == 1

    @pytest.mark.parametrize("spread", [None, 3])
    def test_batches_are_within_their_bounds(self, spread):
        sequences, scored = requests(seed=4, contexts=40)
        most = [len(s) - n - 1 for s, n in zip(sequences, scored, strict=True)]
        batches = plan_batches(sequences, most, 8, spread)
        assert sorted(i for batch in batches for i in batch.members) == list(range(len(sequences)))
        for batch in batches:
            lengths = [len(sequences[i]) for i in batch.members]
            assert len(batch.members) <= 8
            assert spread is None or max(lengths) - min(lengths) <= spread
            for member, source in zip(batch.members, batch.sources, strict=True):
                assert sequences[member][: batch.shared] == sequences[source][: batch.shared]
                assert batch.shared <= most[member]
        assert spread is not None or len(batches) < len(sequences) / 2

    def test_a_group_larger_than_a_batch_keeps_its_prefix(self):
        sequences = [[7] * 50 + [i] for i in range(20)]
        batches = plan_batches(sequences, [49] * 20, 8)
        assert {batch.shared for batch in batches} == {49}
        assert len({batch.sources[0] for batch in batches}) == 1

    def test_a_few_common_tokens_join_nothing(self):
        sequences = [[1, 2, *range(10 * i, 10 * i + 10)] for i in range(1, 5)]
        assert all(len(group.members) == 1 for group in find_groups(sequences, [11] * 4))

    @pytest.mark.parametrize("ranks", [1, 2, 3, 5])
    def test_ranks_share_a_batch(self, ranks):
        batch = Batch(tuple(range(10, 14)), (10, 10, 12, 12), 5)
        parts = [batch.part(rank, ranks) for rank in range(ranks)]
        assert len({len(part.members) for part in parts[:1]}) == 1
        each = -(-4 // ranks)
        own = [part.members for rank, part in enumerate(parts) if rank * each < 4]
        assert [i for members in own for i in members] == list(batch.members)
