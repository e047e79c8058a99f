"""The text of RULER's single-needle tasks, against recorded text and against the generator in lm-eval."""

import importlib
import importlib.util
import random
import sys
import types
from functools import partial
from pathlib import Path

import nltk
import pytest

from megamem.data.tasks.ruler import (
    ADJECTIVES,
    DEPTHS,
    NOISE,
    NOUNS,
    hide_in_noise,
    hide_in_text,
    split_sentences,
    write_example,
)
from megamem.evaluation.suites.ruler import FORMS, write_needles

SENTENCES = 'I ran. Was it far? "Not at all!" he said (so it was). Then we slept'
TEXT = SENTENCES.split()
LONG = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text().split()


def opening(kind):
    return (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )


def question(kind, key):
    return (
        f"\nWhat is the special magic {kind} for {key} mentioned in the provided text? "
        f"The special magic {kind} for {key} mentioned in the provided text is"
    )


@pytest.mark.parametrize(
    ("seed", "value", "hide", "key", "context", "answer"),
    [
        (
            0,
            "number",
            partial(hide_in_noise, lines=2),
            "round-boat",
            f"One of the special magic numbers for round-boat is: 8056020.\n{NOISE}\n{NOISE}",
            "8056020",
        ),
        (
            1,
            "number",
            partial(hide_in_text, words=TEXT),
            "firm-glove",
            "I ran. Was it far? One of the special magic numbers for firm-glove is: 2058756. "
            '"Not at all!" he said (so it was). Then we slept',
            "2058756",
        ),
        (
            2,
            "uuid",
            partial(hide_in_text, words=TEXT[:9]),
            "clever-shadow",
            "I ran. One of the special magic uuids for clever-shadow is: d5e34124-5c6e-4337-95ba-2bdd177219d3. "
            'Was it far? "Not at all!" he',
            "d5e34124-5c6e-4337-95ba-2bdd177219d3",
        ),
    ],
)
def test_recorded_text(seed, value, hide, key, context, answer):
    """What lm-eval 0.4.13 wrote from these draws."""
    prompt = opening(value) + context + question(value, key)
    assert write_example(random.Random(seed), value, hide) == (prompt, answer)


@pytest.fixture(scope="module")
def generator():
    """lm-eval's generator, with our lists of words and our sentences in the place of those that it would fetch."""
    words = types.ModuleType("wonderwords")
    words.RandomWord = type(
        "RandomWord", (), {"_categories": {"nouns": NOUNS, "adjectives": ADJECTIVES, "verbs": ["run"]}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wonderwords", words)
        patch.setattr(nltk.data, "find", lambda name: name)
        module = importlib.import_module("lm_eval.tasks.ruler.prepare_niah")
        patch.setattr(module, "cached_sent_tokenize", split_sentences)
        yield module
    del sys.modules["lm_eval.tasks.ruler.prepare_niah"]


@pytest.fixture(scope="module")
def template(generator):
    """The template of lm-eval's tasks, read from the source: the module imports more than is installed here."""
    folder = Path(generator.__file__).parent
    source = (folder / "niah_utils.py").read_text()
    namespace = {}
    line = next(line for line in source.splitlines() if line.startswith("TEMPLATE = "))
    exec(line, namespace)
    return namespace["TEMPLATE"]


@pytest.mark.parametrize("value", ["number", "uuid"])
@pytest.mark.parametrize(("haystack", "units"), [("noise", 1), ("noise", 40), ("text", 1), ("text", 25), ("text", 900)])
def test_same_draws_give_the_text_of_lm_eval(generator, template, value, haystack, units):
    """Of 60 seeds each, prompt and answer, character by character; the prompt's last part is lm-eval's `gen_prefix`."""
    noise = haystack == "noise"
    hide = partial(hide_in_noise, lines=units) if noise else partial(hide_in_text, words=LONG[:units])
    for seed in range(60):
        random.seed(seed)
        prompt, answers, key = generator.generate_input_output(
            units,
            NOISE if noise else LONG,
            type_haystack="repeat" if noise else "essay",
            num_needle_k=1,
            type_needle_k="words",
            num_needle_v=1,
            type_needle_v=f"{value}s",
            template=template,
        )
        prefix = f"The special magic {value} for {key} mentioned in the provided text is"
        assert write_example(random.Random(seed), value, hide) == (f"{prompt} {prefix}", answers[0])


@pytest.mark.parametrize("name", FORMS)
def test_same_draws_give_the_needles_of_lm_eval(generator, template, name):
    """Every retrieval task, 30 seeds each: prompt, the beginning of the answer, answers."""
    form = FORMS[name]
    haystack = {"noise": NOISE, "text": LONG, "needles": generator.get_haystack("needle")}[form.haystack]
    kind = {"noise": "repeat", "text": "essay", "needles": "needle"}[form.haystack]
    for seed in range(30):
        random.seed(seed)
        prompt, answers, query = generator.generate_input_output(
            120, haystack, type_haystack=kind, num_needle_k=form.keys, type_needle_k=f"{form.key}s",
            num_needle_v=form.values, type_needle_v=f"{form.value}s", num_needle_q=form.queries, template=template,
        )  # fmt: skip
        found = write_needles(random.Random(seed), form, 120, LONG)
        assert (found["prompt"], found["answers"]) == (prompt, answers)
        assert query in found["question"]


def test_the_parts_are_those_of_lm_eval(generator):
    """The 40 depths and the line of noise; the first and last depth are both ends of the text."""
    assert generator.DEPTHS == DEPTHS
    assert (DEPTHS[0], DEPTHS[-1]) == (0, 100)
    assert generator.get_haystack("repeat") == NOISE


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "No." (Then he left.) Good', ['He said "No."', "(Then he left.)", "Good"]),
        ("Pi is 3.14 or so... Yes.", ["Pi is 3.14 or so...", "Yes."]),
        ("word", ["word"]),
        ("", []),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text) == sentences
    assert " ".join(sentences) == text
