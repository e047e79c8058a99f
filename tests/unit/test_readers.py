"""Opening and reading token shards, remote ones through the cache, and Megatron's files."""

import io
import json
import multiprocessing
import shutil

import fsspec
import numpy as np
import pytest
import torch
from data_helpers import make_shards
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megamem import patience
from megamem.data import cache as cache_module
from megamem.data import shard_store
from megamem.data.cache import ShardCache
from megamem.data.megatron import MegatronStore
from megamem.data.open_store import open_store
from megamem.data.shard_store import ShardStore
from megamem.errors import DataError, StoreError
from megamem.files import sha256_file
from tokenization.shard_format import FileRecord, padded, token_dtype


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A folder of three shards."""
    return make_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture
def copy(shards, tmp_path):
    return shutil.copytree(shards, tmp_path / "copy")


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", 1 << 20)


def all_tokens(store):
    return np.concatenate([store.tokens(d, 0, int(store.lengths[d])) for d in range(len(store))])


def test_any_stretch_is_the_whole_documents_stretch(shards):
    store = ShardStore(str(shards))
    whole = store.tokens(4, 0, int(store.lengths[4]))
    assert whole.dtype == np.int64
    for start, stop in ((0, 0), (0, 1), (7, 90), (len(whole) - 1, len(whole))):
        np.testing.assert_array_equal(store.tokens(4, start, stop), whole[start:stop])
    assert (store.vocab_size, store.path) == (300, str(shards))
    assert store.shard_borders.tolist() == [0, 2, 5, 6]


def test_fingerprint_is_the_contents(shards, copy, tmp_path):
    assert ShardStore(str(copy)).fingerprint == ShardStore(str(shards)).fingerprint
    other = make_shards(tmp_path, seed=9)
    assert ShardStore(str(other)).fingerprint != ShardStore(str(shards)).fingerprint


def assert_refused_at_once_and_when_read(store, document, message):
    for read in (store.check_files, lambda: store.tokens(document, 0, 1)):
        with pytest.raises(DataError, match=message):
            read()


@pytest.mark.parametrize("where", ["local", "remote"])
def test_the_table_of_documents_is_mapped(shards, cache, where):
    """Its columns are views of pages of the file, or of its copy in the cache: all processes of a node share them."""
    store = ShardStore(str(shards)) if where == "local" else ShardStore(f"file://{shards}", cache)
    assert isinstance(store.table.base, np.memmap)
    assert np.shares_memory(store.lengths, store.table)
    assert not store.lengths.flags.writeable


def test_a_shard_stays_open_while_it_is_read(shards, monkeypatch):
    """As where another thread opens so many that this one is forgotten at once: the number of its file is free then."""
    monkeypatch.setattr(shard_store, "_open_local", io.FileIO)
    expected = ShardStore(str(shards)).tokens(4, 3, 9)
    monkeypatch.undo()
    np.testing.assert_array_equal(ShardStore(str(shards)).tokens(4, 3, 9), expected)


def test_missing_shard(copy):
    (copy / "shard-000001.tar").unlink()
    store = ShardStore(str(copy))
    assert_refused_at_once_and_when_read(store, 2, r"shard-000001\.tar: missing \(listed in index\.json\)")
    assert len(store.tokens(0, 0, 2)) == 2, "other shards can be read"


def test_truncated_shard(copy):
    path = copy / "shard-000002.tar"
    path.write_bytes(path.read_bytes()[:-10])
    message = r"shard-000002\.tar: truncated: [\d,]+ of [\d,]+ bytes"
    assert_refused_at_once_and_when_read(ShardStore(str(copy)), 5, message)


def test_foreign_shard_of_another_size(copy):
    path = copy / "shard-000000.tar"
    path.write_bytes(path.read_bytes() + b"more")
    message = r"shard-000000\.tar: foreign shard: [\d,]+ bytes, index\.json says"
    assert_refused_at_once_and_when_read(ShardStore(str(copy)), 0, message)


@pytest.mark.parametrize("content", ["zeros", "other shard", "text"])
def test_foreign_shard_of_the_same_size(copy, content):
    path = copy / "shard-000001.tar"
    size = path.stat().st_size
    other = {"zeros": b"", "text": b"x" * size, "other shard": (copy / "shard-000000.tar").read_bytes()}[content]
    path.write_bytes(other[:size].ljust(size, b"\0"))
    store = ShardStore(str(copy))
    with pytest.raises(DataError, match=r"shard-000001\.tar: foreign shard: document 2 of index\.json") as caught:
        store.tokens(3, 0, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not an index of token shards"),
        (b"[]", "not an index of token shards"),
        (b'{"a": 1}', "not an index of token shards"),
        (b'{"format_version": 99}', "format_version 99, this version reads 1"),
        (b'{"format_version": 1}', "damaged index"),
        (b'{"format_version": 1, "header": 3}', "damaged index"),
    ],
)
def test_foreign_index(copy, data, message):
    (copy / "index.json").write_bytes(data)
    with pytest.raises(DataError, match=rf"index\.json: {message}"):
        ShardStore(str(copy))


def rehash(folder):
    """Write the hash that the table of documents has now into the index, as whoever made it would have."""
    index = json.loads((folder / "index.json").read_text())
    index["documents_file"]["sha256"] = sha256_file(folder / "index.npy")
    (folder / "index.json").write_text(json.dumps(index))


def test_foreign_document_table(copy):
    path = copy / "index.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(DataError, match=r"index\.npy: (damaged|truncated)"):
        ShardStore(str(copy))
    np.save(path, np.zeros((len(data) - 128) // 8))
    with pytest.raises(DataError, match=r"index\.npy: damaged or foreign"):
        ShardStore(str(copy))
    rehash(copy)
    with pytest.raises(DataError, match=r"index\.npy: truncated or foreign"):
        ShardStore(str(copy))
    path.write_bytes(b"x" * len(data))
    rehash(copy)
    with pytest.raises(DataError, match=r"index\.npy: damaged, not a table"):
        ShardStore(str(copy))
    path.unlink()
    with pytest.raises(DataError, match=r"index\.npy: missing"):
        ShardStore(str(copy))


def test_index_without_documents_is_an_empty_corpus(copy):
    index = json.loads((copy / "index.json").read_text())
    (copy / "index.json").write_text(json.dumps(index | {"documents": 0}))
    with pytest.raises(DataError, match="empty corpus"):
        ShardStore(str(copy))


def test_open_store_tells_kinds_apart(shards, tmp_path, cache):
    assert isinstance(open_store(str(shards), cache), ShardStore)
    write_megatron(tmp_path / "corpus", [[[1, 2]]])
    assert isinstance(open_store(str(tmp_path / "corpus"), cache), MegatronStore)
    with pytest.raises(DataError, match=r"nowhere: no such shard folder, and no .*nowhere\.idx"):
        open_store(str(tmp_path / "nowhere"), cache)
    with pytest.raises(DataError, match=r"index\.json: missing"):
        open_store(str(tmp_path), cache)


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_padded(size, expected):
    assert padded(size) == expected


def test_token_dtype():
    assert token_dtype(65536) == "uint16"
    assert token_dtype(65537) == "uint32"


# Remote shards


@pytest.fixture
def remote(shards):
    """URL of the shards in an object store."""
    store = fsspec.filesystem("memory")
    store.put(str(shards), "/bucket", recursive=True)
    yield "memory://bucket"
    store.rm("/bucket", recursive=True)


def cached_bytes(cache):
    return sum(path.stat().st_size for path in cache.folder.iterdir())


def test_remote_shards_read_like_local_ones(shards, remote, cache):
    local, store = ShardStore(str(shards)), open_store(remote, cache)
    np.testing.assert_array_equal(all_tokens(store), all_tokens(local))
    assert store.fingerprint == local.fingerprint
    assert store.name(3) == local.name(3)
    np.testing.assert_array_equal(store.lengths, local.lengths)


def test_a_cached_shard_is_not_fetched_again(remote, cache):
    expected = all_tokens(open_store(remote, cache))
    store = open_store(remote, cache)
    for path in fsspec.filesystem("memory").glob("/bucket/*.tar"):
        fsspec.filesystem("memory").rm(path)
    np.testing.assert_array_equal(all_tokens(store), expected)


def test_the_cache_is_bounded_and_drops_the_least_recently_used(shards, tmp_path):
    sizes = [path.stat().st_size for path in sorted(shards.glob("*.tar"))]
    table = (shards / "index.npy").stat().st_size
    cache = ShardCache(tmp_path / "cache", max(sizes) + min(sizes))
    store = ShardStore(f"file://{shards}", cache)
    expected = all_tokens(ShardStore(str(shards)))
    for _ in range(3):
        store._open_remote.cache_clear()
        np.testing.assert_array_equal(all_tokens(store), expected)
        assert cached_bytes(cache) <= cache.limit
    assert cached_bytes(cache) < sum(sizes) + table


def test_recently_used_copies_stay(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 100)
    cache = ShardCache(tmp_path / "cache", 200)

    def read(name):
        path = tmp_path / name
        record = FileRecord(name, 100, cache_module.hashlib.sha256(name.encode() * 100).hexdigest())
        with cache.open(f"file://{path}", record) as file:
            assert file.read() == name.encode() * 100

    for name in "abac":
        read(name)
    for name in "abc":
        (tmp_path / name).unlink()
    read("a")
    read("c")
    with pytest.raises(DataError, match="b: missing"):
        read("b")


def test_abandoned_parts_are_cleared_away(shards, tmp_path):
    size = max(path.stat().st_size for path in shards.glob("*.tar"))
    cache = ShardCache(tmp_path / "cache", size + 1000)
    cache.folder.mkdir()
    (cache.folder / "killed.part").write_bytes(b"x" * size)
    store = ShardStore(f"file://{shards}", cache)
    all_tokens(store)
    assert not (cache.folder / "killed.part").exists()


def test_remote_errors_name_the_file(remote, cache):
    store = open_store(remote, cache)
    files = fsspec.filesystem("memory")
    data = files.cat("/bucket/shard-000001.tar")
    files.pipe("/bucket/shard-000001.tar", data[:-5])
    with pytest.raises(DataError, match=r"memory://bucket/shard-000001\.tar: truncated or foreign"):
        all_tokens(store)
    files.rm("/bucket/shard-000001.tar")
    with pytest.raises(DataError, match=r"memory://bucket/shard-000001\.tar: missing"):
        all_tokens(store)
    assert not list(cache.folder.glob("*.part"))
    with pytest.raises(DataError, match=r"memory://nowhere/index\.json: cannot be read \(FileNotFoundError"):
        open_store("memory://nowhere", cache)
    with pytest.raises(DataError, match=r"unknown://x/index\.json: cannot be read \(ValueError"):
        open_store("unknown://x", cache)


def test_failing_transfers_are_tried_again(shards, cache, monkeypatch):
    calls = []
    original = fsspec.open

    def flaky(url, mode):
        calls.append(url)
        if len(calls) == 2:
            raise ConnectionError("reset by peer")
        return original(url, mode)

    monkeypatch.setattr(cache_module.fsspec, "open", flaky)
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.01)
    store = ShardStore(f"file://{shards}", cache)  # index.json, then index.npy twice
    assert len(calls) == 3
    monkeypatch.setattr(cache_module.fsspec, "open", lambda *a: (_ for _ in ()).throw(ConnectionError("down")))
    cache.retry_s = 0.1
    with pytest.raises(StoreError, match=r"shard-000000\.tar: does not answer for 0 s \(ConnectionError: down\)"):
        store.tokens(0, 0, 1)


def test_a_shard_larger_than_the_cache(shards, tmp_path):
    store = ShardStore(f"file://{shards}", ShardCache(tmp_path / "cache", 1000))
    with pytest.raises(DataError, match=r"bytes do not fit a shard cache of 1,000; raise cache_gib"):
        store.tokens(0, 0, 1)


def read_all(url, folder, limit, results):
    store = ShardStore(url, ShardCache(folder, limit))
    total = 0
    for _ in range(20):
        store._open_remote.cache_clear()
        total += int(all_tokens(store).sum())
    results.put(total)


def test_several_processes_share_a_small_cache(shards, tmp_path):
    """More shards than the cache holds, so that every process deletes what the others fetched."""
    limit = max(path.stat().st_size for path in shards.glob("*.tar")) * 2
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (f"file://{shards}", tmp_path / "cache", limit, results)
    processes = [context.Process(target=read_all, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    expected = 20 * int(all_tokens(ShardStore(str(shards))).sum())
    assert [results.get(timeout=30) for _ in processes] == [expected] * 4
    for process in processes:
        process.join(10)
        assert process.exitcode == 0
    assert cached_bytes(ShardCache(tmp_path / "cache", limit)) <= limit


# Megatron


def write_megatron(prefix, documents, dtype=np.int32):
    """`documents` is a list of documents, each a list of sequences of tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_documents(tmp_path, dtype):
    documents = [[[1, 2, 3]], [[4], [5, 6], [7, 8, 9, 10]], [[11, 12]]]
    write_megatron(tmp_path / "corpus", documents, dtype)
    store = MegatronStore(str(tmp_path / "corpus"), tmp_path / "cache")
    assert store.lengths.tolist() == [3, 7, 2]
    assert store.tokens(0, 0, 3).tolist() == [1, 2, 3]
    assert store.tokens(1, 0, 7).tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert store.tokens(1, 2, 5).tolist() == [6, 7, 8]
    assert store.tokens(2, 1, 2).tolist() == [12]
    assert store.tokens(2, 2, 2).tolist() == []
    assert store.tokens(1, 0, 1).dtype == np.int64
    assert store.name(2).endswith("corpus:2")
    assert (store.vocab_size, store.tokenizer_hash, store.end_of_document) == (None, None, None)


def test_megatron_fingerprint(tmp_path):
    for name, lengths in (("a", [[1, 2]]), ("b", [[1, 2]]), ("c", [[1], [2]])):
        write_megatron(tmp_path / name, [lengths])
    a, b, c = (MegatronStore(str(tmp_path / name), tmp_path / "cache").fingerprint for name in "abc")
    assert a == b != c


def test_megatron_damage_is_named(tmp_path):
    prefix = tmp_path / "corpus"
    write_megatron(prefix, [[[1, 2, 3]]])
    binary, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    data = binary.read_bytes()
    binary.write_bytes(data[:-2])
    with pytest.raises(DataError, match=r"corpus\.bin: truncated or foreign: 10 bytes, its index says 12"):
        MegatronStore(str(prefix), tmp_path / "cache")
    binary.unlink()
    with pytest.raises(DataError, match=r"corpus\.bin: missing"):
        MegatronStore(str(prefix), tmp_path / "cache")
    binary.write_bytes(data)
    whole = index.read_bytes()
    for damaged, message in (
        (b"something else entirely, and long enough", "foreign: not the index"),
        (whole[:20], "foreign: not the index"),
        (whole[:9] + b"\x02" + whole[10:], "foreign: version 2 with token type 4 is not known"),
        (whole[:-1], r"truncated or foreign: \d+ bytes, its header says \d+"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(DataError, match=r"corpus\.idx: " + message):
            MegatronStore(str(prefix), tmp_path / "cache")


def test_megatron_without_documents(tmp_path):
    write_megatron(tmp_path / "corpus", [])
    with pytest.raises(DataError, match=r"corpus\.bin: empty corpus"):
        MegatronStore(str(tmp_path / "corpus"), tmp_path / "cache")
