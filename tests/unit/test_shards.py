"""Writing token shards: format, restart after a kill, errors."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import fsspec
import numpy as np
import pytest
import webdataset
from data_helpers import make_shards, make_tokenizer, write_corpus

from megamem.data.shard_store import ShardStore
from megamem.data.verify import verify_shards
from megamem.errors import DataError
from tokenization import shard_folder, shards
from tokenization.parts import Part
from tokenization.shard_format import ShardIndex, token_dtype
from tokenization.shards import write_shards
from tokenization.tokenizer import Tokenizer

SIZES = (40, 700, 5, 300, 1200, 90)


def contents(folder):
    """Bytes of every file."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_document_is_stored_whole_and_ends_with_eos(tmp_path):
    folder = make_shards(tmp_path)
    tokenizer, store = Tokenizer.load(tmp_path / "tokenizer"), ShardStore(str(folder))
    assert len(store) == len(SIZES)
    for number, path in enumerate(sorted((tmp_path / "shards-text").iterdir())):
        text = path.read_text()
        tokens = store.tokens(number, 0, int(store.lengths[number]))
        np.testing.assert_array_equal(tokens, [*tokenizer.encode(text), tokenizer.eos_id])
        assert store.name(number) == f"shards-text/{path.name}"
        assert store.table["text_bytes"][number] == len(text.encode())


def test_index_describes_the_files(tmp_path):
    folder = make_shards(tmp_path)
    index = ShardIndex.parse((folder / "index.json").read_bytes(), "index.json")
    table = np.load(folder / "index.npy", allow_pickle=False)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".inputs.json",
        "index.json",
        "index.npy",
        "shard-000000.tar",
        "shard-000001.tar",
        "shard-000002.tar",
    ]
    assert index.documents == len(table) == len(SIZES)
    assert table["shard"].tolist() == [0, 0, 1, 1, 1, 2]
    assert index.header.dtype == "uint16"
    assert index.header.vocab_size == 300
    assert index.tokens == table["tokens"].sum()
    assert index.text_bytes == sum(path.stat().st_size for path in (tmp_path / "shards-text").iterdir())
    for record in (*index.shards, index.documents_file):
        data = (folder / record.file).read_bytes()
        assert record.size == len(data)
        assert record.sha256 == hashlib.sha256(data).hexdigest()
    assert ShardIndex.parse(json.dumps(index.to_dict()).encode(), "copy") == index


def test_the_webdataset_library_reads_the_tars(tmp_path):
    folder = make_shards(tmp_path)
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    store = ShardStore(str(folder))
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{number:09d}" for number in range(len(SIZES))]
    for number, sample in enumerate(samples):
        tokens = np.frombuffer(sample["tokens"], dtype="<u2")
        np.testing.assert_array_equal(tokens, store.tokens(number, 0, int(store.lengths[number])))
        meta = json.loads(sample["json"])
        text = (tmp_path / meta["name"]).read_bytes()
        assert meta["tokens"] == len(tokens)
        assert meta["text_bytes"] == len(text)
        assert meta["text_sha256"] == hashlib.sha256(text).hexdigest()


def test_ids_fit_their_type():
    """The largest of 65,536 is 65,535."""
    assert [token_dtype(size) for size in (1, 65_536, 65_537, 131_072)] == ["uint16", "uint16", "uint32", "uint32"]


def test_large_vocabularies_take_four_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "token_dtype", lambda vocab_size: "uint32")
    folder = make_shards(tmp_path)
    store = ShardStore(str(folder))
    assert store.index.header.dtype == "uint32"
    expected = Tokenizer.load(tmp_path / "tokenizer").encode((tmp_path / store.name(4)).read_text())
    np.testing.assert_array_equal(store.tokens(4, 3, 50), expected[3:50])


def test_number_of_processes_changes_nothing(tmp_path):
    alone = make_shards(tmp_path)
    folder = tmp_path / "two"
    done = []
    write_shards(
        [tmp_path / "shards-text"],
        tmp_path / "tokenizer",
        folder,
        workers=2,
        shard_text_bytes=4000,
        on_progress=done.append,
    )
    assert contents(folder) == contents(alone)
    assert sum(done) == sum(path.stat().st_size for path in (tmp_path / "shards-text").iterdir())


def test_a_finished_folder_is_left_as_it_is(tmp_path):
    folder = make_shards(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}
    make_shards(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("[!.]*")} == times


def writer(corpus, tokenizer, folder, workers, part):
    """The writer in a process group of its own."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tokenization.parts import Part; from tokenization.shards import write_shards\n"
        "if __name__ == '__main__':\n"
        "    corpus, tokenizer, folder = map(Path, sys.argv[1:4])\n"
        "    write_shards([corpus], tokenizer, folder, workers=int(sys.argv[4]), shard_text_bytes=13_000,\n"
        f"                 part={part!r},\n"
        "                 on_progress=lambda done: time.sleep(0.05))\n"  # time enough to be killed
    )
    script = folder.with_suffix(".py")
    script.write_text(code)
    arguments = [sys.executable, str(script), str(corpus), str(tokenizer), str(folder), str(workers)]
    return subprocess.Popen(arguments, start_new_session=True, stderr=subprocess.DEVNULL)


def group_ends(group, seconds):
    for _ in range(int(seconds * 50)):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(("workers", "part"), [(1, None), (2, None), (2, Part(2, 2))], ids=["1", "2", "2, a part"])
def test_killed_writer_continues_and_the_result_is_the_same(tmp_path, workers, part):
    corpus = write_corpus(tmp_path / "text", [2000] * 30)
    make_tokenizer(tmp_path / "tokenizer")
    output, whole = tmp_path / "shards", tmp_path / "whole"
    process = writer(corpus, tmp_path / "tokenizer", output, workers, part)
    folder, whole_folder = (path / part.folder if part else path for path in (output, whole))
    while len(list(folder.glob("records/*.json"))) < 3:
        assert process.poll() is None, "the writer ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert group_ends(process.pid, 10)  # the workers end with their parent
    assert not (folder / "index.json").exists()
    finished = [path.stem for path in folder.glob("records/shard-*.json")]
    assert len(finished) >= 3
    kept = {name: (folder / name).stat().st_mtime_ns for name in finished}
    with pytest.raises(DataError, match=r"index\.json: missing"):
        ShardStore(str(folder))
    (folder / ".shard-000099.tar.1").write_bytes(b"left behind")
    options = {"shard_text_bytes": 13_000, "part": part}
    write_shards([corpus], tmp_path / "tokenizer", output, **options)
    write_shards([corpus], tmp_path / "tokenizer", whole, **options)
    assert contents(folder) == contents(whole_folder)
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept


def interrupted(tmp_path, monkeypatch, after=2):
    """A folder whose writing failed after some shards."""
    original = shards._shard

    def failing(task, folder):
        if task.number == after:
            raise KeyboardInterrupt
        return original(task, folder)

    monkeypatch.setattr(shards, "_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        make_shards(tmp_path)
    monkeypatch.setattr(shards, "_shard", original)
    return tmp_path / "shards"


def test_damaged_and_outdated_shards_are_written_again(tmp_path, monkeypatch):
    folder = interrupted(tmp_path, monkeypatch)
    first, second = sorted(folder.glob("*.tar"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    changed = tmp_path / "shards-text" / "document003.txt"  # in the second shard; its size stays the same
    changed.write_text("y" * changed.stat().st_size)
    options = {"shard_text_bytes": 4000}
    before = second.read_bytes()
    write_shards([tmp_path / "shards-text"], tmp_path / "tokenizer", folder, **options)
    write_shards([tmp_path / "shards-text"], tmp_path / "tokenizer", tmp_path / "whole", **options)
    assert contents(folder) == contents(tmp_path / "whole")
    assert second.read_bytes() != before


@pytest.mark.parametrize("finished", [True, False])
def test_shards_of_another_run_are_refused(tmp_path, monkeypatch, finished):
    folder = make_shards(tmp_path) if finished else interrupted(tmp_path, monkeypatch)
    make_tokenizer(tmp_path / "other", seed=5)
    corpus = tmp_path / "shards-text"
    with pytest.raises(DataError, match=r"shards: holds shards written with another tokenizer \("):
        write_shards([corpus], tmp_path / "other", folder, shard_text_bytes=4000)
    with pytest.raises(DataError, match=r"another shard_text_bytes \(4000, now 9\)"):
        write_shards([corpus], tmp_path / "tokenizer", folder, shard_text_bytes=9)
    (corpus / "more.txt").write_text("more text")
    with pytest.raises(DataError, match=r"other input files"):
        write_shards([corpus], tmp_path / "tokenizer", folder, shard_text_bytes=4000)


def test_folder_of_other_files_is_refused(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty and not a folder of token shards"):
        make_shards(tmp_path)
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["notes.txt"]


def test_empty_corpus(tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"a\.txt: empty corpus, no text found"):
        write_shards([tmp_path / "a.txt"], tmp_path / "tokenizer", tmp_path / "shards")


def test_no_disk_space_is_refused_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 93, 7))
    with pytest.raises(DataError, match=r"shards: not enough disk space: [\d,]+ bytes needed, 7 bytes free"):
        make_shards(tmp_path)
    assert not (tmp_path / "shards").exists()


def test_a_full_disk_while_writing_is_one_line(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "_write_tar", full)
    with pytest.raises(DataError, match=r"shards: cannot be written \(No space left on device\)"):
        make_shards(tmp_path)


def test_a_worker_that_dies_is_one_line(tmp_path, monkeypatch):
    make_tokenizer(tmp_path / "tokenizer")
    corpus = write_corpus(tmp_path / "text", [5])
    monkeypatch.setattr(shards, "_start_worker", os._exit)
    with pytest.raises(DataError, match=r"a worker process died.*run the same command again to continue"):
        write_shards([corpus], tmp_path / "tokenizer", tmp_path / "shards", workers=2)


def test_default_shard_size_is_bounded(tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    corpus = write_corpus(tmp_path / "text", [5, 5])
    index = write_shards([corpus], tmp_path / "tokenizer", tmp_path / "shards")
    assert index.header.shard_text_bytes == 1 << 20
    assert len(index.shards) == 1


def test_verify_finds_a_flipped_bit_and_foreign_tokens(tmp_path):
    folder = make_shards(tmp_path)
    done = []
    assert verify_shards(folder, done.append).documents == len(SIZES)
    assert sum(done) == sum(path.stat().st_size for path in folder.glob("*.[tn][ap][ry]"))
    victim = folder / "shard-000001.tar"
    data = bytearray(victim.read_bytes())
    data[600] ^= 1
    victim.write_bytes(data)
    with pytest.raises(DataError, match=r"shard-000001\.tar: damaged: its SHA-256"):
        verify_shards(folder)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["sha256"] = hashlib.sha256(data).hexdigest()
    index["header"]["vocab_size"] = 10
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"shard-000000\.tar: foreign: document 0 is not of this tokenizer"):
        verify_shards(folder)


# what a folder is to a second command


def changed(path):
    """Other text of the same size."""
    path.write_text("y" * path.stat().st_size)


def reads(monkeypatch):
    """Whether documents were read since the last call."""
    read = []
    original = shard_folder.documents
    monkeypatch.setattr(shard_folder, "documents", lambda files: read.append(1) or original(files))
    return lambda: bool(read) and not read.clear()


def test_texts_that_changed_but_for_their_sizes_are_refused(tmp_path, monkeypatch):
    folder = make_shards(tmp_path)
    before, was_read = contents(folder), reads(monkeypatch)
    arguments = [tmp_path / "shards-text"], tmp_path / "tokenizer", folder
    assert write_shards(*arguments, shard_text_bytes=4000).documents == len(SIZES)
    assert not was_read(), "files in the state that was noted are not read again"
    victim = tmp_path / "shards-text" / "document003.txt"
    text, times = victim.read_text(), (victim.stat().st_atime_ns, victim.stat().st_mtime_ns)
    changed(victim)
    os.utime(victim, ns=times)
    said = (
        r"shards: holds other texts than the inputs now, first of shards-text/document003\.txt; choose another folder"
    )
    with pytest.raises(DataError, match=said):
        write_shards(*arguments, shard_text_bytes=4000)
    assert contents(folder) == before
    victim.write_text(text)
    assert write_shards(*arguments, shard_text_bytes=4000).documents == len(SIZES)
    assert was_read(), "in another state, and the same text"
    assert write_shards(*arguments, shard_text_bytes=4000).documents == len(SIZES)
    assert not was_read(), "the new state is noted"


def test_inputs_of_a_store_that_tells_nothing_of_them_are_read(tmp_path, monkeypatch):
    """The store of files in memory has no tags, and says when a file was made."""
    make_tokenizer(tmp_path / "tokenizer")
    url = f"memory://{tmp_path.name}/a.txt"
    for text, refused in (("some text", False), ("some text", False), ("more text", True)):
        with fsspec.open(url, "w") as file:
            file.write(text)
        if refused:
            with pytest.raises(DataError, match=r"shards: holds other texts than the inputs now, first of"):
                write_shards([url], tmp_path / "tokenizer", tmp_path / "shards")
        else:
            write_shards([url], tmp_path / "tokenizer", tmp_path / "shards")


@pytest.mark.parametrize("part", [None, Part(1, 2)])
def test_two_commands_do_not_write_one_folder(tmp_path, part):
    """The second one is told who the first is, and what the first writes is whole."""
    corpus = write_corpus(tmp_path / "text", [2000] * 30)
    make_tokenizer(tmp_path / "tokenizer")
    process = writer(corpus, tmp_path / "tokenizer", tmp_path / "shards", 1, part)
    folder = tmp_path / "shards" / part.folder if part else tmp_path / "shards"
    while not (folder / "records").is_dir() or not list(folder.glob(".shard-*")):
        assert process.poll() is None, "the writer ended before the second came"
        time.sleep(0.001)
    options = {"shard_text_bytes": 13_000, "part": part}
    with pytest.raises(DataError, match=rf"is being written by another command \(process {process.pid} on "):
        write_shards([corpus], tmp_path / "tokenizer", tmp_path / "shards", **options)
    assert process.wait(60) == 0
    write_shards([corpus], tmp_path / "tokenizer", tmp_path / "whole", **options)
    whole = tmp_path / "whole" / part.folder if part else tmp_path / "whole"
    assert contents(folder) == contents(whole)
    assert write_shards([corpus], tmp_path / "tokenizer", tmp_path / "shards", **options).documents > 0


def test_the_lock_of_a_killed_command_holds_nobody_up(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / ".lock").write_text("process 1 on another host\n")
    folder = make_shards(tmp_path)
    assert not (folder / ".lock").exists()


def test_a_finished_folder_that_cannot_be_written_is_left_as_it_is(tmp_path, monkeypatch):
    folder = make_shards(tmp_path)

    def refuse(folder):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shard_folder, "_locked", refuse)
    arguments = [tmp_path / "shards-text"], tmp_path / "tokenizer"
    assert write_shards(*arguments, folder, shard_text_bytes=4000).documents == len(SIZES)
    with pytest.raises(DataError, match=r"other: cannot be written \(Read-only file system\)"):
        write_shards(*arguments, tmp_path / "other", shard_text_bytes=4000)
