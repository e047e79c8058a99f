"""A trained model leaves its run: converted, continued, evaluated, started from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import megamem
from checkpoints.folder import checkpoints_in
from checkpoints.trained import open_run
from megamem.cli.main import app
from megamem.errors import MegamemError
from megamem.training.build import held_out_documents
from tests.integration.commands import CHUNK, LENGTH, run_tree, write_config
from tests.integration.model_cases import TASKS, figures, tasks_under, write_tasks
from tests.integration.ranks import Job, command
from tests.snippets import ROOT, run_snippets
from tests.unit.data_helpers import text_of
from tokenization.train import train

pytestmark = pytest.mark.distributed


def invoke(*arguments):
    """stdout of a command that must succeed."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def refused(*arguments):
    """The line with which a command is refused."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(result.exception, MegamemError), (result.exception, result.stdout)
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.fixture(scope="module")
def place(data, tmp_path_factory):
    """Folder with two finished runs: `run` has a memory, `plain` is a Transformer++ with full attention."""
    folder = tmp_path_factory.mktemp("models")
    trees = {"run": run_tree(data, folder / "runs", parallel={"tp": 2})}
    plain = {"mixer": "full_attention", "memory": []}
    trees["plain"] = run_tree(data, folder / "runs", name="plain", parallel={"tp": 2}, model=plain)
    for name, tree in trees.items():
        config = write_config(folder / f"{name}.yaml", tree)
        with Job(folder / f"job-{name}", 2, command, "train", str(config)) as job:
            assert job.codes(90) == [0, 0], job.output(0)
    return folder


@pytest.fixture(scope="module")
def run(place):
    return place / "runs" / "run"


@pytest.fixture(scope="module")
def exported(place, run):
    """(folder, facts)"""
    facts = json.loads(invoke("convert", "to-hf", run, place / "hf", "--json", "--shard-gib", "0.001"))
    return place / "hf", facts


class TestToHf:
    def test_the_folder(self, exported):
        folder, facts = exported
        assert facts["parity"]["max_diff"] <= 1e-5 * facts["parity"]["max_logit"]
        assert facts["parity"]["tokens"] == 4 * CHUNK
        assert facts["evaluation"]["held-out tokens"] > 100
        assert facts == json.loads((folder / "conversion.json").read_text())
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= names

    def test_the_card(self, exported):
        card = (exported[0] / "README.md").read_text()
        assert "`local_attention` at layers 0; `elastic_memory` at layers 1" in card
        assert "for 6 steps = 3,072 tokens of" in card
        assert "perplexity" in card

    def test_the_tokenizer(self, data, exported):
        from transformers import AutoTokenizer

        from tokenization.tokenizer import Tokenizer

        ours, theirs = Tokenizer.load(data / "tokenizer"), AutoTokenizer.from_pretrained(exported[0])
        text = "memory of a chunk, élan — and more\n"
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()
        assert theirs.decode(theirs(text)["input_ids"]) == text
        assert (theirs.eos_token_id, theirs.padding_side) == (ours.eos_id, "left")

    def test_a_plain_transformer_needs_no_megamem(self, place):
        facts = json.loads(invoke("convert", "to-hf", place / "runs" / "plain", place / "llama", "--json"))
        assert facts["architecture"] == "llama"
        assert facts["parity"]["max_diff"] <= 1e-5 * facts["parity"]["max_logit"]
        code = (
            "import sys; from transformers import AutoModelForCausalLM as A; "
            f"m = A.from_pretrained({str(place / 'llama')!r}); print(type(m).__name__, 'megamem' in sys.modules)"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
        assert found.stdout == "LlamaForCausalLM False\n"

    def test_import_needs_no_training_libraries(self):
        code = "import sys, megamem.hf; print([n for n in ('deepspeed', 'megatron') if n in sys.modules])"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.endswith("[]\n")

    def test_bad_input(self, place, run, tmp_path):
        assert "exists already; choose another folder" in refused("convert", "to-hf", run, place)
        unfinished = tmp_path / "step-00000006"
        (newest,) = checkpoints_in(run / "checkpoints")[-1:]
        shutil.copytree(newest.path, unfinished)
        (unfinished / "COMPLETE").unlink()
        assert "was not written to its end (COMPLETE is missing)" in refused("convert", "to-hf", unfinished, "out")
        assert not (tmp_path / "out").exists()
        assert "no complete checkpoint" in refused("convert", "to-hf", tmp_path, "out")
        assert "--dtype int4: give fp32 or bf16" in refused("convert", "to-hf", run, "out", "--dtype", "int4")
        alien = tmp_path / "tokenizer"
        letters = np.random.default_rng(0).choice(list("abcdefgh "), 20_000)
        train(["".join(letters)], 700, alien)
        line = refused("convert", "to-hf", run, tmp_path / "out", "--tokenizer", alien)
        assert "tokens, the model 320; give the tokenizer it was trained with" in line
        train(["".join(letters)], 280, tmp_path / "other")
        line = refused("convert", "to-hf", run, tmp_path / "out", "--tokenizer", tmp_path / "other")
        assert re.search(r"other: is the tokenizer \w{12}, the model was trained with \w{12}; give that one, or", line)


class TestGenerate:
    def test_checkpoint_and_export_say_the_same(self, run, exported):
        prompt = ["--prompt", "memory of the", "--max-new-tokens", str(3 * CHUNK)]
        ours = invoke("generate", run, *prompt)
        theirs = invoke("generate", exported[0], *prompt)
        assert len(ours) > CHUNK
        assert ours.strip() == theirs.strip()

    def test_sampling_is_repeatable(self, run):
        arguments = ["--prompt", "gate", "--temperature", "1", "--top-p", "0.9", "--max-new-tokens", "30", "--seed"]
        assert invoke("generate", run, *arguments, "3") == invoke("generate", run, *arguments, "3")
        assert invoke("generate", run, *arguments, "3") != invoke("generate", run, *arguments, "4")

    def test_bad_input(self, run, exported, tmp_path):
        assert "give either --prompt or --prompt-file" in refused("generate", run)
        assert "the prompt is empty" in refused("generate", run, "--prompt", "")
        assert "cannot be read" in refused("generate", run, "--prompt-file", tmp_path / "gone")
        assert "leaves no token" in refused("generate", run, "--prompt", "a", "--top-p", "0")
        assert "an export brings its own" in refused("generate", exported[0], "--prompt", "a", "--tokenizer", tmp_path)
        broken = tmp_path / "broken"
        shutil.copytree(exported[0], broken)
        for file in broken.glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-100])
        assert "broken: cannot be opened" in refused("generate", broken, "--prompt", "a")


def test_evaluation_of_a_checkpoint_is_that_of_its_run(run):
    found = json.loads(invoke("evaluate", run, "--json").splitlines()[-1])
    at_the_end = json.loads((run / "result.json").read_text())
    for name in ("val_loss", "val_bits_per_byte", "memory_gain", "sliding_perplexity"):
        assert found[name] == pytest.approx(at_the_end[name], rel=1e-5, abs=1e-6), name


def by_two_processes(*arguments):
    """stdout of a command that shares its work out over two processes, which must succeed."""
    words = [sys.executable, "-m", "megamem", *map(str, arguments), "--processes", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_evaluation_by_two_processes_is_that_of_one(run):
    """Held-out documents are shared out; one process prints what both found."""
    one, two = (json.loads(way("evaluate", run, "--json").splitlines()[-1]) for way in (invoke, by_two_processes))
    speed = "evaluation_tokens_per_second"
    assert one.pop(speed) > 0
    assert two.pop(speed) > 0
    assert two.keys() == one.keys()
    for name, value in one.items():
        # sums in float32, in another order
        assert two[name] == (pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value), name


def test_evaluation_may_read_the_memory_otherwise_than_training(run):
    """Elastic Memory sampled elsewhere, and noise in the local context; parameters of another shape are refused."""
    losses = {}
    for override in ("sampling=uniform", "sampling=exponential", "samples=3", "order=4"):
        found = json.loads(invoke("evaluate", run, f"model.memory.0.mixer.{override}", "--json").splitlines()[-1])
        losses[override] = found["beyond_first_chunk_loss"]
    noisy = json.loads(invoke("evaluate", run, "evaluation.corruption.share=1.0", "--json").splitlines()[-1])
    assert len({*losses.values(), noisy["beyond_first_chunk_loss"]}) >= 4
    assert "has shape" in refused("evaluate", run, "model.ffn_size=8")


class TestLibrary:
    """Functions of `import megamem` with trained models, and pages that show them."""

    def test_its_figures_and_texts_are_the_commands(self, run):
        found = megamem.evaluate(run, device="cpu").figures()
        assert found["val_loss"] == pytest.approx(json.loads((run / "result.json").read_text())["val_loss"], rel=1e-5)
        text = megamem.generate(run, "memory of the", 3 * CHUNK)
        arguments = ["--prompt", "memory of the", "--max-new-tokens", str(3 * CHUNK), "--device", "cpu"]
        assert invoke("generate", run, *arguments) == text + "\n"

    def test_an_evaluator_reads_with_runs_exports_and_models_in_hand(self, place, run, exported):
        config = open_run(run).config
        texts, bound = held_out_documents(config), config.evaluation.final_max_tokens
        reports = [
            megamem.evaluator(model, rows=2).losses(texts, max_tokens=bound)
            for model in (run, megamem.load_model(run), exported[0], megamem.load_model(exported[0]))
        ]
        at_the_end = json.loads((run / "result.json").read_text())
        # the same weights in one process in the place of two
        assert reports[0].loss == pytest.approx(at_the_end["val_loss"], rel=1e-5)
        assert all(report.loss == pytest.approx(reports[0].loss, rel=1e-6) for report in reports)
        invoke("convert", "to-hf", place / "runs" / "plain", place / "foreign")
        with pytest.raises(ValueError, match="LlamaForCausalLM: is read by transformers"):
            megamem.evaluator(place / "foreign")

    @pytest.fixture
    def workplace(self, run, exported, tmp_path, monkeypatch):
        """A folder with what the pages name, made the current one."""
        (tmp_path / "runs").mkdir()
        for name, target in {"runs/NAME": run, "OUT": exported[0], "configs": ROOT / "configs"}.items():
            (tmp_path / name).symlink_to(target)
        monkeypatch.chdir(tmp_path)

    def test_the_library_s_page_runs(self, workplace):
        names = run_snippets("docs/library.md")
        assert names["logits"].shape == (256, 2, 4096)
        assert names["more"].shape == (2, 1, 64)
        assert [len(row) for row in names["rows"]] == [20, 20]
        assert names["nats"] < 0

    def test_the_page_on_evaluation_runs(self, workplace):
        assert run_snippets("docs/evaluation.md")["report"].bits_per_byte > 0

    def test_the_page_on_exports_runs(self, workplace, capsys):
        names = run_snippets("docs/huggingface.md")
        assert names["model"].dtype == torch.bfloat16
        assert capsys.readouterr().out.startswith("It was")


class TestTasks:
    @pytest.fixture(scope="class")
    def tasks(self, tmp_path_factory):
        return write_tasks(tmp_path_factory.mktemp("tasks") / "tasks")

    def test_all_ways_give_the_same_numbers(self, data, place, run, exported, tasks, tmp_path):
        """A checkpoint, its export through lm-eval's own model, and the live model under TP 2 and PP 2."""
        common = ["--tasks", ",".join(TASKS), "--include-path", tasks, "--max-length", LENGTH, "--rows", "3"]
        one, other = (figures(json.loads(invoke("evaluate", m, *common, "--json"))) for m in (run, exported[0]))
        assert set(one) >= {"megamem_choice/acc,none", "megamem_rolling/bits_per_byte,none"}
        assert one == pytest.approx(other, rel=1e-5)
        theirs = figures(json.loads(invoke("evaluate", exported[0], *common, "--transformers", "--json")))
        assert one == pytest.approx(theirs, rel=1e-5)
        layouts = {
            "tp2": run_tree(data, tmp_path, parallel={"tp": 2}), "pp2": run_tree(data, tmp_path, parallel={"pp": 2})
        }  # fmt: skip
        (newest,) = checkpoints_in(run / "checkpoints")[-1:]
        with Job(tmp_path / "job", 2, tasks_under, layouts, str(newest.path), str(tasks)) as job:
            ranks = job.results()
        for name in layouts:
            assert ranks[0][name] == pytest.approx(one, rel=1e-5)

    def test_a_suite_on_a_run_its_export_and_by_transformers(self, run, exported, tmp_path):
        """The same figures; those of the run are kept in its folder and shown by `status`."""
        (tmp_path / "recall").mkdir()
        documents = [
            {"context": f"{text_of(40, i // 4)} memory", "question": "gate of the", "answers": ["memory", "e"]}
            for i in range(8)
        ]
        text = "".join(f"{json.dumps(document)}\n" for document in documents)
        (tmp_path / "recall" / "drop.jsonl").write_text(text)
        common = ["--suite", "recall", "--only", "drop", "--data", tmp_path, "--rows", "3", "--json"]
        ways = ([run], [exported[0]], [exported[0], "--transformers"])
        found = [json.loads(invoke("evaluate", *way, *common).splitlines()[-1]) for way in ways]
        assert found[0]["scores"][0]["documents"] == 8
        assert found[0]["scores"] == found[1]["scores"] == found[2]["scores"]
        assert found[0]["step"] == 6
        (shared,) = map(json.loads, by_two_processes("evaluate", run, *common).splitlines())
        assert shared["scores"] == found[0]["scores"]
        found[0] = shared
        assert json.loads((run / "suites" / "recall-only-drop-step-6.json").read_text()) == found[0]
        shown = json.loads(invoke("status", run, "--json").splitlines()[-1])
        assert shown["suites"] == [found[0]]
        assert "suite recall" in invoke("status", run)
        assert "give one of them" in refused("evaluate", run, "--suite", "recall", "--tasks", "piqa")
        assert "no such suite" in refused("evaluate", run, "--suite", "chess")
        assert "expected numbers" in refused("evaluate", run, "--suite", "recall", "--lengths", "4k")
        assert "not in transformers' form" in refused("evaluate", run, "--suite", "recall", "--transformers")
        several = ["--transformers", "--processes", "2"]
        assert "reads in one process" in refused("evaluate", exported[0], "--suite", "recall", *several)

    def test_a_run_asks_a_suite_while_it_trains(self, data, tmp_path):
        """Under two data-parallel ranks, every three steps and at the end."""
        (tmp_path / "recall").mkdir()
        document = {"context": text_of(40, 1), "question": "gate of the", "answers": ["e"]}
        (tmp_path / "recall" / "drop.jsonl").write_text(f"{json.dumps(document)}\n" * 3)
        tasks = {"suites": ["recall"], "every": 3, "limit": 2, "folder": str(tmp_path), "only": ["drop", "fda"]}
        tree = run_tree(data, tmp_path / "runs", name="asked", evaluation={"tasks": tasks})
        config = write_config(tmp_path / "asked.yaml", tree)
        with Job(tmp_path / "job", 2, command, "train", str(config)) as job:
            assert job.codes(90) == [0, 0], job.output(0)
            assert re.search(r"^missing: fda_2048: .*recall/fda.jsonl", job.output(0, "out"), re.MULTILINE)
        folder = tmp_path / "runs" / "asked"
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        asked = [record for record in records if "recall.drop_2048.contains" in record]
        assert [record["step"] for record in asked] == [3, 6]
        final = json.loads((folder / "result.json").read_text())["recall.drop_2048.contains"]
        kept = json.loads((folder / "suites" / "recall-only-drop-fda-step-6.json").read_text())
        assert kept["scores"][0]["value"] == final

    def test_bad_input(self, run, exported, tmp_path):
        assert "no such task" in refused("evaluate", run, "--tasks", "telepathy")
        assert "overrides are for held-out" in refused("evaluate", run, "data.seed=1", "--tasks", "megamem_choice")

    def test_held_out_losses_of_exports_are_those_of_their_checkpoints(self, data, place, run, exported):
        text = [f"data.validation=[{data / 'validation'}]", f"data.tokenizer={data / 'tokenizer'}"]
        if not (place / "llama").exists():
            invoke("convert", "to-hf", place / "runs" / "plain", place / "llama")
        for one, other in ((run, exported[0]), (place / "runs" / "plain", place / "llama")):
            bounds = ["evaluation.final_max_tokens=512", "evaluation.sliding_max_tokens=128", "model.chunk_size=32"]
            ours, theirs = (
                json.loads(invoke("evaluate", model, *text, *bounds, "--json").splitlines()[-1])
                for model in (one, other)
            )
            assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-5)
            assert ours["memory_off_loss"] == pytest.approx(theirs["memory_off_loss"], rel=1e-5)
            assert ours["val_bits_per_byte"] == pytest.approx(theirs["val_bits_per_byte"], rel=1e-5)
        assert "names no held-out text" in refused("evaluate", exported[0])


def test_a_run_starts_from_an_imported_model_with_a_memory_added(data, place, tmp_path):
    """The plain model exported, imported with Elastic Memory at one layer, trained on under TP 2 and PP 2."""
    from transformers import AutoModelForCausalLM

    if not (place / "llama").exists():
        invoke("convert", "to-hf", place / "runs" / "plain", place / "llama")
    memory = "memory=[{layers: [1], mixer: {kind: elastic_memory, order: 8, block: 8}}]"
    invoke("convert", "from-hf", place / "llama", tmp_path / "ours", f"chunk_size={CHUNK}", memory)
    base = {"base": str(tmp_path / "ours" / "model.yaml")}
    tree = run_tree(
        data, tmp_path / "runs", training={"init_from": str(tmp_path / "ours" / "weights.safetensors")},
        optimizer={"lr": 1e-3, "new_parameters_lr": 1e-2}, logging={"every": 1},
    )  # fmt: skip
    del tree["model"]
    losses = []
    for name, layout in {"tp2": {"tp": 2}, "pp2": {"pp": 2}}.items():
        parallel = {"parallel": {**tree["parallel"], **layout}}
        config = write_config(tmp_path / f"{name}.yaml", {**base, **tree, **parallel, "name": name})
        with Job(tmp_path / f"job-{name}", 2, command, "train", str(config)) as job:
            assert job.codes(90) == [0, 0], job.output(0)
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([record["loss"] for record in map(json.loads, lines) if "loss" in record])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][-1] < losses[0][0]
    invoke("convert", "to-hf", tmp_path / "runs" / "tp2", tmp_path / "again")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape[-1] == model.config.vocab_size
    assert torch.isfinite(logits).all()
