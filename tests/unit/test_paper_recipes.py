"""Models that are compared have equal sizes, and recipes say which of their numbers a paper states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megamem.costs.parameters import parameter_counts
from tests.unit.shipped import SHIPPED, shipped

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("size", ["760m", "1.3b"])
def test_compared_models_have_equal_parameters(size: str) -> None:
    """Within 1 % of the Transformer++, whatever their mixers add: what is compared is the mixer."""
    counts = {name: parameter_counts(shipped(name).model)["total"] for name in SHIPPED if name.endswith(f"-{size}")}
    plain = counts[f"transformer-{size}"]
    assert len(counts) > 15
    assert {name: total for name, total in counts.items() if abs(total / plain - 1) > 0.01} == {}


@pytest.mark.parametrize("size", ["760m", "1.3b"])
def test_samba_is_the_published_one(size: str) -> None:
    """A recurrent layer and one of attention in turn; the attention sees 2,048 tokens, half of the training length."""
    model = shipped(f"samba-{size}").model
    kinds = [model.mixer_at(layer).kind for layer in range(model.layers)]
    assert kinds == ["ssd", "sliding_attention"] * (model.layers // 2)
    assert {model.mixer_at(layer).window for layer in range(1, model.layers, 2)} == {2048}


PAPER_RECIPES = {
    "elastic_memory": "data: sequence_length seed; training: tokens batch_tokens seed; "
    "optimizer: lr warmup_ratio betas eps weight_decay grad_clip",
    "memory_caching_760m": "data: sequence_length; training: tokens batch_tokens; optimizer: lr weight_decay",
    "memory_caching_1.3b": "training: tokens; optimizer: lr",
    "wikitext103": "training: steps batch_tokens; optimizer: lr min_lr_ratio",
    "enwik8": "data: sequence_length; training: steps batch_tokens; "
    "optimizer: lr min_lr_ratio warmup_steps betas eps",
    "fineweb_edu": "data: sequence_length; training: steps batch_tokens; optimizer: lr warmup_steps decay_steps",
    "infinity_former_gpt2": "data: sequence_length; training: tokens batch_tokens; optimizer: lr new_parameters_lr",
}  # fmt: skip
"""Recipes that are a paper's, each with the numbers that the paper states."""


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_numbers_that_a_paper_does_not_state_say_so(name: str) -> None:
    stated, found, section = set(), set(), ""
    for part in PAPER_RECIPES[name].split("; "):
        head, keys = part.split(": ")
        stated |= {f"{head}.{key}" for key in keys.split()}
    for line in (CONFIGS / "recipes" / f"{name}.yaml").read_text().splitlines():
        if entry := re.match(r"(\w+):", line):
            section = entry[1]
        if number := re.match(r" +(\w+): \[?[\d.][^#]*# (.*)", line):
            key, comment = f"{section}.{number[1]}", number[2]
            found.add(key)
            assert ("not stated" in comment) == (key not in stated), line
    assert stated <= found


@pytest.mark.parametrize("size", ["760m", "1.3b"])
def test_both_published_rates_are_named(size: str) -> None:
    """Memory Caching has one in its Table 5 and another in the text of its appendix B."""
    text = (CONFIGS / "recipes" / f"memory_caching_{size}.yaml").read_text()
    assert "of Table 5" in text
    assert "4e-4" in text
