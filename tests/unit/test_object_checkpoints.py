"""Checkpoints in an object store: the marker is written last, damage is found in what is read, failures wait and end.

The store is fsspec's in memory; tests/integration/test_object_store.py has a real one.
"""

import errno
import json
from types import SimpleNamespace

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from checkpoints import target as targets
from checkpoints.find import checkpoints_folder, find_checkpoint
from checkpoints.folder import MARKER, checkpoints_in, folder_name, open_checkpoint, share
from checkpoints.location import ObjectPath, check_folder, location, recorded_checkpoints, run_checkpoints
from checkpoints.resume import choose_checkpoint
from checkpoints.retention import prune
from checkpoints.storage import TensorFiles, data_file
from checkpoints.target import ObjectTarget, target
from checkpoints.verify import verify
from megamem.config.checkpoint import CheckpointConfig
from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError, DamagedError
from tests.saved_run import saved_run

RUN = {
    "name": "case",
    "model": {"layers": 1, "hidden_size": 16, "heads": 2, "vocab_size": 64, "chunk_size": 8},
    "data": {"sources": ["shards"], "sequence_length": 16},
    "training": {"steps": 4, "batch_tokens": 16},
}
WRITES = ("open", "pipe_file", "rm", "rm_file")
"""What changes a store."""


def run_config(**sections):
    return parse_config(RunConfig, {**RUN, **sections}, "run")


@pytest.fixture
def folder(tmp_path):
    return ObjectPath(f"memory://{tmp_path.name}/run")


def write(folder, step, val_loss=None, ranks=2):
    """A checkpoint of `ranks` ranks, as savers leave it."""
    into = target(folder / folder_name(step))
    into.prepare()
    files = {}
    for rank in range(ranks):
        mine = target(into.final)
        mine.write_tensors(data_file(rank), {"value@0": torch.full((300,), float(step + rank))})
        files |= mine.written()
    into.write_text("index.json", "{}")
    into.write_text("run.json", json.dumps(saved_run(step, val_loss=val_loss)))
    into.complete(files | into.written())
    return open_checkpoint(into.final)


def test_what_is_written_is_complete_and_intact(folder):
    checkpoint = write(folder, 20)
    assert checkpoint.complete
    assert checkpoint.step == checkpoint.run()["step"] == 20
    verify(checkpoint)
    assert checkpoint.bytes == sum(checkpoint.path.entries().values()) > 2 * 4 * 300
    assert find_checkpoint(folder) == find_checkpoint(str(checkpoint.path)) == checkpoint


class Killed(BaseException):
    """What a process cannot catch."""


def test_a_kill_before_any_change_of_the_store_loses_nothing(folder, monkeypatch):
    """Every place in a save with retention: what is complete is intact, and never less than before."""
    left, count = 10**9, 0

    def counted(function):
        def change(self, *args, **kwargs):
            nonlocal count
            if function.__name__ != "open" or "w" in (args[1] if len(args) > 1 else kwargs.get("mode", "rb")):
                count += 1
                if count > left:
                    raise Killed
            return function(self, *args, **kwargs)

        return change

    for name in WRITES:
        monkeypatch.setattr(MemoryFileSystem, name, counted(getattr(MemoryFileSystem, name)))

    def save(step):
        write(folder, step)
        prune(folder, last=2)

    for step in (10, 20, 30):
        save(step)
    count = 0
    save(40)
    changes = count
    assert changes > 8, "two files of tensors, index, run, manifest, marker, and what is removed"
    seen = set()
    for number in range(changes):
        before = [checkpoint.step for checkpoint in checkpoints_in(folder)]
        left, count = number, 0
        with pytest.raises(Killed):
            save(before[-1] + 10)
        left = 10**9
        found = checkpoints_in(folder)
        for checkpoint in found:
            verify(checkpoint)
        steps = [checkpoint.step for checkpoint in found]
        assert steps[: len(before)] == before or steps[-1] == before[-1] + 10, "an old one only goes for a new one"
        assert len(steps) >= 2
        seen.add(steps[-1] == before[-1] + 10)
        save(steps[-1] + 10)
        assert len(checkpoints_in(folder, unfinished=True)) == 2, "the next save removes what the killed one left"
    assert seen == {False, True}, "some were killed before the marker, some behind it"


def flip(path):
    with path._store() as (store, name):
        data = bytearray(store.cat_file(name))
        data[len(data) // 2] ^= 1
        store.pipe_file(name, bytes(data))


def cut(path):
    with path._store() as (store, name):
        store.pipe_file(name, store.cat_file(name)[:-1])


DAMAGE = {
    "flipped byte": (lambda p: flip(p / "rank-00001.safetensors"), "rank-00001.safetensors: is damaged"),
    "truncated file": (lambda p: cut(p / "rank-00000.safetensors"), "has 1,279 bytes, 1,280 were written"),
    "missing file": (lambda p: (p / "rank-00000.safetensors").unlink(), "rank-00000.safetensors: is missing"),
    "changed index": (lambda p: (p / "index.json").write_bytes(b"[]"), "index.json: is damaged"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: is missing"),
    "changed manifest": (lambda p: flip(p / "manifest.json"), "manifest.json: "),
    "foreign file": (lambda p: (p / "notes.txt").write_bytes(b"x"), "notes.txt: does not belong to this checkpoint"),
    "missing marker": (lambda p: (p / MARKER).unlink(), "was not written to its end"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_in_one_line(folder, kind):
    checkpoint = write(folder, 20)
    harm, said = DAMAGE[kind]
    harm(checkpoint.path)
    with pytest.raises(CheckpointError) as caught:
        verify(checkpoint)
    assert said in str(caught.value)
    assert str(checkpoint.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_are_checked_when_they_are_read_or_all_before_where_another_may_be_taken(folder):
    write(folder, 10)
    newest = write(folder, 20)
    flip(newest.path / data_file(1))
    assert choose_checkpoint(CheckpointConfig(), folder) == (newest, [])
    with TensorFiles(newest.path).open(data_file(0)) as file:
        assert file.get_tensor("value@0")[0] == 20
    said = r"rank-00001\.safetensors: is damaged \(the SHA-256 of extent 0 is not"
    with pytest.raises(DamagedError, match=said), TensorFiles(newest.path).open(data_file(1)):
        pass
    chosen, skipped = choose_checkpoint(CheckpointConfig(fallback=True), folder)
    assert chosen.step == 10
    assert skipped[0].startswith("skipped step-00000020: ")


def test_saves_that_never_ended_do_not_exist_for_readers(folder):
    """On a disk such folders have another name."""
    target(folder / folder_name(5)).write_text("run.json", "{}")
    assert checkpoints_in(folder) == []
    assert choose_checkpoint(CheckpointConfig(), folder) == (None, []), "a run starts afresh"
    assert [c.step for c in checkpoints_in(folder, unfinished=True)] == [5]


def test_what_is_kept(folder):
    losses = {10: 1.0, 20: 3.0, 30: 2.0, 40: 4.0, 50: 5.0}
    for step in range(10, 70, 10):
        write(folder, step, losses.get(step))
    prune(folder, last=1, best=2)
    assert [c.step for c in checkpoints_in(folder)] == [10, 30, 60]


def test_a_branch_begins_with_a_copy_that_the_store_makes(folder, tmp_path):
    """Its marker is the last object, and it stays when the original goes."""
    original, elsewhere = write(folder, 20), ObjectPath(f"{folder}-branch")
    copy = share(original, elsewhere)
    prune(folder, last=1)
    original.path.remove_all()
    verify(copy)
    assert checkpoints_in(elsewhere) == [copy]
    assert checkpoints_in(folder) == []
    with pytest.raises(CheckpointError, match=r"is not where .* lies; leave checkpoint\.folder as it was"):
        share(copy, tmp_path)


class TestFailures:
    def failing(self, monkeypatch, times, error=None):
        """Make the first `times` writes fail."""
        left, pipe = times, ObjectPath.writing

        def writing(self, part_bytes):
            nonlocal left
            if left:
                left -= 1
                raise error or OSError(errno.EIO, "Could not connect", str(self))
            return pipe(self, part_bytes)

        monkeypatch.setattr(ObjectPath, "writing", writing)
        monkeypatch.setattr(targets, "RETRY_S", 0.01)

    def test_a_store_that_answers_again_is_written(self, folder, monkeypatch):
        self.failing(monkeypatch, 3)
        said = []
        into = ObjectTarget(folder / "a", 60.0, said.append)
        into.write_text("x", "text")
        assert (folder / "a" / "x").read_text("utf-8") == "text"
        assert said == [f"{folder}/a/x: Could not connect; tried again for 60 s, training goes on"]
        assert into.progress >= 4, "attempts are progress"

    def test_one_that_does_not_is_an_error_in_one_line(self, folder, monkeypatch):
        self.failing(monkeypatch, 10**9)
        with pytest.raises(OSError, match="Could not connect") as caught:
            ObjectTarget(folder / "a", 0.05, lambda line: None).write_text("x", "text")
        assert caught.value.filename == f"{folder}/a/x"

    def test_files_for_which_others_wait_together_share_the_time(self, folder, monkeypatch):
        """The manifest takes 40 s of 60; the marker has the 20 s that are left."""
        clock, wanted = [0.0], {"manifest.json": 40.0, MARKER: 80.0}
        monkeypatch.setattr(targets, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=self.advancing(clock)))
        upload = ObjectTarget._upload

        def unwilling(self, name, pieces, extents=False):
            if clock[0] < wanted[name]:
                raise OSError(errno.EIO, "busy", name)
            return upload(self, name, pieces, extents)

        monkeypatch.setattr(ObjectTarget, "_upload", unwilling)
        with pytest.raises(OSError, match="busy"):
            ObjectTarget(folder / "a", 60.0, lambda line: None).complete({})
        assert clock[0] == 60
        assert not (folder / "a" / MARKER).is_file()
        clock[0], wanted[MARKER] = 0.0, 58.0
        ObjectTarget(folder / "a", 60.0, lambda line: None).complete({})
        assert (folder / "a" / MARKER).is_file()

    @staticmethod
    def advancing(clock):
        def sleep(seconds):
            clock[0] += seconds

        return sleep

    @pytest.mark.parametrize("size", [None, 3])
    def test_what_arrives_otherwise_than_it_was_sent_is_no_success(self, folder, monkeypatch, size):
        """By its size; else, where the store gives no entity tag that fits, by reading it back."""
        facts = ObjectPath.facts
        if size is None:
            monkeypatch.setattr(targets, "sha256_of", lambda path: "0" * 64)
        else:
            monkeypatch.setattr(ObjectPath, "facts", lambda self: {**facts(self), "size": size})
        with pytest.raises(OSError, match=r"does not hold what was written|holds 3 bytes, 4 were written"):
            ObjectTarget(folder / "a", 0.0, lambda line: None).write_text("x", "text")

    def test_a_write_that_breaks_off_leaves_no_object(self, folder, monkeypatch):
        """Of S3 only: closing the file would make one. The store in memory has its name from the start."""
        closed = []

        class File:
            closed = False

            def close(self):
                closed.append("close")

            def discard(self):
                closed.append("discard")

        monkeypatch.setattr(MemoryFileSystem, "open", lambda *args, **kwargs: File())
        with pytest.raises(OSError, match="no more"), (folder / "x").writing(100):
            raise RuntimeError("no more")
        assert closed == ["discard"]

    def test_an_unknown_store_or_package_is_one_line(self):
        with pytest.raises(CheckpointError, match=r"nosuch://x/y: checkpoints cannot be kept there \(.*nosuch.*\)$"):
            check_folder(ObjectPath("nosuch://x/y"))

    def test_a_probe_leaves_nothing(self, folder):
        check_folder(folder)
        assert folder.entries() == {}

    def test_outages_are_not_taken_for_missing_files(self, folder, monkeypatch):
        checkpoint = write(folder, 20)

        def down(*args, **kwargs):
            raise ConnectionError("down")

        monkeypatch.setattr(MemoryFileSystem, "info", down)
        for question in (lambda: checkpoint.complete, lambda: checkpoints_in(folder)):
            with pytest.raises(CheckpointError, match=r"cannot be read \(down\)"):
                question()
        monkeypatch.setattr(MemoryFileSystem, "ls", down)
        with pytest.raises(CheckpointError, match=r"cannot be listed \(down\)"):
            checkpoints_in(folder)


class TestNames:
    def test_urls_and_paths(self, tmp_path):
        assert location("s3://bucket/a/") == ObjectPath("s3://bucket/a")
        assert location(tmp_path) == location(f"file://{tmp_path}") == tmp_path
        assert location(type(tmp_path)("s3://bucket/a/b")) == ObjectPath("s3://bucket/a/b"), "pathlib drops a slash"
        assert (ObjectPath("s3://b") / "c").parent == ObjectPath("s3://b")

    def test_a_run_s_checkpoints(self, tmp_path):
        for folder, expected in (
            (None, tmp_path / "x" / "checkpoints"),
            ("s3://bucket/all", ObjectPath("s3://bucket/all/x")),
            (str(tmp_path / "fast"), tmp_path / "fast" / "x"),
        ):
            config = run_config(name="x", runs_folder=str(tmp_path), checkpoint={"folder": folder})
            assert run_checkpoints(config) == expected
            config.run_folder.mkdir(exist_ok=True)
            (config.run_folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
            assert recorded_checkpoints(config.run_folder) == expected
            assert checkpoints_folder(str(config.run_folder)) == expected

    def test_credentials_do_not_belong_into_files(self):
        with pytest.raises(ConfigError, match=r"checkpoint\.folder: .*credentials in its URL") as caught:
            run_config(checkpoint={"folder": "s3://key:secret@bucket/x"})
        assert "\n" not in str(caught.value)

    def test_other_ranks_must_wait_longer_than_a_save_tries(self):
        with pytest.raises(
            ConfigError, match=r"checkpoint\.retry_minutes 10 must be less than parallel\.timeout_s 600"
        ):
            run_config(checkpoint={"folder": "s3://bucket", "retry_minutes": 10})
