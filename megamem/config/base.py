"""The base class of every configuration model."""

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """A frozen configuration section. Unknown keys are refused; the docstring under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, protected_namespaces=()
    )
