"""Bad input: one clear line, the documented exit code, before any training, with nothing written or lost."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from megamem.cli import main as cli
from megamem.config.load import load_config
from megamem.config.run import RunConfig
from megamem.errors import ConfigError, DataError, RunFolderError
from megamem.training.checks import open_feeder
from tests.integration.commands import finish, megamem, run_tree, torchrun, write_config
from tests.unit.data_helpers import make_shards, make_tokenizer

CONFIG, DATA, FOLDER = ConfigError.exit_code, DataError.exit_code, RunFolderError.exit_code


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, every folder."""
    paths = folder.rglob("*")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def corpus(data, tmp_path):
    """A copy of the data that a test may damage."""
    return shutil.copytree(data, tmp_path / "data")


@pytest.fixture
def config(corpus, tmp_path):
    return write_config(tmp_path / "run.yaml", run_tree(corpus, tmp_path / "runs", parallel={"tp": 2}))


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs `megamem ARGUMENTS` in this process; gives the exit code and the one line."""

    def started(*_):
        pytest.fail("the run was started")

    monkeypatch.setattr("launchers.local_ranks.run_local", started)
    monkeypatch.setattr("megamem.cli.train._run_rank", started)

    def run(*arguments) -> tuple[int, str]:
        before = contents(tmp_path)
        monkeypatch.setattr(sys, "argv", ["megamem", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("megamem: ")
        assert captured.err.count("\n") == 1
        assert captured.err.endswith("\n")
        assert contents(tmp_path) == before
        return ended.value.code, captured.err.removeprefix("megamem: ").rstrip("\n")

    return run


OVERRIDES = {
    "misspelt key": ("model.hidden_sise=32", "model.hidden_sise: unknown key; did you mean 'hidden_size'?"),
    "misspelt section": ("optimzer.lr=1", "optimzer: unknown key; did you mean 'optimizer'?"),
    "misspelt mixer field": ("model.memory.0.mixer.ordre=4", "ordre: unknown key; did you mean 'order'?"),
    "misspelt mixer": ("model.mixer=elastic_memroy", "did you mean 'elastic_memory'?"),
    "wrong type": ("training.steps=many", "training.steps: expected an integer (got 'many')"),
    "override without value": ("training.steps", "expected key.path=value"),
    "heads and TP": ("parallel.tp=3", "model.heads 4 is not divisible by parallel.tp 3"),
    "sequence and chunk": (
        "data.sequence_length=100", "data.sequence_length 100 is not divisible by model.chunk_size 32",
    ),
    "chunk longer than sequence": (
        "model.chunk_size=256", "model.chunk_size 256 is longer than data.sequence_length 128",
    ),
    "batch and data-parallel ranks": ("parallel.dp=3", "4 sequences cannot be split into micro-batches of 2 on 3"),
    "ZeRO stage unknown": ("parallel.zero_stage=4", "parallel.zero_stage: should be 0, 1, 2 or 3 (got 4)"),
}  # fmt: skip


class TestConfiguration:
    @pytest.mark.parametrize("case", OVERRIDES)
    def test_overrides(self, refused, config, case):
        override, said = OVERRIDES[case]
        code, line = refused("train", config, override)
        assert code == CONFIG
        assert said in line

    def test_zero_stage_that_does_not_fit(self, refused, config):
        code, line = refused("train", config, "training.precision=bf16", "parallel.zero_stage=0")
        assert (code, "use zero_stage 1, 2 or 3, or precision fp32" in line) == (CONFIG, True)
        code, line = refused("train", config, "model.tie_embeddings=true", "parallel.zero_stage=3")
        assert (code, "use zero_stage 2 or untied embeddings" in line) == (CONFIG, True)

    @pytest.mark.parametrize("dry", [[], ["--dry-run"]])
    def test_a_world_size_that_does_not_fit(self, refused, config, dry):
        code, line = refused("train", config, "--processes", "3", *dry)
        assert code == CONFIG
        assert "3 processes cannot be split into TP 2 x PP 1; start a multiple of 2 processes" in line
        code, line = refused("train", config, "parallel.dp=2", "--processes", "2", *dry)
        assert code == CONFIG
        assert "parallel.dp: 2 x TP 2 x PP 1 needs 4 processes, but 2 were started" in line

    def test_flash_attention_that_is_absent(self, refused, config, monkeypatch):
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a: None if name == "flash_attn" else find(name, *a)
        )
        code, line = refused("train", config, "model.attention_kernel=flash_attn")
        assert code == CONFIG
        assert "flash_attn" in line
        assert "sdpa" in line  # what to use instead

    def test_held_out_data_that_is_trained_on(self, refused, config, corpus):
        code, line = refused("train", config, f"data.validation={corpus / 'train'}")
        assert (code, "is also a training source" in line) == (CONFIG, True)

    def test_a_missing_file(self, refused, tmp_path):
        code, line = refused("train", tmp_path / "gone.yaml")
        assert (code, line) == (CONFIG, f"{tmp_path / 'gone.yaml'}: no such configuration file")

    def test_broken_yaml(self, refused, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text("name: x\nmodel: {layers: 2\ntraining:\n")
        code, line = refused("train", path)
        assert code == CONFIG
        assert line.startswith(f"{path} line ")
        assert "not valid YAML" in line


class TestData:
    def test_a_missing_folder(self, refused, config, tmp_path):
        code, line = refused("train", config, f"data.sources=[{tmp_path / 'gone'}]")
        assert code == DATA
        assert str(tmp_path / "gone") in line

    def test_a_missing_shard(self, refused, config, corpus):
        shard = sorted((corpus / "train").glob("*.tar"))[1]
        shard.unlink()
        code, line = refused("train", config)
        assert (code, str(shard) in line) == (DATA, True)

    def test_a_truncated_shard(self, refused, config, corpus):
        shard = sorted((corpus / "train").glob("*.tar"))[0]
        shard.write_bytes(shard.read_bytes()[:-512])
        code, line = refused("train", config)
        assert (code, str(shard) in line) == (DATA, True)

    def test_held_out_shards_are_looked_at_too(self, refused, config, corpus):
        shard = sorted((corpus / "validation").glob("*.tar"))[0]
        shard.write_bytes(shard.read_bytes()[:-512])
        code, line = refused("train", config)
        assert (code, str(shard) in line) == (DATA, True)

    @pytest.mark.parametrize("index", ["{}", "not JSON", '{"format_version": 99}'])
    def test_a_foreign_index(self, refused, config, corpus, index):
        (corpus / "train" / "index.json").write_text(index)
        code, line = refused("train", config)
        assert (code, str(corpus / "train" / "index.json") in line) == (DATA, True)

    def test_a_foreign_document_table(self, refused, config, corpus):
        shutil.copy(corpus / "validation" / "index.npy", corpus / "train" / "index.npy")
        code, line = refused("train", config)
        assert (code, str(corpus / "train" / "index.npy") in line) == (DATA, True)

    @pytest.mark.parametrize("place", [-3, -100])
    def test_a_flipped_bit_in_the_document_table(self, refused, config, corpus, place):
        table = corpus / "train" / "index.npy"
        damaged = bytearray(table.read_bytes())
        damaged[place] ^= 4
        table.write_bytes(damaged)
        code, line = refused("train", config)
        assert (code, str(table) in line) == (DATA, True)

    def test_another_tokenizer(self, refused, config, tmp_path):
        make_tokenizer(tmp_path / "other", vocab_size=280, seed=5)
        code, line = refused("train", config, f"data.tokenizer={tmp_path / 'other'}")
        assert code == DATA
        assert "written with tokenizer" in line
        assert str(tmp_path / "other") in line

    def test_no_tokenizer(self, refused, config, tmp_path):
        code, line = refused("train", config, f"data.tokenizer={tmp_path / 'gone'}")
        assert (code, str(tmp_path / "gone") in line) == (DATA, True)

    def test_a_vocabulary_larger_than_the_embedding(self, refused, config):
        code, line = refused("train", config, "model.vocab_size=256")
        assert code == DATA
        assert "a vocabulary of 300, larger than the model's 256" in line

    def test_an_evaluation_that_could_not_be_made_after_training(self, refused, config):
        code, line = refused("train", config, "evaluation.corruption.share=0.5", "model.memory=[]")
        assert (code, "no layer of the model has a memory; use all" in line) == (CONFIG, True)

    def test_an_empty_corpus(self, refused, corpus, tmp_path):
        (tmp_path / "empty").mkdir()
        code, line = refused("shards", "write", tmp_path / "empty", "-t", corpus / "tokenizer", "-o", tmp_path / "out")
        assert (code, str(tmp_path / "empty") in line) == (DATA, True)
        code, line = refused("tokenizer", "train", tmp_path / "empty", "-o", tmp_path / "out")
        assert (code, str(tmp_path / "empty") in line) == (DATA, True)

    def test_only_documents_shorter_than_a_sequence(self, refused, config, corpus):
        make_shards(corpus, (5, 9, 20), name="short")
        code, line = refused("train", config, f"data.sources=[{corpus / 'short'}]")
        assert code == DATA
        assert str(corpus / "short") in line
        assert "\n" not in line

    def test_short_documents_are_counted_and_reported(self, config, corpus):
        make_shards(corpus, (5, 900, 20, 700), name="mixed")
        settings = load_config(RunConfig, config, [f"data.sources=[{corpus / 'mixed'}]"])
        (report,) = open_feeder(settings, dp_rank=0, dp_size=1).reports
        tokens = json.loads((corpus / "mixed" / "index.json").read_text())["tokens"]
        assert report.summary().startswith(f"{corpus / 'mixed'}: 4 documents, {tokens:,} tokens")
        assert "2 short documents" in report.summary()


class TestRunFolder:
    def test_no_disk_space(self, refused, config, monkeypatch):
        Usage = namedtuple("Usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 2**20, 2**20))
        code, line = refused("train", config)
        assert code == FOLDER
        assert "1 MiB free, but the run needs about 66 MiB; free some or choose another `runs_folder`" in line

    def test_another_run_is_there(self, refused, config, tmp_path):
        folder = tmp_path / "runs" / "run"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("name: run\n")
        (folder / "model.safetensors").write_bytes(b"precious")
        code, line = refused("train", config)  # which compares every byte
        why = "without a checkpoint to go on from; choose another `name` or remove the folder"
        assert (code, line) == (FOLDER, f"{folder}: already holds another run, {why}")

    def test_a_file_is_there(self, refused, config, tmp_path):
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "run").write_text("x")
        code, line = refused("train", config)
        assert (code, "is a file, not a folder" in line) == (FOLDER, True)


class TestRealCommand:
    def test_one_line_and_no_noise(self, config, tmp_path):
        before = contents(tmp_path)
        code, out, err = finish(megamem("train", str(config), "trainig.steps=3"), 60)
        assert (code, out) == (CONFIG, "")
        assert err.startswith(f"megamem: {config}: trainig: unknown key; did you mean 'training'?")
        assert err.count("\n") == 1
        assert contents(tmp_path) == before

    @pytest.mark.distributed
    def test_under_torchrun_one_rank_speaks(self, config, tmp_path):
        """torchrun adds its own report, and its own exit code."""
        before = contents(tmp_path)
        process = megamem("train", str(config), "parallel.dp=2", launcher=torchrun(2))
        code, out, err = finish(process, 60)
        assert (code, out) == (1, "")
        assert len([line for line in err.splitlines() if line.startswith("megamem: ")]) == 1
        assert "megamem: parallel.dp: 2 x TP 2 x PP 1 needs 4 processes, but 2 were started" in err
        assert "exitcode  : 2" in err
        assert contents(tmp_path) == before

    @pytest.mark.distributed
    @pytest.mark.parametrize(("slow_s", "line"), [(3, "megamem: a: wrong"), (60, "megamem: rank 1: a: wrong")])
    def test_a_faster_rank_lets_the_first_speak(self, tmp_path, slow_s, line):
        """Rank 1 finds the error first. It speaks itself only where rank 0 has not found it in time (here 9 s)."""
        script = tmp_path / "rank.py"
        script.write_text(f"""
import os, time
from megamem.cli import main as cli
from megamem.errors import ConfigError

def command(**_):
    time.sleep({slow_s} if os.environ["RANK"] == "0" else 0)
    raise ConfigError("a: wrong")

cli.app, cli.FIRST_RANK_S = command, 9
cli.main()
""")
        process = subprocess.run(
            [sys.executable, "-m", *torchrun(2), str(script)], capture_output=True, text=True, timeout=300, check=False
        )
        said = [line for line in process.stderr.splitlines() if line.startswith("megamem: ")]
        assert (process.returncode, said) == (1, [line])

    def test_help_is_quick_and_complete(self):
        """Without torch, whose import takes seconds; each verb says what it does."""
        code = "import megamem.cli.main, sys; assert not {'torch', 'deepspeed', 'megatron'} & set(sys.modules)"
        process = megamem("--help")
        out = finish(process, 60)[1]
        for verb in ("train", "demo", "doctor", "mechanisms", "corpus", "tokenizer", "shards"):
            assert f"\n  {verb} " in out
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0

    def test_wrong_usage(self, capsys, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["megamem", "trian"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == CONFIG
        assert "trian" in capsys.readouterr().err
