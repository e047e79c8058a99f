"""The splits of enwik8 and text8, of files a millionth of their size."""

import functools
import random
import tracemalloc
import zipfile

import pytest
import typer
from typer.testing import CliRunner

from megamem.cli.corpus import corpus_app
from megamem.errors import DataError
from tokenization import enwik8
from tokenization.enwik8 import SplitSize, split

SIZES = (90, 5, 5)


def zipped(path, *members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def written(folder, name="text8"):
    """Contents of the three files, and no other is there."""
    names = [f"{part}/{name}.txt" for part in ("train", "validation", "test")]
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert found == sorted(names)
    return [(folder / path).read_bytes() for path in names]


def test_the_published_borders():
    assert enwik8.SIZES == (90 * 10**6, 5 * 10**6, 5 * 10**6)
    assert sum(enwik8.SIZES) == 10**8


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
def test_the_splits_are_the_file(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(enwik8, "READ_BYTES", read_bytes)
    data = bytes(random.Random(0).choices(b"abc xyz\n", k=100))
    (tmp_path / "text8").write_bytes(data)
    zipped(tmp_path / "text8.zip", ("text8", data))
    for source in ("text8", "text8.zip"):
        found = split(tmp_path / source, tmp_path / f"{source}-text", SIZES)
        assert written(tmp_path / f"{source}-text") == [data[:90], data[90:95], data[95:]]
        assert list(found.items()) == [
            ("train", SplitSize(90, 90)), ("validation", SplitSize(5, 5)), ("test", SplitSize(5, 5)),
        ]  # fmt: skip


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
def test_line_ends_are_left_out_where_they_are_not_wanted(tmp_path, monkeypatch, read_bytes):
    """Borders are those of the file, and spaces stay; a character that the end of the file cuts goes."""
    monkeypatch.setattr(enwik8, "READ_BYTES", read_bytes)
    data = ("é x \n\n " * 20).encode()[:90] + b"\n a\nb" + b"\n\n x\xc3"
    assert len(data) == 100
    (tmp_path / "enwik8").write_bytes(data)
    found = split(tmp_path / "enwik8", tmp_path / "out", SIZES, line_ends=False)
    train = data[:90].replace(b"\n", b"")
    assert written(tmp_path / "out", "enwik8") == [train, b" ab", b" x"]
    assert found == {
        "train": SplitSize(len(train), len(train.decode())), "validation": SplitSize(3, 3), "test": SplitSize(2, 2),
    }  # fmt: skip


@pytest.mark.parametrize("read_bytes", [1, 4, 1 << 20])
@pytest.mark.parametrize("letter", ["é", "中", "🙂"])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_character_belongs_to_the_split_in_which_it_begins(tmp_path, monkeypatch, read_bytes, letter, before):
    """`before` of a character's bytes stand before the first border; then come letters of one byte."""
    monkeypatch.setattr(enwik8, "READ_BYTES", read_bytes)
    text = "a" * (90 - before) + letter
    text += "b" * (100 - len(text.encode()))
    (tmp_path / "text8").write_bytes(text.encode())
    found = split(tmp_path / "text8", tmp_path / "out", SIZES)
    # a character of few bytes may end before the border, and letters follow it
    inside = max(before - len(letter.encode()), 0)
    train = ("a" * (90 - before) + letter + "b" * inside).encode()
    parts = written(tmp_path / "out")
    assert parts[0] == train
    assert b"".join(parts) == text.encode()
    assert (len(parts[1]), len(parts[2])) == (95 - len(train), 5)
    assert found["train"] == SplitSize(len(train), 90 - before + 1 + inside)


def test_a_character_that_covers_a_whole_split(tmp_path):
    (tmp_path / "text8").write_bytes(("aa" + "🙂" + "bb").encode())
    found = split(tmp_path / "text8", tmp_path / "out", (3, 2, 3))
    assert written(tmp_path / "out") == ["aa🙂".encode(), b"", b"bb"]
    assert found["validation"] == SplitSize(0, 0)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_that_the_end_cuts_is_left_out(tmp_path, kept):
    data = b"a" * (100 - kept) + "🙂".encode()[:kept]
    (tmp_path / "text8").write_bytes(data)
    found = split(tmp_path / "text8", tmp_path / "out", SIZES)
    assert written(tmp_path / "out") == [b"a" * 90, b"a" * 5, b"a" * (5 - kept)]
    assert found["test"] == SplitSize(5 - kept, 5 - kept)


def test_files_that_are_not_such_are_refused(tmp_path):
    def fails(name, message, data=None):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=message) as caught:
            split(tmp_path / name, tmp_path / "out", SIZES)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()

    fails("none", "none: cannot be read \\(No such file or directory\\)")
    fails("short", "short: 99 bytes, not 100 as enwik8 and text8 have", b"a" * 99)
    fails("long", "long: 101 bytes, not 100 as", b"a" * 101)
    fails("latin", "latin: not UTF-8 at byte 92; convert it first", b"a" * 92 + b"\xe9" + b"a" * 7)
    fails("cut", "cut: not UTF-8 at byte 89; convert it first", b"a" * 89 + b"\xe4\xb8" + b"a" * 9)
    fails("a.zip", "a.zip: cannot be read \\(File is not a zip file\\)", b"a" * 100)
    zipped(tmp_path / "two.zip", ("text8", b"a" * 100), ("readme", b""))
    fails("two.zip", "two.zip: holds 2 files, not one")
    fails(zipped(tmp_path / "b.zip", ("text8", b"a" * 99)).name, "b.zip: 99 bytes, not 100 as")
    damaged = bytearray(zipped(tmp_path / "c.zip", ("text8", bytes(range(100)))).read_bytes())
    damaged[60] ^= 1
    fails("c.zip", "c.zip: cannot be read", bytes(damaged))


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "text8").write_bytes(b"a" * 100)
    (tmp_path / "out").mkdir()
    split(tmp_path / "text8", tmp_path / "out", SIZES)  # an empty one is taken
    with pytest.raises(DataError, match="out: not an empty folder; choose another one"):
        split(tmp_path / "text8", tmp_path / "out", SIZES)
    assert written(tmp_path / "out")[0] == b"a" * 90


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """Of a file forty times as large as what is read at a time."""
    monkeypatch.setattr(enwik8, "READ_BYTES", 1 << 16)
    size = 40 << 16
    zipped(tmp_path / "text8.zip", ("text8", b"ab " * (size // 3) + b"a" * (size % 3)))
    tracemalloc.start()
    split(tmp_path / "text8.zip", tmp_path / "out", (size - 20, 10, 10))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 4  # what is read, its text, and a zip's buffers


def test_as_typed(tmp_path, monkeypatch):
    (tmp_path / "enwik8").write_bytes("é".encode() * 50)
    monkeypatch.setattr(enwik8, "split", functools.partial(enwik8.split, sizes=SIZES))
    app = typer.Typer()
    app.add_typer(corpus_app, name="corpus")
    result = CliRunner().invoke(app, ["corpus", "split", str(tmp_path / "enwik8"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert [row[1:-1:2] for row in rows if len(row) == 7] == [
        ["split", "bytes", "characters"], ["train", "90", "45"], ["validation", "6", "3"], ["test", "4", "2"],
    ]  # fmt: skip
    assert written(tmp_path / "out", "enwik8")[1] == "ééé".encode()
    (tmp_path / "enwik8").write_bytes(b"ab\nc\n" * 20)
    out = tmp_path / "without"
    result = CliRunner().invoke(app, ["corpus", "split", str(tmp_path / "enwik8"), str(out), "--without-line-ends"])
    assert result.exit_code == 0, result.output
    assert written(out, "enwik8") == [b"abc" * 18, b"abc", b"abc"]


def test_what_appears_in_its_folder_meanwhile_stays(tmp_path, monkeypatch):
    (tmp_path / "text8").write_bytes(b"x" * 100)
    (tmp_path / "out").mkdir()
    original = enwik8._write

    def slow(*arguments):
        (tmp_path / "out" / "notes.txt").write_text("mine")
        return original(*arguments)

    monkeypatch.setattr(enwik8, "_write", slow)
    with pytest.raises(DataError, match=r"out: is no longer empty; what is there stays, choose another folder"):
        split(tmp_path / "text8", tmp_path / "out", SIZES)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes.txt", "out", "text8"]


def test_a_full_disk_is_one_line(tmp_path, small_disk):
    (tmp_path / "text8").write_bytes(b"x" * 2_000_000)
    small_disk.fill()
    with pytest.raises(DataError, match=r"disk/out: (cannot be written \(No space left|not enough disk space)"):
        split(tmp_path / "text8", small_disk.folder / "out", (1_800_000, 100_000, 100_000))
    assert [path.name for path in small_disk.folder.iterdir() if path.name != ".filler"] == []
