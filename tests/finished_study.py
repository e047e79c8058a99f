"""A study whose runs have ended, without running any: configurations, results and metrics of a known law."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megamem.runs.result import RunResult, write_result
from megamem.study.collect import planned_figures
from megamem.study.config import StudyConfig
from megamem.study.grid import PlannedRun, load_study, planned_runs, study_folder
from megamem.study.journal import Journal
from megamem.study.laws import fitted
from megamem.study.laws.fit import Law, fit_law
from megamem.study.report import write_report

RUN = {
    "name": "small",
    "model": {"layers": 2, "hidden_size": 16, "heads": 2, "vocab_size": 64, "chunk_size": 8},
    "data": {"sources": ["shards"], "sequence_length": 16},
    "training": {"steps": 64, "batch_tokens": 64, "precision": "fp32"},
    "parallel": {"device": "cpu"},
    "logging": {"wandb": {"mode": "disabled"}},
}
STUDY: dict[str, Any] = {
    "name": "scaling",
    "run": "run.yaml",
    "seeds": [0, 1],
    "axes": {
        "size": {
            "small": {},
            "medium": {"model.hidden_size": 20},
            "large": {"model.hidden_size": 24},
            "huge": {"model.hidden_size": 32},
        },
        "memory": {
            "none": {},
            "elastic": {"model.memory": [{"layers": [1], "mixer": {"kind": "elastic_memory", "order": 4}}]},
        },
    },
    "tables": [
        {"name": "losses", "title": "Losses <b>&</b> sizes", "figure": "val_loss", "rows": "memory", "columns": "size",
         "paper": {"none": {"small": 2.5}}, "source": "a paper"},
    ],
    "laws": [
        {"name": "loss", "title": "Loss by size and tokens", "kind": "power", "points": "validation", "per": "memory",
         "x": ["non_embedding_parameters", "training_tokens"]},
        {"name": "last", "title": "Final loss by size", "kind": "power", "x": ["parameters"], "per": "memory"},
        {"name": "best", "title": "Best size", "kind": "iso_flop", "points": "validation", "x": ["parameters"],
         "per": "memory", "budgets": [1.15e8, 1.9e8, 1e30]},
        {"name": "taken", "title": "Tokens", "kind": "tokens_to_loss", "points": "validation", "per": "memory",
         "against": "none"},
        {"name": "memory_size", "title": "Size of the memory", "kind": "power", "x": ["memory_floats"]},
    ],
}  # fmt: skip
LAWS = {"none": Law(1.5, (40.0, 27.0), (0.4, 0.5)), "elastic": Law(1.5, (40.0, 21.6), (0.4, 0.5))}
"""Over non-embedding parameters and training tokens."""
NOISE = 0.001


def write_study(folder: Path, **changes: Any) -> StudyConfig:
    """The study's files in `folder`, nothing run."""
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    tree = {**STUDY, "folder": str(folder / "studies"), **changes}
    (folder / "study.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_study(folder / "study.yaml")


def finished_study(folder: Path, **changes: Any) -> StudyConfig:
    """The same with results: all runs done but the last, which failed half way."""
    study = write_study(folder, **changes)
    runs = planned_runs(study)
    (study_folder(study) / "logs").mkdir(parents=True)
    journal = Journal(study_folder(study))
    for number, run in enumerate(runs):
        journal.began(run.name, "trained")
        failed = number == len(runs) - 1
        write_run(run, 100 + number, failed)
        if failed:
            log = study_folder(study) / "logs" / f"{run.name}.log"
            log.write_text("step 32/64  loss 3\nmegamem: <script>alert(1)</script> loss is not finite\n")
        journal.ended(run.name, "trained", 5 if failed else 0)
    return study


def quick_report(study: StudyConfig) -> tuple[str, Path]:
    """`write_report`, its laws resampled a quarter as often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitted, "fit_law", partial(fit_law, resamples=50))
        return write_report(study)


def write_run(run: PlannedRun, seed: int, failed: bool) -> None:
    """Metrics of every eighth step, and the result of a run that did not fail."""
    generator, law = np.random.default_rng(seed), LAWS[run.labels["memory"]]
    size = planned_figures(run.config)["non_embedding_parameters"]
    run.folder.mkdir(parents=True)

    def loss(step: int) -> float:
        return float(law([[size, step * 64]])[0] * np.exp(generator.normal(0, NOISE)))

    lines = []
    for step in range(8, 33 if failed else 65, 8):
        lines.append({"step": step, "tokens": step * 64, "loss": loss(step) + 0.02})
        if step < 64:
            lines.append({"step": step, "tokens": step * 64, "val_loss": loss(step)})
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not failed:
        write_result(run.folder, RunResult(str(run.folder), 64, 64 * 64, 1000.0, (0.5, 0.75), {"val_loss": loss(64)}))
