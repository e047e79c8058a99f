"""megamem: pretraining of language models with memory, where every memory mechanism is a parallel module.

As a library: `load_config`, `build_model`, `load_model`, `mixer`, `evaluator`, `evaluate`, `generate` and `plan`
(docs/library.md).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamem.api import build_model, evaluate, evaluator, generate, load_config, load_model, mixer, plan

__version__ = "0.1.0"
__all__ = ["build_model", "evaluate", "evaluator", "generate", "load_config", "load_model", "mixer", "plan"]


def __getattr__(name: str) -> object:
    """Import a function of the library when it is first asked for: `import megamem` alone costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'megamem' has no attribute {name!r}")
    from megamem import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """List the names above too, for completion."""
    return sorted([*globals(), *__all__])
