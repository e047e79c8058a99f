"""Files of tensors in an object store: read by ranges, each extent checked; what is damaged is named in one line."""

import pytest
import torch
from test_object_checkpoints import flip

from checkpoints import target as targets
from checkpoints import tensor_objects
from checkpoints.folder import folder_name
from checkpoints.location import ObjectPath
from checkpoints.storage import data_file
from checkpoints.target import target
from checkpoints.tensor_objects import TensorObject, regrouped
from megamem.errors import DamagedError
from megamem.tensor_files import safetensors_stream


@pytest.fixture
def folder(tmp_path):
    return ObjectPath(f"memory://{tmp_path.name}/run")


CHANGES = {
    "another length": (lambda data: b"\xff" * 8 + data[8:], "its header names bytes beyond its end"),
    "no JSON": (lambda data: data[:8] + b"\xff" + data[9:], "its header does not say where tensors lie"),
    "another type": (lambda data: data.replace(b'"F64"', b'"F63"'), "its header does not say where tensors lie"),
    "another size": (lambda data: data.replace(b"[64, 32]", b"[64, 31]"), "its header does not say where tensors lie"),
    "another shape": (
        lambda data: data.replace(b"[64, 32]", b"[32, 64]"),
        "a tensor of it has shape [32, 64], the checkpoint's index names more",
    ),
    "another name": (lambda data: data.replace(b"one@", b"two@"), "one@ is missing"),
    "shorter": (lambda data: data[:1000], "it has ended within extent 15"),
}
"""Of a file without hashes of extents: what becomes of its bytes, and what is said of it."""


class TestRanges:
    @pytest.fixture(autouse=True)
    def small_extents(self, monkeypatch):
        monkeypatch.setattr(tensor_objects, "EXTENT_BYTES", 64)
        monkeypatch.setattr(targets, "EXTENT_BYTES", 64)
        monkeypatch.setattr(targets, "PART_BYTES", 256)

    @pytest.fixture
    def written(self, folder):
        tensors = {
            "wide@0,0": torch.arange(64 * 32, dtype=torch.float64).view(64, 32),
            "half@0": torch.arange(50).to(torch.bfloat16),
            "bytes@0": torch.arange(77, dtype=torch.uint8),
            "none@0": torch.empty(0, 3),
            "one@": torch.tensor(3.5),
        }
        into = target(folder / folder_name(1))
        into.write_tensors(data_file(0), tensors)
        return tensors, into.final / data_file(0), into.written()[data_file(0)]

    def test_every_tensor_comes_back(self, written):
        tensors, path, entry = written
        file = TensorObject(path, entry)
        for key, value in tensors.items():
            assert torch.equal(file.get_tensor(key), value)
            assert file.get_tensor(key).dtype == value.dtype

    def test_it_is_the_format_that_safetensors_reads(self, written, tmp_path):
        from safetensors.torch import load_file

        tensors, path, _ = written
        with path._store() as (store, name):
            (tmp_path / "file").write_bytes(store.cat_file(name))
        found = load_file(tmp_path / "file")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], value) for key, value in tensors.items())

    def test_a_part_costs_the_bytes_of_its_blocks(self, written, monkeypatch):
        tensors, path, entry = written
        file, asked = TensorObject(path, entry), []
        read = ObjectPath.read_ranges
        monkeypatch.setattr(ObjectPath, "read_ranges", lambda self, ranges: asked.extend(ranges) or read(self, ranges))
        rows = file.get_slice("wide@0,0")[slice(16, 24), slice(4, 8)]
        assert torch.equal(rows, tensors["wide@0,0"][16:24, 4:8])
        # 8 rows of 256 bytes, and the rest of the extents at both ends
        assert 8 * 256 <= sum(stop - start for start, stop in asked) <= 8 * 256 + 2 * 64
        assert all(stop - start == 64 for start, stop in asked)

    def test_a_damaged_block_hurts_only_those_who_read_it(self, written):
        tensors, path, entry = written
        flip(path)  # in the middle of the wide tensor
        file = TensorObject(path, entry)
        assert torch.equal(file.get_slice("wide@0,0")[slice(0, 8), slice(0, 32)], tensors["wide@0,0"][:8])
        with pytest.raises(DamagedError, match="is damaged"):
            file.get_slice("wide@0,0")[slice(24, 40), slice(0, 32)]

    def test_a_checkpoint_that_was_copied_from_a_disk_is_read_too(self, written):
        """Its manifest has no hashes of extents: `verify` hashes the whole file."""
        tensors, path, entry = written
        plain = {"bytes": entry["bytes"], "sha256": entry["sha256"]}
        assert torch.equal(TensorObject(path, plain).get_tensor("half@0"), tensors["half@0"])

    @pytest.mark.parametrize("kind", CHANGES)
    def test_one_that_changes_after_it_was_verified_is_named_in_one_line(self, written, kind):
        """There is nothing to compare its bytes with, but what no file of tensors says is no traceback."""
        _, path, entry = written
        with path._store() as (store, name):
            data = store.cat_file(name)
            store.pipe_file(name, CHANGES[kind][0](data))

        def read():
            file = TensorObject(path, {"bytes": entry["bytes"], "sha256": entry["sha256"]})
            file.get_slice("wide@0,0")[slice(0, 64), slice(0, 32)]
            file.get_tensor("one@")

        with pytest.raises(DamagedError) as caught:
            read()
        assert str(caught.value) == f"{path}: is damaged ({CHANGES[kind][1]})"


def test_streams_are_regrouped_without_a_byte_lost():
    data = bytes(range(256)) * 5
    for size in (1, 7, 100, 256, 1280, 5000):
        for step in (1, 9, 300):
            pieces = [memoryview(data[at : at + step]) for at in range(0, len(data), step)]
            parts = [bytes(part) for part in regrouped(pieces, size)]
            assert b"".join(parts) == data
            assert {len(part) for part in parts[:-1]} <= {size}


def test_a_stream_is_the_tensors_own_memory():
    value = torch.zeros(4)
    _, data = safetensors_stream({"value": value})
    value[0] = 1.0
    assert bytes(data[:4]) == torch.ones(1).numpy().tobytes()
