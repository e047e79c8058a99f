"""All suites by name."""

from __future__ import annotations

from megamem.evaluation.suites.babilong import BABILONG
from megamem.evaluation.suites.base import Suite
from megamem.evaluation.suites.commonsense import COMMONSENSE, PERPLEXITY
from megamem.evaluation.suites.longbench import LONGBENCH
from megamem.evaluation.suites.recall import RECALL
from megamem.evaluation.suites.ruler import RULER

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (COMMONSENSE, RECALL, RULER, LONGBENCH, BABILONG, PERPLEXITY)
}
