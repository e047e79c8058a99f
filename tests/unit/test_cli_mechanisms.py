"""`megamem mechanisms` names everything that a configuration may name by its kind."""

from __future__ import annotations

from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.config.model import ARCHITECTURES, MIXERS
from megamem.config.objective import OBJECTIVES


def test_every_kind_and_field_is_listed() -> None:
    result = CliRunner().invoke(app, ["mechanisms"])
    assert result.exit_code == 0
    for registry in (MIXERS, ARCHITECTURES, OBJECTIVES):
        for kind, config in registry.kinds().items():
            assert f"  {kind}  " in result.output
            fields = [name for name in config.__pydantic_fields__ if name != "kind"]
            assert all(f"    {name} = " in result.output for name in fields), kind
