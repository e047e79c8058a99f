"""Help texts of configuration fields."""

from pydantic import Field, create_model

from megamem.config.base import ConfigModel
from megamem.config.help_texts import help_texts


class Plain(ConfigModel):
    """A section."""

    rows: int = 1
    """Rows of a batch,
    all of them."""
    silent: int = 2
    described: int = Field(default=3, description="In the field itself.")


class Narrow(Plain):
    """A section with a meaning of its own for a field."""

    rows: int = 4
    """Rows of a narrow batch."""


def test_a_text_is_the_docstring_under_the_field_or_its_description() -> None:
    assert help_texts(Plain) == {"rows": "Rows of a batch, all of them.", "described": "In the field itself."}


def test_a_class_inherits_texts_and_may_have_its_own() -> None:
    assert help_texts(Narrow) == {"rows": "Rows of a narrow batch.", "described": "In the field itself."}


def test_a_class_without_source_has_those_of_its_bases() -> None:
    made = create_model("Made", __base__=Plain, more=(int, 5))
    assert help_texts(made) == help_texts(Plain)
