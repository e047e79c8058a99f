"""What the tests of trained models run on each rank, and the tasks they use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from tests.unit.data_helpers import text_of

TASKS = ("megamem_choice", "megamem_rolling", "megamem_until")


def write_tasks(folder: Path) -> Path:
    """lm-eval tasks of the three kinds over local JSON files."""
    folder.mkdir()
    texts = [text_of(words, seed) for seed, words in enumerate((12, 30, 5, 60))]
    rows = {
        "choice": [{"text": t, "choices": ["memory", "gate of the", "x"], "label": i % 3} for i, t in enumerate(texts)],
        "rolling": [{"text": text_of(words, 7)} for words in (10, 150, 300)],
        "until": [{"text": t, "answer": "memory"} for t in texts],
    }
    forms = {
        "choice": {
            "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_target": "{{label}}",
            "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "until": {
            "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }  # fmt: skip
    for name, form in forms.items():
        data = folder / f"{name}.json"
        data.write_text("\n".join(map(json.dumps, rows[name])))
        common = {
            "task": f"megamem_{name}", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | form))
    return folder


def figures(results: dict[str, Any]) -> dict[str, float]:
    """The numbers of lm-eval's results."""
    return {
        f"{task}/{metric}": float(value)
        for task, found in results.items()
        for metric, value in found.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def tasks_under(layouts: dict[str, dict[str, Any]], checkpoint: str, tasks: str) -> dict[str, Any]:
    """lm-eval on the live model of an engine that has read a checkpoint: figures by layout, on rank 0."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from checkpoints.folder import open_checkpoint
    from checkpoints.resume import load_training_state
    from megamem.evaluation.evaluator import Evaluator
    from megamem.evaluation.harness import HarnessModel
    from megamem.pipeline.engine import build_engine
    from megamem.training.build import open_tokenizer, start_topology
    from megamem.training.checkpointing import cpu_group

    found = {}
    for name, tree in layouts.items():
        config = parse_config(RunConfig, tree, name)
        topology = start_topology(config)
        engine = build_engine(config, topology)
        load_training_state(engine, open_checkpoint(Path(checkpoint)), cpu_group(60))
        evaluator = Evaluator(engine.stage, topology, rows=3)
        model = HarnessModel(evaluator, open_tokenizer(config), config.data.sequence_length)
        manager = TaskManager(include_path=tasks, include_defaults=False)
        results = simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
        found[name] = None if results is None else figures(results["results"])
    return found
