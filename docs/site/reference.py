"""The pages of the reference: which modules a user calls or extends, page by page. Their text is the docstrings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReferencePage:
    """One page, about some modules."""

    title: str
    about: str
    """Who needs it."""
    modules: tuple[str, ...]


REFERENCE = {
    "reference/library.md": ReferencePage(
        "The library",
        "What `import megamem` offers, and what its functions return.",
        ("megamem.api", "megamem.memory.standalone", "megamem.evaluation.result", "megamem.planning.plan"),
    ),
    "reference/mechanisms.md": ReferencePage(
        "Memory mechanisms",
        "The contract that a mechanism keeps, and what several are built from.",
        (
            "megamem.memory.base", "megamem.config.cost", "megamem.parallel.linears", "megamem.memory.shared.blocks",
            "megamem.memory.shared.block_attention", "megamem.memory.shared.gate", "megamem.memory.shared.queue",
        ),
    ),
    "reference/configuration.md": ReferencePage(
        "Configuration classes",
        "What a mixer, an architecture and an objective declare, how they are registered, and how files are read.",
        (
            "megamem.config.model", "megamem.config.objective", "megamem.config.mup", "megamem.config.registry",
            "megamem.config.run", "megamem.config.data", "megamem.config.load", "megamem.config.recipe",
            "megamem.config.curriculum",
        ),
    ),
    "reference/models.md": ReferencePage(
        "Models",
        "What every architecture and objective is to those who run it.",
        ("megamem.model.stage", "megamem.model.objective", "megamem.pipeline.reader", "megamem.pipeline.train_chunk"),
    ),
    "reference/training.md": ReferencePage(
        "Callbacks, sinks, data and targets",
        "What other packages may bring to a run, by entry points or by subclassing.",
        (
            "megamem.config.extensions", "megamem.training.loop", "megamem.runs.sinks.base", "megamem.data.store",
            "megamem.data.tasks.base", "launchers.target",
        ),
    ),
    "reference/schedules.md": ReferencePage(
        "Schedules",
        "Orders of chunks as data, played through and drawn.",
        ("megamem.pipeline.schedule", "megamem.pipeline.simulate", "megamem.pipeline.gantt"),
    ),
    "reference/trained_models.md": ReferencePage(
        "Trained models",
        "The evaluator, lm-eval, transformers.",
        ("megamem.evaluation.evaluator", "megamem.evaluation.sampling", "megamem.evaluation.losses",
         "megamem.evaluation.harness", "megamem.hf.configuration",
         "megamem.hf.modeling", "megamem.hf.cache"),
    ),
    "reference/errors.md": ReferencePage(
        "Errors", "What is raised for a user to mend.", ("megamem.errors",)
    ),
}  # fmt: skip
"""By place on the site."""


def reference_page(page: ReferencePage) -> str:
    """Return the text of a page, in the form that mkdocstrings fills in."""
    return "\n\n".join((f"# {page.title}", page.about, *(f"::: {module}" for module in page.modules))) + "\n"
