"""Generation in one process, against reading everything from the start again for each token."""

import pytest
import torch

from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.sampling import Sampling
from megamem.memory.base import Chunk
from tests.unit.evaluation_helpers import CHUNK, CPU, MIXERS, VOCABULARY, make_stage

PROMPTS = [[3], [5, 9, 2, 7, 7, 1, 30, 4], list(range(2 * CHUNK + 3)), [1, 2, 3]]
"""Shorter than, as long as and longer than a chunk."""


def slow(stage, prompt, new_tokens):
    """Greedy: the whole text read from a fresh memory, chunk by chunk, for each new token."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(new_tokens):
            states = stage.initial_states(1, CPU, torch.float64)
            for begin in range(0, len(text), CHUNK):
                part = torch.tensor(text[begin : begin + CHUNK])[:, None]
                hidden, states, _ = stage(part, states, Chunk((begin,)))
            text.append(int(stage.logits(hidden[-1:])[0, 0].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("kind", MIXERS)
def test_unequal_prompts_side_by_side_are_continued_as_each_alone(kind):
    stage = make_stage(kind)
    new = Evaluator(stage).generate(PROMPTS, 2 * CHUNK + 1)
    assert new == [slow(stage, prompt, 2 * CHUNK + 1) for prompt in PROMPTS]
    assert stage.training


def test_a_row_ends_with_the_end_token():
    stage = make_stage("elastic_memory")
    free = Evaluator(stage).generate(PROMPTS, 20)
    end = free[0][2]
    found = Evaluator(stage).generate(PROMPTS, 20, end_token=end)
    for row, whole in zip(found, free, strict=True):
        assert row == (whole[: whole.index(end) + 1] if end in whole else whole)
    assert len(found[0]) <= 3


def test_one_of_k_and_a_tiny_share_are_greedy():
    stage = make_stage("elastic_memory")
    greedy = Evaluator(stage).generate(PROMPTS, 5)
    assert Evaluator(stage).generate(PROMPTS, 5, sampling=Sampling(1.0, top_k=1)) == greedy
    assert Evaluator(stage).generate(PROMPTS, 5, sampling=Sampling(1.0, top_p=1e-6)) == greedy


def test_samples_are_those_of_the_seed():
    stage = make_stage("local_attention")
    one, same, other = (Evaluator(stage).generate(PROMPTS, 12, sampling=Sampling(1.5, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_tokens_come_as_often_as_their_probability_says():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = probabilities.log().expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)

    def shares(**options):
        chosen = Sampling(**options).choose(logits, generator)
        return torch.bincount(chosen, minlength=4) / len(chosen)

    # 20,000 draws: standard deviation of a share at most 0.0035
    assert torch.allclose(shares(temperature=1.0), probabilities, atol=0.02)
    assert torch.allclose(shares(temperature=1.0, top_k=2), torch.tensor([4, 3, 0, 0]) / 7, atol=0.02)
    assert torch.allclose(shares(temperature=1.0, top_p=0.69), torch.tensor([4, 3, 0, 0]) / 7, atol=0.02)
    squared = probabilities.square() / probabilities.square().sum()
    assert torch.allclose(shares(temperature=0.5), squared, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1.0}, "temperature -1.0"), ({"top_k": 0}, "top_k 0"), ({"top_p": 0.0}, "top_p 0.0")],
)
def test_senseless_sampling_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(ValueError, match="prompt"):
        Evaluator(make_stage("local_attention")).generate(prompts, 1)


def test_vocabulary_bounds_every_token():
    new = Evaluator(make_stage("local_attention")).generate(PROMPTS, 9, sampling=Sampling(2.0))
    assert all(0 <= token < VOCABULARY for row in new for token in row)
