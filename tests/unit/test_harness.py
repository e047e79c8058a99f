"""What a model with lm-eval's interface makes of requests to write on."""

import contextlib
import types

import pytest

pytest.importorskip("lm_eval")

from megamem.errors import ConfigError
from megamem.evaluation.harness import HarnessModel
from megamem.evaluation.sampling import Sampling


class Words:
    """A tokenizer of two words, as far as a model asks for one."""

    eos_id = 0

    def encode(self, text):
        return [1] * len(text.split())

    def decode(self, tokens):
        return " ".join("nine" for _ in tokens)


def test_settings_of_a_request_are_read_as_lm_eval_s_models_do():
    """Each of several draws has a seed of its own, or they would be one draw."""
    asked = []

    def generate(prompts, limit, *, sampling, **_):
        """Keep what is asked for."""
        asked.append((limit, sampling))
        return [[] for _ in prompts]

    evaluator = types.SimpleNamespace(
        generate=generate,
        continue_greedily=lambda prompts, limits, **_: [[9]] * len(prompts),
        reader=types.SimpleNamespace(telling=contextlib.nullcontext),
    )
    settings = [
        {"until": ["."], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_gen_toks": 5},
        {"until": ".", "temperature": 0.7, "max_new_tokens": 6},
        {"do_sample": True, "max_tokens": 7},
        {"do_sample": False, "temperature": 0.7},
        {"until": [], "temperature": 0.0},
    ]
    model = HarnessModel(evaluator, Words(), 512)
    answers = model.generate_until([types.SimpleNamespace(args=("a b", each)) for each in settings])
    assert answers == ["", "", "", "nine", "nine"], "the last two are greedy"
    assert sorted(asked, key=lambda each: each[0]) == [
        (5, Sampling(0.7, 40, 0.9, seed=0)), (6, Sampling(0.7, seed=1)), (7, Sampling(1.0, seed=2)),
    ]  # fmt: skip


def test_a_window_has_to_leave_tokens_for_prompts():
    """Otherwise a prompt would be cut to nothing."""
    asked = types.SimpleNamespace(args=("What is wet?", {"until": ["\n"], "max_gen_toks": 48}))
    model = HarnessModel(types.SimpleNamespace(), Words(), 48)
    with pytest.raises(
        ConfigError, match=r"--max-length 48, .* leaves no token for prompts, as a task writes up to 48"
    ):
        model.generate_until([asked])
