"""`megamem mechanisms`: every registered mixer, architecture and objective with its fields."""

from __future__ import annotations

from megamem.cli.output import console, write_line


def mechanisms() -> None:
    """List every registered mixer, architecture and objective with its fields."""
    from megamem.config.help_texts import help_texts
    from megamem.config.model import ARCHITECTURES, MIXERS
    from megamem.config.objective import OBJECTIVES

    for registry in (MIXERS, ARCHITECTURES, OBJECTIVES):
        write_line(f"{registry.noun}s")
        for kind, config in registry.kinds().items():
            console.print(f"  {kind}", style="bold", highlight=False, end="  ")
            write_line((config.__doc__ or "").splitlines()[0])
            texts = help_texts(config)
            for name, field in config.__pydantic_fields__.items():
                if name != "kind":
                    write_line(f"    {name} = {field.default}: {texts.get(name, '')}")
