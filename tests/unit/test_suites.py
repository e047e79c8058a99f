"""Suites: what they ask, where their data come from, and how answers become figures with standard errors."""

import json
import math
import random
import re
import sys
import types
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import yaml

pytest.importorskip("lm_eval")

from megamem.cli.suites import DATA, NAMES
from megamem.config.evaluation import SuiteName, TasksConfig
from megamem.errors import ConfigError, DataError, DependencyError
from megamem.evaluation.suites.babilong import BABILONG
from megamem.evaluation.suites.base import generated_task, open_definition, read_documents
from megamem.evaluation.suites.commonsense import COMMONSENSE, METRICS, PERPLEXITY
from megamem.evaluation.suites.longbench import LONGBENCH
from megamem.evaluation.suites.recall import RECALL, SETS, contains, cut_context, places_of, prompt_of
from megamem.evaluation.suites.registry import SUITES
from megamem.evaluation.suites.result import (
    NOT_ASKED,
    SuiteResult,
    TaskScore,
    mean_and_error,
    ratio_and_error,
    read_suites,
    suite_table,
    write_suite,
)
from megamem.evaluation.suites.ruler import RULER
from megamem.evaluation.suites.run import choose_suites, open_suite
from tests.unit.suite_helpers import Scripted, setting_of, write_haystack


def test_configuration_and_registry_have_the_same_suites():
    assert set(get_args(SuiteName)) == set(SUITES)
    assert TasksConfig(suites=["recall"]).suites == ("recall",)
    with pytest.raises(ConfigError, match="suite telepathy: no such suite; there are commonsense"):
        choose_suites(["telepathy"], SUITES)


class TestFigures:
    def test_mean_and_ratio_have_the_errors_of_samples(self):
        draws = np.random.default_rng(0)
        values = draws.normal(size=50)
        mean, error = mean_and_error(values)
        assert (mean, error) == pytest.approx((values.mean(), values.std(ddof=1) / math.sqrt(50)))
        tops, below = draws.uniform(1, 2, 4000), draws.uniform(3, 5, 4000)
        ratio, error = ratio_and_error(tops, below)
        # the jackknife, another estimate of the same error: they agree within a few parts in a thousand
        left_out = (tops.sum() - tops) / (below.sum() - below)
        jackknife = math.sqrt(3999 / 4000 * ((left_out - left_out.mean()) ** 2).sum())
        assert ratio == pytest.approx(tops.sum() / below.sum())
        assert error == pytest.approx(jackknife, rel=5e-3)
        assert mean_and_error([3.0]) == (3.0, None)

    def result(self, **changes):
        scores = (TaskScore("one", "acc", 40.0, 3.0, 20), TaskScore("two", "acc_norm", 60.0, 4.0, 20))
        options = {
            "scores": scores,
            "missing": {}, "limit": 20, "differs": "limit-20", "averaged": True, "seconds": 1.5, "step": 7, **changes,
        }  # fmt: skip
        return SuiteResult("commonsense", "model", **options)

    def test_the_mean_over_tasks(self):
        result = self.result()
        assert result.average == 50.0
        assert result.average_stderr == pytest.approx(2.5)
        assert result.figures() == {
            "commonsense.one.acc": 40.0, "commonsense.two.acc_norm": 60.0, "commonsense.average": 50.0,
        }  # fmt: skip
        assert self.result(missing={"three": "gone"}).average is None, "a mean over other tasks cannot be compared"
        assert self.result(averaged=False).average is None
        assert self.result(independent=False).average_stderr is None
        assert result.line() == "average 50.00 ± 2.50, step 7, at most 20 documents of each task"
        assert suite_table(result).row_count == 3

    def test_what_was_asked_is_said(self):
        whole, few, part = self.result(limit=None, differs=""), self.result(), self.result(differs="only-arc-limit-20")
        assert (whole.asked, few.asked) == ("", "at most 20 documents of each task")
        assert part.asked == "asked only-arc-limit-20"
        assert suite_table(whole).title == "commonsense: model"
        assert suite_table(part).title == "commonsense: model, asked only-arc-limit-20"
        assert part.line().endswith("step 7, asked only-arc-limit-20")

    def test_a_perplexity_beyond_a_float_is_kept_in_json_that_all_can_read(self, tmp_path):
        score = TaskScore("wiki", "word_perplexity", math.inf, math.nan, 3)
        path = write_suite(tmp_path, self.result(scores=(score,)))
        strict = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
        assert strict["scores"] == [{**vars(score), "value": None, "stderr": None}]
        (read,) = read_suites(tmp_path)
        assert read.scores == (replace(score, stderr=None),)

    def test_results_are_kept_in_the_run_s_folder(self, tmp_path):
        whole, part = self.result(limit=None, differs=""), self.result(differs="only-one-limit-20")
        earlier = self.result(limit=None, differs="", step=3, seconds=9.0)
        for result in (part, self.result(), whole, earlier):
            write_suite(tmp_path, result)
        assert {path.name for path in (tmp_path / "suites").iterdir()} == {
            "commonsense-only-one-limit-20-step-7.json", "commonsense-limit-20-step-7.json", "commonsense-step-7.json",
            "commonsense-step-3.json",
        }  # fmt: skip
        assert read_suites(tmp_path) == [whole, self.result(), part], "of several steps the last one"
        begun, later = (self.result(limit=None, differs="", missing={"three": NOT_ASKED}, step=step) for step in (7, 8))
        assert write_suite(tmp_path, begun).name == "commonsense-step-7-unfinished.json", "what is whole stays"
        assert read_suites(tmp_path) == [whole, self.result(), part]
        write_suite(tmp_path, later)
        assert read_suites(tmp_path) == [whole, later, self.result(), part]
        assert later.line() == "one 40.00 ± 3.00, two 60.00 ± 4.00, step 8, 2 of 3 tasks so far"
        write_suite(tmp_path, whole)
        assert not (tmp_path / "suites" / "commonsense-step-7-unfinished.json").exists()
        (tmp_path / "suites" / "commonsense-step-8-unfinished.json").unlink()
        (tmp_path / "suites" / "commonsense-step-7.json").write_text("{}")
        assert read_suites(tmp_path) == [earlier, self.result(), part]

    def test_what_a_setting_leaves_out(self, tmp_path):
        assert setting_of(tmp_path).differs == ""
        setting = setting_of(tmp_path, lengths=(512, 1024), limit=6, only=("arc", "piqa"), max_length=256)
        assert setting.differs == "only-arc-piqa-lengths-512-1024-max-length-256-limit-6"


class TestRecall:
    def test_prompts_of_each_form(self, tmp_path):
        setting = setting_of(tmp_path)
        keyed = {"text": "Rome. Mayor: Bo.\nSummary of information above: x\nmayor:", "key": "mayor", "value": "Bo"}
        assert prompt_of(keyed, SETS["swde"], 2048, setting) == "Rome. Mayor: Bo. Mayor:"
        asked = {"context": "[PAR] The sky is blue.", "question": "The sky is", "answers": ["blue"]}
        assert prompt_of(asked, SETS["triviaqa"], 2048, setting) == "The sky is blue. The sky is"
        lines = {"context": "The sky is blue.", "question": "\nQuestion: What is blue?\nAnswer:", "answers": ["sky"]}
        assert prompt_of(lines, SETS["squad"], 2048, setting) == "The sky is blue.\nQuestion: What is blue?\nAnswer:"
        whole = {"text": "The sky is blue. The sky is ", "value": "blue"}
        assert prompt_of(whole, SETS["squad"], 2048, setting) == "The sky is blue. The sky is"
        published = {**whole, "context": "The sky is blue.", "question": "What is blue?", "answers": ["sky"]}
        assert prompt_of(published, SETS["squad"], 2048, setting) == "The sky is blue. The sky is"

    def test_contexts_are_cut_around_the_answer(self, tmp_path):
        setting = setting_of(tmp_path)
        text = " ".join(f"w{i}" for i in range(400))
        cut = cut_context(text, [text.index("w200")], True, 150, setting).split()
        assert len(cut) == 100
        assert cut[0] == "w150"
        assert cut_context(text, [text.index("w200")], False, 150, setting).split()[0] == "w0"
        assert cut_context(text, [], True, 150, setting).split()[-1] == "w399"
        assert cut_context(text, [text.index("w5")], True, 450, setting) == text

    def test_places_that_are_asked_about(self):
        """The earlier of key and value; the first answer that the text holds."""
        keyed = {"key": "mayor", "value": "Bo"}
        assert places_of(keyed, "Rome. Its Mayor: Bo.", SETS["fda"]) == [10, 17]
        asked = {"answers": ["", "Ann", "Bo"]}
        assert places_of(asked, "Bo and Ann", SETS["nq"]) == [7]
        assert places_of(asked, "no one", SETS["nq"]) == []

    def test_right_is_what_contains_an_answer(self):
        document = {"answers": ["New York", "NYC"]}
        assert contains(document, [" it is new york."]) == {"contains": 1.0}
        assert contains(document, [" it is York."]) == {"contains": 0.0}

    def test_a_suite_from_a_folder(self, tmp_path):
        (tmp_path / "recall").mkdir()
        documents = [
            {"context": f"Box {i} holds a cat{i}.", "question": f"Box {i} holds a", "answers": [f"cat{i}"]}
            for i in range(8)
        ]
        for name in ("drop", "nq"):
            text = "".join(f"{json.dumps(document)}\n" for document in documents)
            (tmp_path / "recall" / f"{name}.jsonl").write_text(text)
        suite = open_suite(RECALL, setting_of(tmp_path, lengths=(512, 1024), limit=6, only=("drop_512", "nq")))
        model = Scripted(answer=lambda prompt: " CAT1, and more")
        kept = []
        result = suite.run(model, "scripted", 3, kept.append)
        assert [score.task for score in result.scores] == ["drop_512", "nq_512", "nq_1024"]
        assert [(len(each.scores), each.missing) for each in kept] == [
            (1, {"nq_512": "not asked yet", "nq_1024": "not asked yet"}), (2, {"nq_1024": "not asked yet"}),
        ]  # fmt: skip
        assert (result.missing, result.independent) == ({}, False)
        assert [score.value for score in result.scores] == pytest.approx([100 / 6] * 3)
        assert result.scores[0].stderr == pytest.approx(100 * np.std([1, 0, 0, 0, 0, 0], ddof=1) / math.sqrt(6))
        assert model.requests[0] == (
            "Box 0 holds a cat0. Box 0 holds a", {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
        )  # fmt: skip

    def test_what_is_missing_is_said_in_a_line(self, tmp_path, monkeypatch):
        monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no")))
        (tmp_path / "recall").mkdir()
        with pytest.raises(DataError, match=r"no task can be asked; swde: .*ConnectionError.*recall/swde\.jsonl"):
            open_suite(RECALL, setting_of(tmp_path))
        (tmp_path / "recall" / "drop.jsonl").write_text('{"context": "a", "question": "b", "answers": ["c"]}\n')
        opened = open_suite(RECALL, setting_of(tmp_path))
        assert [line.name for line, _ in opened.tasks] == ["drop_2048"]
        assert set(opened.missing) == {"swde_2048", "fda_2048", "squad_2048", "triviaqa_2048", "nq_2048"}
        (tmp_path / "recall" / "drop.jsonl").write_text('{"context": "a"}\nnothing\n')
        with pytest.raises(DataError, match=r"drop\.jsonl:2: is no JSON object"):
            read_documents(tmp_path / "recall" / "drop.jsonl")

    @pytest.mark.parametrize(
        ("document", "length", "message"),
        [
            ({"context": "a", "answers": ["c"]}, 512, r"drop: .*drop\.jsonl: a document without 'question'"),
            ({"context": "a", "question": "b"}, 512, r"drop: .*drop\.jsonl: a document without 'value'"),
            ({"context": "a", "question": "b", "answers": "Paris"}, 512, r"answers: 'Paris' is no list of texts"),
            ({"context": "a", "question": "b", "answers": {"text": ["c"]}}, 512, r"answers: .* is no list of texts"),
            ({"context": "a", "question": "b", "answers": [" "]}, 512, r"drop\.jsonl: no document has an answer"),
            ({"context": "a", "question": "b", "answers": ["c"]}, 50, r"50 tokens have no room for a context; give"),
        ],
    )
    def test_what_cannot_be_asked_is_said_in_a_line(self, tmp_path, document, length, message):
        (tmp_path / "recall").mkdir()
        (tmp_path / "recall" / "drop.jsonl").write_text(json.dumps(document))
        with pytest.raises(DataError, match=message):
            open_suite(RECALL, setting_of(tmp_path, lengths=(length,), only=("drop",)))


class TestKnownTasks:
    @pytest.fixture
    def folder(self, tmp_path):
        """Task files for the suite's names over a question of our own, of which one answer is longer."""
        rows = [{"text": "What is wet?", "choices": ["rain of the sky", "fire"], "label": i % 2} for i in range(4)]
        data = tmp_path / "data.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        for name, (metric, _) in METRICS.items():
            form = {
                "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
                "doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}", "metric_list": [{"metric": metric}],
            }  # fmt: skip
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(form))
        return tmp_path

    def test_common_sense_takes_each_task_s_metric(self, folder):
        suite = open_suite(COMMONSENSE, setting_of(folder))
        # a nat for each letter: by sums the short choice wins, by letters nobody does and the first is taken
        result = suite.run(Scripted(score=lambda context, choice: -float(len(choice.encode()) - 1)), "scripted")
        assert [score.task for score in result.scores] == list(METRICS)
        assert [score.metric for score in result.scores] == [metric for metric, _ in METRICS.values()]
        assert {score.value for score in result.scores} == {50.0}
        assert result.average == pytest.approx(50.0)
        assert result.missing == {}

    def test_perplexities_and_their_errors(self, folder):
        form = {
            "task": "wikitext", "dataset_path": "json", "test_split": "test", "doc_to_text": "",
            "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}, "doc_to_target": "{{text}}",
            "output_type": "loglikelihood_rolling", "metric_list": [{"metric": "word_perplexity"}],
        }  # fmt: skip
        (folder / "wikitext.yaml").write_text(yaml.safe_dump(form))
        suite = open_suite(PERPLEXITY, setting_of(folder, only=("wikitext",)))
        result = suite.run(Scripted(score=lambda context, text: -6.0), "scripted")
        # three words of two nats each
        assert result.scores[0].value == pytest.approx(math.exp(2))
        assert result.scores[0].stderr == pytest.approx(0, abs=1e-9)

    def test_no_task_of_the_name(self, folder):
        with pytest.raises(ConfigError, match="suite commonsense: no task begins with chess"):
            open_suite(COMMONSENSE, setting_of(folder, only=("chess",)))
        assert choose_suites(["commonsense", "ruler"], SUITES, ["arc", "niah_single_1_512"], [512]) == [
            COMMONSENSE,
            RULER,
        ]
        with pytest.raises(
            ConfigError,
            match=r"^--only \(evaluation.tasks.only\) pica: no task of commonsense begins so; there is lambada_openai",
        ):
            choose_suites(["commonsense"], SUITES, ["arc", "pica"])

    def test_lengths_are_nothing_to_tasks_without_them(self, folder):
        suite = open_suite(COMMONSENSE, setting_of(folder, lengths=(512,), only=("arc",)))
        assert suite.setting.differs == "only-arc"

    def test_a_task_without_the_suite_s_metric(self, folder):
        form = yaml.safe_load((folder / "piqa.yaml").read_text())
        (folder / "piqa.yaml").write_text(yaml.safe_dump({**form, "metric_list": [{"metric": "acc_norm"}]}))
        suite = open_suite(COMMONSENSE, setting_of(folder))
        assert suite.missing == {"piqa": "piqa: its metric_list lacks acc, the suite's metric"}


@pytest.fixture
def scorers(monkeypatch):
    """Stands in for the packages that LongBench's scores import; classification uses none of them."""
    for name, parts in {"jieba": {}, "fuzzywuzzy": {"fuzz": None}, "rouge": {"Rouge": None}}.items():
        module = types.ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)


class TestLongBench:
    def test_files_of_its_archive_are_read(self, tmp_path, scorers):
        (tmp_path / "longbench").mkdir()
        document = {
            "input": "Where is Rome?", "context": "Examples.", "answers": ["City"], "all_classes": ["City", "Animal"],
        }  # fmt: skip
        (tmp_path / "longbench" / "trec.jsonl").write_text(f"{json.dumps(document)}\n" * 2)
        suite = open_suite(LONGBENCH, setting_of(tmp_path, only=("longbench_trec",)))
        answers = iter([" City", " Animal"])
        model = Scripted(answer=lambda prompt: next(answers))
        (score,) = suite.run(model, "scripted").scores
        assert (score.task, score.value, score.documents) == ("longbench_trec", 50.0, 2)
        assert model.requests[0][0].endswith("Examples.\nWhere is Rome?")

    def test_answers_have_to_fit_into_a_window(self, tmp_path, scorers):
        (tmp_path / "longbench").mkdir()
        document = {"input": "x", "context": "y", "answers": ["z"], "all_classes": ["z"]}
        for name in ("trec", "gov_report"):
            (tmp_path / "longbench" / f"{name}.jsonl").write_text(json.dumps(document))
        setting = setting_of(tmp_path, only=("longbench_trec", "longbench_gov"), max_length=512)
        assert open_suite(LONGBENCH, setting).missing == {
            "longbench_gov_report": "longbench_gov_report: writes 512 tokens; --max-length 512 has no room"
        }

    def test_what_is_missing_is_said_in_a_line(self, tmp_path, monkeypatch, scorers):
        monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no")))
        with pytest.raises(
            DataError, match=r"longbench_trec: its data .*; put trec\.jsonl of LongBench's data\.zip in"
        ):
            open_suite(LONGBENCH, setting_of(tmp_path, only=("longbench_trec",)))


def test_a_definition_may_need_packages(tmp_path):
    (tmp_path / "scores.py").write_text('raise ImportError("pip install jieba")\n')
    (tmp_path / "own.yaml").write_text("task: own\ndoc_to_text: !function scores.text\n")
    with pytest.raises(DependencyError, match="own: pip install jieba"):
        open_definition(tmp_path / "own.yaml", "own", "")


def test_ruler_is_asked_and_scored(tmp_path):
    write_haystack(tmp_path)
    setting = setting_of(tmp_path, lengths=(1024,), limit=3, only=("niah_single", "niah_multivalue"))
    suite = open_suite(RULER, setting)

    def answer(prompt):
        """Return all numbers of the text: what is asked for is among them."""
        return " ".join(word.strip(".") for word in prompt.split() if word.strip(".-")[:1].isalnum())

    result = suite.run(Scripted(answer=answer), "scripted")
    assert {score.task: score.value for score in result.scores} == {
        f"niah_{name}_1024": 100.0 for name in ("single_1", "single_2", "single_3", "multivalue")
    }
    nothing = suite.run(Scripted(answer=lambda prompt: " 12"), "scripted")
    assert {score.value for score in nothing.scores} == {0.0}
    assert nothing.average is None, "a mean over some of the tasks cannot be compared"


def test_ruler_needs_texts(tmp_path):
    with pytest.raises(
        DataError, match=r"haystack: no texts to hide needles or stories in; put them as \*\.txt in .*haystack"
    ):
        open_suite(RULER, setting_of(tmp_path, lengths=(1024,), limit=1, only=("niah_single_2",)))


def test_babilong_takes_lm_evals_prompts(tmp_path):
    """Two examples in front, the story in the book, the question; an answer that holds the room is right."""
    write_haystack(tmp_path)
    suite = open_suite(BABILONG, setting_of(tmp_path, lengths=(0, 600), limit=2, only=("babilong_qa1",)))

    def answer(prompt):
        """Follow the last person that is asked about."""
        person = prompt.rstrip("?").split()[-1]
        story = prompt.split("Alan is shop.")[1]
        moves = re.findall(rf"{person} [a-z ]*to the (\w+)\.", story)
        return f" The most recent location of {person} is {moves[-1]}."

    model = Scripted(answer=answer)
    result = suite.run(model, "scripted")
    assert {score.task: score.value for score in result.scores} == {"babilong_qa1_0": 100.0, "babilong_qa1_600": 100.0}
    assert model.requests[0][0].startswith("I will give you context with the facts")


def test_a_generated_task_is_lm_evals(tmp_path):
    form = {"output_type": "generate_until", "doc_to_text": "{{x}}", "doc_to_target": "{{y}}"}
    task = generated_task("own", [{"x": "a", "y": str(random.Random(0).random())}], form)
    assert task.task_name == "own"
    assert len(task.eval_docs) == 1


def test_the_commands_names_are_those_of_the_configuration():
    assert get_args(SuiteName) == NAMES
    assert TasksConfig().folder == DATA


def test_texts_that_are_no_utf8(tmp_path):
    write_haystack(tmp_path)
    (tmp_path / "haystack" / "latin.txt").write_bytes("Käse".encode("latin-1"))
    with pytest.raises(DataError, match=r"haystack/latin\.txt: cannot be read as UTF-8 text"):
        open_suite(RULER, setting_of(tmp_path, lengths=(1024,), limit=1, only=("niah_single_2",)))
