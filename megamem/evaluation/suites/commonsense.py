"""Language modeling and common sense: zero-shot tasks as recurrent models' papers report them.

Metrics are those of Table 1 in "Memory Caching: RNNs with Growing Memory", which follows "Gated Delta Networks" (Yang
et al., 2024): `acc_norm` (by the characters of a choice) for HellaSwag and ARC-challenge, `acc` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megamem.evaluation.suites.base import Setting, Suite, SuiteTask, definitions, open_definition

if TYPE_CHECKING:
    from lm_eval.api.task import Task

METRICS = {
    "lambada_openai": ("acc", "lambada/lambada_openai.yaml"),
    "piqa": ("acc", "piqa/piqa.yaml"),
    "hellaswag": ("acc_norm", "hellaswag/hellaswag.yaml"),
    "winogrande": ("acc", "winogrande/default.yaml"),
    "arc_easy": ("acc", "arc/arc_easy.yaml"),
    "arc_challenge": ("acc_norm", "arc/arc_challenge.yaml"),
    "social_iqa": ("acc", "siqa/siqa.yaml"),
    "boolq": ("acc", "super_glue/boolq/default.yaml"),
}
"""Metric and lm-eval's definition of each task, by lm-eval's name, in the order of the papers' tables."""
PERPLEXITIES = {
    "wikitext": ("word_perplexity", "wikitext/wikitext.yaml"),
    "lambada_openai": ("perplexity", "lambada/lambada_openai.yaml"),
}


def known_task(name: str, definition: str, setting: Setting) -> Task:
    """Open one of lm-eval's tasks, over the data in `setting.data` where that folder has a file for it.

    Raises: DataError saying what to put where.
    """
    own = setting.data / f"{name}.yaml"
    if own.is_file():
        return open_definition(own, name, f"{own} names them: fetch them again")
    where = f"`megamem tasks fetch {setting.data}` brings what packages hold, or put a task file there as {own.name}"
    return open_definition(definitions() / definition, name, where)


def _lines(known: dict[str, tuple[str, str]], scale: float, _: Sequence[int]) -> Sequence[SuiteTask]:
    """Return the lines of a suite of lm-eval's tasks."""
    return [
        SuiteTask(name, metric, partial(known_task, name, definition), scale)
        for name, (metric, definition) in known.items()
    ]


COMMONSENSE = Suite("commonsense", partial(_lines, METRICS, 100.0))
PERPLEXITY = Suite("perplexity", partial(_lines, PERPLEXITIES, 1.0), averaged=False)
