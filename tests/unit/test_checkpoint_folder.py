"""Folders of checkpoints: what counts as one, damage of every kind by name, what is kept, what a run goes on from."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from checkpoints.folder import MARKER, checkpoints_in, folder_name, mark_complete, open_checkpoint
from checkpoints.resume import MUST_AGREE, check_identity, choose_checkpoint
from checkpoints.retention import prune, steps_to_keep
from checkpoints.saver import Saver
from checkpoints.verify import verify
from megamem.cli.main import app
from megamem.config.checkpoint import CheckpointConfig
from megamem.config.model import ModelConfig
from megamem.errors import CheckpointError
from megamem.files import sha256_file
from tests.saved_run import saved_run


def write(folder, step, val_loss=None):
    """A checkpoint with two data files, as a saver leaves it."""
    partial = folder / (folder_name(step) + ".partial")
    partial.mkdir(parents=True)
    contents = {
        "rank-00000.safetensors": b"a" * 1000,
        "rank-00001.safetensors": bytes(range(256)) * 4,
        "index.json": b"{}",
        "run.json": json.dumps(saved_run(step, val_loss=val_loss)).encode(),
    }
    for name, content in contents.items():
        (partial / name).write_bytes(content)
    files = {name: {"bytes": len(c), "sha256": sha256_file(partial / name)} for name, c in contents.items()}
    mark_complete(partial, folder / folder_name(step), files)
    return open_checkpoint(folder / folder_name(step))


@pytest.fixture
def checkpoint(tmp_path):
    return write(tmp_path / "checkpoints", 20)


def test_what_is_written_is_complete_and_intact(checkpoint):
    assert checkpoint.complete
    assert checkpoint.step == checkpoint.run()["step"] == 20
    verify(checkpoint)
    assert [path.name for path in checkpoint.path.parent.iterdir()] == ["step-00000020"], "nothing partial is left"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "flipped byte": (lambda p: flip(p / "rank-00001.safetensors"), "rank-00001.safetensors: is damaged"),
    "truncated file": (
        lambda p: (p / "rank-00000.safetensors").write_bytes(b"a" * 999),
        "rank-00000.safetensors: has 999 bytes, 1,000 were written",
    ),
    "missing file": (lambda p: (p / "rank-00000.safetensors").unlink(), "rank-00000.safetensors: is missing"),
    "missing index": (lambda p: (p / "index.json").unlink(), "index.json: is missing"),
    "changed index": (lambda p: (p / "index.json").write_text("[]"), "index.json: is damaged"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: is missing"),
    "changed manifest": (
        lambda p: flip(p / "manifest.json"),
        "manifest.json: ",
    ),
    "foreign file": (lambda p: (p / "notes.txt").write_text("x"), "notes.txt: does not belong to this checkpoint"),
    "missing marker": (lambda p: (p / MARKER).unlink(), "was not written to its end"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_in_one_line(checkpoint, kind):
    harm, said = DAMAGE[kind]
    harm(checkpoint.path)
    with pytest.raises(CheckpointError) as caught:
        verify(checkpoint)
    assert said in str(caught.value)
    assert str(checkpoint.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_byte_of_every_file_counts(checkpoint):
    """A flip anywhere is found."""
    for path in sorted(checkpoint.path.iterdir()):
        data = path.read_bytes()
        for place in (0, len(data) // 3, len(data) - 1):
            changed = bytearray(data)
            changed[place] ^= 0x10
            path.write_bytes(bytes(changed))
            if path.name == MARKER and place == len(data) - 1:  # the newline at its end
                path.write_bytes(data)
                continue
            with pytest.raises(CheckpointError):
                verify(checkpoint)
            path.write_bytes(data)
    verify(checkpoint)


def test_names_that_only_end_like_one_are_left_alone(tmp_path):
    """A checkpoint put aside under another name is nobody's to remove."""
    write(tmp_path, 10).path.rename(tmp_path / "best-step-00000010")
    write(tmp_path, 20)
    assert [c.step for c in checkpoints_in(tmp_path)] == [20]
    prune(tmp_path, last=1)
    assert (tmp_path / "best-step-00000010").is_dir()


def test_a_loss_that_is_no_number_is_not_the_best(tmp_path):
    for step, loss in ((10, float("nan")), (20, 1.0), (30, 2.0)):
        write(tmp_path, step, loss)
    prune(tmp_path, last=1, best=1)
    assert [c.step for c in checkpoints_in(tmp_path)] == [20, 30]


def test_after_a_fallback_skipped_checkpoints_do_not_push_good_ones_out(tmp_path):
    """20 and 30 are damaged, the run went on from 10 and has saved 15."""
    for step in (10, 15, 20, 30):
        write(tmp_path, step)
    prune(tmp_path, last=2, newest=15)
    assert [c.step for c in checkpoints_in(tmp_path)] == [10, 15, 20, 30]
    prune(tmp_path, last=1, newest=15)
    assert [c.step for c in checkpoints_in(tmp_path)] == [15, 20, 30]


def test_unfinished_folders_do_not_exist_for_readers(tmp_path):
    folder = tmp_path / "checkpoints"
    write(folder, 5)
    (folder / "step-00000009.partial").mkdir()
    (folder / "other").mkdir()
    write(folder, 7)
    (folder / folder_name(7) / MARKER).unlink()
    assert [(c.step, c.complete) for c in checkpoints_in(folder)] == [(5, True), (7, False)]
    assert choose_checkpoint(CheckpointConfig(), folder)[0].step == 5
    assert checkpoints_in(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        ({"last": 2}, {50, 60}),
        ({"last": 1, "every": 20}, {20, 40, 60}),
        ({"last": 1, "best": 2}, {60, 10, 30}),
        ({"last": 9}, {10, 20, 30, 40, 50, 60}),
    ],
)
def test_what_is_kept(tmp_path, rule, steps):
    losses = {10: 1.0, 20: 3.0, 30: 2.0, 40: 4.0, 50: 5.0}
    for step in range(10, 70, 10):
        write(tmp_path, step, losses.get(step))
    rule = {"every": None, "best": 0, **rule}
    assert steps_to_keep(checkpoints_in(tmp_path), losses=losses, **rule) == steps
    removed = prune(tmp_path, **rule).removed
    assert {c.step for c in checkpoints_in(tmp_path)} == steps
    assert {c.step for c in removed} == set(range(10, 70, 10)) - steps
    for checkpoint in checkpoints_in(tmp_path):
        verify(checkpoint)


def test_remains_are_removed_with_the_rest(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / folder_name(10) / MARKER).unlink()
    prune(tmp_path, last=5)
    assert [c.step for c in checkpoints_in(tmp_path)] == [20]


class TestRetention:
    """What stands in its way, and what is not its own."""

    @pytest.fixture
    def stubborn(self, tmp_path, monkeypatch):
        """Checkpoints 10 to 50; a file of 10 cannot be removed, as on a file system that keeps it open."""
        for step in range(10, 60, 10):
            write(tmp_path, step)
        original = os.unlink

        def unlink(path, *arguments, **options):
            if os.fspath(path) == "index.json" and "step-00000010" in os.readlink(f"/proc/self/fd/{options['dir_fd']}"):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            original(path, *arguments, **options)

        monkeypatch.setattr(os, "unlink", unlink)
        return tmp_path

    def test_one_that_cannot_be_removed_keeps_no_other(self, stubborn):
        for _ in range(2):
            pruned = prune(stubborn, last=2)
            assert pruned.failed == {stubborn / folder_name(10): "Device or resource busy"}
            assert [c.step for c in checkpoints_in(stubborn) if c.complete] == [40, 50]
            assert (stubborn / folder_name(10) / "index.json").is_file()

    def test_it_is_told_once(self, stubborn):
        told = []
        saver = Saver(
            stubborn, CheckpointConfig(keep_last=2), SimpleNamespace(rank=lambda: 0, size=lambda: 1), told.append
        )
        for step in (60, 70):
            write(stubborn, step)
            saver._complete(step, SimpleNamespace(complete=lambda files: None), [])
        assert told == [
            f"{stubborn / folder_name(10)}: cannot be removed (Device or resource busy); tried again after each save"
        ]
        assert [c.step for c in checkpoints_in(stubborn) if c.complete] == [60, 70]

    def test_the_command_says_it(self, stubborn):
        result = CliRunner().invoke(app, ["checkpoint", "prune", str(stubborn), "--keep-last", "2"])
        assert isinstance(result.exception, CheckpointError)
        assert str(result.exception) == f"{stubborn / folder_name(10)}: cannot be removed (Device or resource busy)"
        assert "2 removed" in result.stdout.splitlines()[-1]

    def test_of_a_link_the_link_goes(self, tmp_path):
        """What it points to is somebody's archive."""
        for step in (10, 20):
            write(tmp_path / "run", step)
        (tmp_path / "run" / folder_name(10)).rename(tmp_path / folder_name(10))
        (tmp_path / "run" / folder_name(10)).symlink_to(tmp_path / folder_name(10))
        assert [c.step for c in prune(tmp_path / "run", last=1).removed] == [10]
        assert [path.name for path in (tmp_path / "run").iterdir()] == [folder_name(20)]
        verify(open_checkpoint(tmp_path / folder_name(10)))

    def test_a_checkpoint_takes_the_place_of_a_link(self, tmp_path):
        write(tmp_path / "archive", 10)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / folder_name(10)).symlink_to(tmp_path / "archive" / folder_name(10))
        verify(write(tmp_path / "run", 10))
        assert not (tmp_path / "run" / folder_name(10)).is_symlink()
        verify(open_checkpoint(tmp_path / "archive" / folder_name(10)))

    def test_only_unfinished_saves_are_removed_at_the_start(self, tmp_path):
        """Whatever else somebody keeps under a name that ends in .partial."""
        for name in ("step-00000007.partial", "notes.partial", "step-mine.partial"):
            (tmp_path / name).mkdir()
        (tmp_path / "list.partial").write_text("mine")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "file").write_text("mine")
        (tmp_path / "step-00000008.partial").symlink_to(tmp_path / "elsewhere")
        Saver(tmp_path, CheckpointConfig(), SimpleNamespace(rank=lambda: 0, size=lambda: 1))
        names = ["elsewhere", "list.partial", "notes.partial", "step-mine.partial"]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert (tmp_path / "elsewhere" / "file").is_file()


class TestChoose:
    def test_nothing_yet(self, tmp_path):
        assert choose_checkpoint(CheckpointConfig(), tmp_path) == (None, [])

    def test_none_looks_at_nothing(self, checkpoint):
        assert choose_checkpoint(CheckpointConfig(resume="none"), checkpoint.path.parent) == (None, [])

    def test_a_path(self, checkpoint, tmp_path):
        assert choose_checkpoint(CheckpointConfig(resume=str(checkpoint.path)), tmp_path) == (checkpoint, [])
        with pytest.raises(CheckpointError, match=r"nowhere: no checkpoint"):
            choose_checkpoint(CheckpointConfig(resume=str(tmp_path / "nowhere")), tmp_path)

    def test_only_broken_ones_stop_the_run(self, checkpoint):
        (checkpoint.path / MARKER).unlink()
        with pytest.raises(CheckpointError, match=r"holds 1 checkpoint\(s\), but none was written to its end"):
            choose_checkpoint(CheckpointConfig(), checkpoint.path.parent)

    def test_a_damaged_newest_stops_the_run_or_is_skipped_by_name(self, tmp_path):
        write(tmp_path, 10)
        flip(write(tmp_path, 20).path / "rank-00000.safetensors")
        with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: is damaged.*; --fallback goes on from"):
            choose_checkpoint(CheckpointConfig(), tmp_path)
        chosen, skipped = choose_checkpoint(CheckpointConfig(fallback=True), tmp_path)
        assert chosen.step == 10
        (line,) = skipped
        assert line.startswith("skipped step-00000020: ")

    def test_all_damaged(self, tmp_path):
        for step in (10, 20):
            flip(write(tmp_path, step).path / "rank-00000.safetensors")
        with pytest.raises(CheckpointError, match=r"all 2 checkpoints are damaged; the newest: .*step-00000020"):
            choose_checkpoint(CheckpointConfig(fallback=True), tmp_path)

    def test_a_half_removed_folder_is_no_checkpoint(self, tmp_path):
        write(tmp_path, 10)
        newest = write(tmp_path, 20)
        (newest.path / MARKER).unlink()
        shutil.rmtree(newest.path / "x", ignore_errors=True)
        assert choose_checkpoint(CheckpointConfig(), tmp_path)[0].step == 10


SAVED = {
    "model": {"layers": 4, "mixer": {"kind": "local_attention"}, "memory": []},
    "data_fingerprint": "abc",
    "tokenizer_sha256": "def",
    "batch_tokens": 4096,
    "sequence_length": 2048,
    "phases": [
        {"first_step": step, "data_fingerprint": "abc", "batch_tokens": 4096, "sequence_length": 8192}
        for step in (5, 1000)
    ],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {**SAVED["model"], "layers": 5}}, "model.layers was 4 and is 5"),
        (
            {"model": {**SAVED["model"], "mixer": {"kind": "full_attention"}}},
            "model.mixer.kind was 'local_attention' and is 'full_attention'",
        ),
        ({"data_fingerprint": "xyz"}, "data_fingerprint was 'abc' and is 'xyz'"),
        ({"tokenizer_sha256": None}, "tokenizer_sha256 was 'def' and is None"),
        ({"batch_tokens": 8192}, "batch_tokens was 4096 and is 8192"),
        ({"sequence_length": 1024}, "sequence_length was 2048 and is 1024"),
        (
            {"phases": [{**SAVED["phases"][0], "sequence_length": 4096}]},
            "phases.after_step_5.sequence_length was 8192 and is 4096",
        ),
    ],
)
def test_another_run_is_named_field_by_field(checkpoint, change, said):
    check_identity(checkpoint, SAVED, SAVED)
    with pytest.raises(CheckpointError, match="a run cannot go on with another") as caught:
        check_identity(checkpoint, SAVED, {**SAVED, **change})
    assert f"{checkpoint.path}: {said}" in str(caught.value)


def test_phases_that_have_not_begun_may_change(checkpoint):
    check_identity(checkpoint, SAVED, {**SAVED, "phases": SAVED["phases"][:1]})
    check_identity(checkpoint, {**SAVED, "phases": SAVED["phases"][:1]}, SAVED)


def test_what_weights_and_states_do_not_depend_on_may_change(checkpoint):
    """Also a field of the model that the saved configuration did not have yet, at its default."""
    shape = {"layers": 2, "hidden_size": 8, "heads": 2, "vocab_size": 16, "chunk_size": 4}
    whole = ModelConfig.model_validate(shape).model_dump(mode="json")
    kernels = {"attention_kernel": "eager", "recurrence_kernel": "fla", "deep_memory_kernel": "triton"}
    free = (*kernels, "deep_memory_precision", "init_std")
    now = {**SAVED, "model": {key: value for key, value in whole.items() if key not in free}}
    for saved in (shape, whole, {**whole, **kernels, "init_std": 0.5}):
        check_identity(checkpoint, {**SAVED, "model": saved}, now)
    with pytest.raises(CheckpointError, match=r"model\.heads was 4 and is 2"):
        check_identity(checkpoint, {**SAVED, "model": {**shape, "heads": 4}}, now)


def test_every_field_that_must_agree_is_tested():
    assert set(SAVED) == set(MUST_AGREE)
