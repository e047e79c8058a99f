"""Data that are not what was written: tables, copies of remote shards, token ids, files that no index describes."""

import hashlib
import os
import shutil

import numpy as np
import pytest
import torch
from data_helpers import config_of, feeder_of, make_shards
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megamem.data import cache as cache_module
from megamem.data.cache import ShardCache
from megamem.data.feeder import evaluation_documents
from megamem.data.file_hash import kept_hash
from megamem.data.megatron import MegatronStore
from megamem.data.npy_store import NpyStore
from megamem.data.shard_store import ShardStore
from megamem.errors import DataError


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folder with `tokenizer` and shards in `a`."""
    root = tmp_path_factory.mktemp("data")
    make_shards(root, (40, 700, 300), "a")
    return root


@pytest.fixture
def copy(root, tmp_path):
    return shutil.copytree(root / "a", tmp_path / "copy")


def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(bytes(data))


def test_a_flipped_bit_anywhere_in_the_table_of_documents_is_found(copy):
    """An offset off by one byte gives ids up to 65,535, whatever the vocabulary."""
    table = copy / "index.npy"
    whole = table.read_bytes()
    for place in range(0, len(whole), 7):
        flip(table, place)
        with pytest.raises(DataError, match=r"index\.npy: (damaged|truncated or foreign)") as caught:
            ShardStore(str(copy))
        assert "\n" not in str(caught.value)
        table.write_bytes(whole)
    assert len(ShardStore(str(copy))) == 3


def test_ids_of_a_damaged_shard_end_the_reading(root, copy):
    """Every token of the shard but its first and last headers is changed, so that it opens without a complaint."""
    store = ShardStore(str(copy))
    _, offset, length, _ = store.table[1].item()
    shard = copy / store.index.shards[int(store.table["shard"][1])].file
    data = bytearray(shard.read_bytes())
    data[offset : offset + 2 * length] = b"\xff\xdc" * length
    shard.write_bytes(bytes(data))
    feeder = feeder_of(root, sources=str(copy), rows=1, micro=1, documents="pad")
    with pytest.raises(DataError, match=r"copy: token id 56575 does not fit the source's vocabulary of 300"):
        [feeder.batch(step) for step in range(len(feeder._rows._sources[0]))]
    with pytest.raises(DataError, match=r"copy: token id 56575 does not fit the source's vocabulary of 300"):
        list(evaluation_documents(config_of(root, validation=str(copy)), chunk_size=8))


def open_anew(store):
    """Open the store's copies as another process would, which has checked none of them."""
    cache_module.forget_checks()
    return ShardStore(store.path, store.cache)


def all_tokens(store):
    return np.concatenate([store.tokens(d, 0, int(store.lengths[d])) for d in range(len(store))])


@pytest.mark.parametrize("harm", ["zeros", "flipped bit", "cut off"])
def test_a_damaged_copy_of_a_remote_shard_is_fetched_again(root, tmp_path, harm):
    """As after a crash of the machine: the name was on the disk, the contents were not."""
    expected = all_tokens(ShardStore(str(root / "a")))
    store = ShardStore(f"file://{root / 'a'}", ShardCache(tmp_path / "cache", 1 << 20))
    np.testing.assert_array_equal(all_tokens(store), expected)
    copies = list((tmp_path / "cache").glob("*.shard"))
    assert len(copies) == len(store.index.shards) + 1
    for path in copies:
        data = path.read_bytes()
        changed = {"zeros": bytes(len(data)), "cut off": data[:-5], "flipped bit": data[:99] + b"?" + data[100:]}[harm]
        path.write_bytes(changed)
    np.testing.assert_array_equal(all_tokens(open_anew(store)), expected)


def test_a_copy_is_checked_once_a_process(root, tmp_path, monkeypatch):
    store = ShardStore(f"file://{root / 'a'}", ShardCache(tmp_path / "cache", 1 << 20))
    all_tokens(store)
    digests = []
    original = cache_module.sha256
    monkeypatch.setattr(cache_module, "sha256", lambda file: digests.append(1) or original(file))
    cache_module.forget_checks()
    for _ in range(3):
        all_tokens(ShardStore(store.path, store.cache))
    assert len(digests) == len(store.index.shards) + 1


def test_a_copy_is_on_the_disk_before_it_has_its_name(root, tmp_path, monkeypatch):
    synced, named = [], []
    fsync, replace = os.fsync, cache_module.Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file))[1])

    def renamed(path, to):
        named.append(path.stat().st_ino in synced)
        return replace(path, to)

    monkeypatch.setattr(cache_module.Path, "replace", renamed)
    all_tokens(ShardStore(f"file://{root / 'a'}", ShardCache(tmp_path / "cache", 1 << 20)))
    assert named
    assert all(named)


def test_fingerprints_of_bare_tokens_cover_every_token(tmp_path):
    """Files of the same sizes with one other token: a run must not go on with them."""

    def megatron(name, tokens):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.int32)
        builder.add_item(torch.tensor(tokens))
        builder.end_document()
        builder.finalize(str(tmp_path / f"{name}.idx"))
        return MegatronStore(str(tmp_path / name), tmp_path / "tables").fingerprint

    def npy(name, tokens):
        np.save(tmp_path / f"{name}.npy", np.array(tokens, np.uint16))
        return NpyStore(str(tmp_path / f"{name}.npy"), 7, None, tmp_path / "tables").fingerprint

    for fingerprint in (megatron, npy):
        assert fingerprint("a", [1, 2, 3, 7]) == fingerprint("b", [1, 2, 3, 7]) != fingerprint("c", [1, 9, 3, 7])


def test_a_large_file_of_tokens_is_hashed_once(tmp_path, monkeypatch):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    first = MegatronStore(str(tmp_path / "a"), tmp_path / "tables").fingerprint
    monkeypatch.setattr("megamem.data.file_hash.sha256_file", None)
    assert MegatronStore(str(tmp_path / "a"), tmp_path / "tables").fingerprint == first


def test_a_file_that_has_changed_unseen_by_size_and_time_is_hashed_again(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"tokens")
    before, state = kept_hash(file, tmp_path / "tables"), file.stat()
    file.write_bytes(b"others")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert kept_hash(file, tmp_path / "tables") == hashlib.sha256(b"others").hexdigest() != before
