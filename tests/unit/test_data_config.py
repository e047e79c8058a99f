"""The data section of a configuration."""

import pytest
from pydantic import ValidationError

from megamem.config.data import DataConfig, SourceConfig
from megamem.config.help_texts import help_texts


def test_every_field_is_documented():
    for model in (DataConfig, SourceConfig):
        texts = help_texts(model)
        for name in model.model_fields:
            assert texts[name], name
            assert "\n" not in texts[name], name


def test_paths_may_stand_for_sources():
    assert DataConfig(sources="a").sources == (SourceConfig(path="a", weight=1.0),)
    mixed = DataConfig(sources=["a", {"path": "b", "weight": 2}], validation="c")
    assert [(source.path, source.weight) for source in mixed.sources] == [("a", 1.0), ("b", 2.0)]
    assert mixed.validation == ("c",)


def test_dumped_and_read_back():
    config = DataConfig(sources=["a", {"path": "b", "weight": 2}], validation=["c"], tokenizer="t")
    assert DataConfig(**config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": []}, "at least 1 item"),
        ({"sources": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"path": "a", "weight": float("inf")}]}, "finite"),
        ({"sources": [""]}, "at least 1 character"),
        ({"sources": [{"path": "a", "wieght": 1}]}, "Extra inputs are not permitted"),
        ({"sources": ["a", "a"]}, "sources: a is listed twice; give it one entry and a larger weight"),
        ({"validation": ["b", "a"]}, "validation: a is also a training source; hold out other documents"),
        ({"feeding": "stream"}, "'sequences' or 'streams'"),
        (
            {"feeding": "streams", "documents": "pack"},
            "documents: pack is for feeding sequences; streams take join or pad",
        ),
        ({"feeding": "streams", "documents": "drop"}, "documents: drop is for feeding sequences"),
        (
            {"documents": "pad", "reset": "exact"},
            "reset: exact is for documents join; with documents pad each starts fresh",
        ),
        ({"short_documents": "pad"}, "Extra inputs are not permitted"),
        ({"end_of_document": -1}, "greater than or equal to 0"),
        ({"sequence_length": 1}, "greater than or equal to 2"),
        ({"prefetch": 0}, "greater than or equal to 1"),
        ({"cache_gib": 0}, "greater than 0"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"sources": 3}, "valid tuple"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**({"sources": ["a"]} | changes))
