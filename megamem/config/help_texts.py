"""The help texts of configuration fields, read from the classes' source where they are shown.

Pydantic would read them whenever a class is made, which takes longer than all else that making the classes does.
"""

import ast
import inspect
import textwrap
from itertools import pairwise

from pydantic import BaseModel


def help_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the help text of each field of a model: the docstring under it, in one line, else its `description`.

    The docstring is that of the class, else of its nearest base that has one. Without either there is no entry, as
    where a class that was made at run time has no source.
    """
    found = {name: field.description for name, field in model.__pydantic_fields__.items() if field.description}
    for part in reversed(model.__mro__):
        if issubclass(part, BaseModel) and part is not BaseModel:
            found |= _own_texts(part)
    return found


def _own_texts(part: type) -> dict[str, str]:
    """Return the docstrings under the annotated names of one class."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    except (OSError, TypeError):  # made at run time
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
