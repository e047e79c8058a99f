"""The data commands, as typed."""

import json

import pytest
import typer
from data_helpers import make_tokenizer, text_of, write_corpus
from typer.testing import CliRunner

from megamem.cli.corpus import corpus_app
from megamem.cli.shards import shards_app
from megamem.cli.tokenizer import tokenizer_app
from megamem.errors import MegamemError
from tokenization.corpus import CORPORA

app = typer.Typer()
app.add_typer(corpus_app, name="corpus")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(shards_app, name="shards")


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, MegamemError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "text", [300, 50, 400])


def test_from_text_to_shards(tmp_path, corpus):
    tokenizer, shards = tmp_path / "tokenizer", tmp_path / "shards"
    output = run("tokenizer", "train", corpus, "--output", tokenizer, "--vocab-size", 290)
    assert "byte-level-bpe" in output
    assert "290" in output
    options = ("--workers", 1, "--shard-mib", 0.002)
    output = run("shards", "write", corpus, "--tokenizer", tokenizer, "--output", shards, *options)
    index = json.loads((shards / "index.json").read_text())
    assert index["documents"] == 3
    assert index["header"]["shard_text_bytes"] == 2097
    assert f"{index['tokens']:,} (uint16)" in output
    assert "2 shards are whole" in run("shards", "verify", shards)
    assert f"{index['text_bytes']:,} bytes" in run("shards", "info", shards)


def test_paths_with_brackets_and_colons_are_printed_as_they_are(tmp_path, corpus, monkeypatch):
    """Neither `[b]` is markup, nor `:smile:` a face, in tables and lines."""
    monkeypatch.chdir(tmp_path)  # longer paths would be folded
    corpus.rename("[text]")
    assert "│ to[b] :smile: [/i] │" in run("tokenizer", "train", "[text]", "-o", "to[b] :smile: [/i]").replace("  ", "")
    output = run("shards", "write", "[text]", "-t", "to[b] :smile: [/i]", "-o", "shards[red]", "--workers", 1)
    assert "│ shards[red]" in output
    assert json.loads((tmp_path / "shards[red]" / "index.json").read_text())["documents"] == 3


def test_parts_are_written_and_merged(tmp_path, corpus):
    tokenizer, shards = tmp_path / "tokenizer", tmp_path / "shards"
    make_tokenizer(tokenizer)
    for part in ("1/2", "2/2"):
        written = run("shards", "write", corpus, "-t", tokenizer, "-o", shards, "--workers", 1, "--part", part)
        assert f"part-000{part[0]}-of-0002" in written
        if part == "1/2":
            with pytest.raises(MegamemError, match="part 2/2 is missing"):
                run("shards", "merge", shards)
    output = run("shards", "merge", shards)
    index = json.loads((shards / "index.json").read_text())
    assert (index["documents"], index["first_documents"]) == (3, [0, 2])
    assert f"{index['tokens']:,} (uint16)" in output
    assert "2 shards are whole" in run("shards", "verify", shards)


def test_text_under_another_name(tmp_path):
    lines = [json.dumps({"content": text_of(50, seed)}) + "\n" for seed in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    tokenizer, field = tmp_path / "tokenizer", ("--text-field", "content")
    run("tokenizer", "train", tmp_path / "a.jsonl", "-o", tokenizer, "--vocab-size", 280, *field)
    write = ("shards", "write", tmp_path / "a.jsonl", "-t", tokenizer, "-o", tmp_path / "shards", "--workers", 1)
    with pytest.raises(MegamemError, match="no string field 'text'"):
        run(*write)
    run(*write, *field)  # what failed before its first shard does not stand in the way
    with pytest.raises(MegamemError, match="written with other input files or another --text-field"):
        run(*write)


def test_a_smaller_vocabulary_than_asked_for_is_said(tmp_path, corpus):
    output = run("tokenizer", "train", corpus, "-o", tmp_path / "tokenizer", "--vocab-size", 5000)
    assert "not for 5,000" in output


def test_import(tmp_path):
    make_tokenizer(tmp_path / "a")
    output = run("tokenizer", "import", tmp_path / "a" / "tokenizer.json", "-o", tmp_path / "b")
    assert "hugging-face" in output
    with pytest.raises(MegamemError, match="eos token '<x>' is not in the vocabulary"):
        run("tokenizer", "import", tmp_path / "a" / "tokenizer.json", "-o", tmp_path / "c", "--eos", "<x>")


def test_fetch(tmp_path, monkeypatch):
    def fetched(folder, name):
        assert name == "speeches"
        path = folder / "manifest.json"
        path.write_text(json.dumps({"splits": {"train": {"documents": 3, "bytes": 12345}}}))
        return path

    monkeypatch.setattr("tokenization.corpus.fetch", fetched)
    assert "12,345" in run("corpus", "fetch", tmp_path, "--corpus", "speeches")


def test_errors_are_megamem_errors(tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments in (
        ("shards", "info", tmp_path),
        ("shards", "verify", tmp_path / "nowhere"),
        ("shards", "write", tmp_path / "empty", "-t", tmp_path, "-o", tmp_path / "o"),
        ("tokenizer", "train", tmp_path / "nowhere", "-o", tmp_path / "o"),
        ("tokenizer", "import", tmp_path / "nowhere", "-o", tmp_path / "o"),
    ):
        with pytest.raises(MegamemError) as caught:
            run(*arguments)
        assert "\n" not in str(caught.value)


def test_every_option_has_help():
    commands = typer.main.get_command(app).commands
    for group in commands.values():
        for command in group.commands.values():
            assert command.help
            for parameter in command.params:
                assert getattr(parameter, "help", None), (command.name, parameter.name)


def test_tokenizer_needs_disk_space(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(text_of(5, 0))
    monkeypatch.setattr("tokenization.prepare.TOKENIZER_BYTES", 1 << 60)
    with pytest.raises(MegamemError, match="not enough disk space"):
        run("tokenizer", "train", tmp_path / "a.txt", "-o", tmp_path / "o")


def test_help_names_every_corpus():
    """The help is written out, so that it needs no import of the corpora."""
    options = {
        option.name: option for option in typer.main.get_command(app).commands["corpus"].commands["fetch"].params
    }
    assert all(name in options["name"].help for name in CORPORA)
