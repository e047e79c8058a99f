"""Files of tokens in NumPy's format as sources: where documents begin, what is mapped, what is refused."""

import numpy as np
import pytest
import torch
from data_helpers import CHUNK, feeder_of, make_tokenizer

from megamem.data.cache import ShardCache
from megamem.data.npy_store import NpyStore
from megamem.data.open_store import BareTokens, open_store
from megamem.errors import DataError

END = 7
DOCUMENTS = [[1, 2, 3, END], [END], [4, END], [5, 6, 8, 9, 10, END]]


@pytest.fixture
def tables(tmp_path):
    return tmp_path / "cache"


def write(path, documents, dtype=np.uint16):
    path.parent.mkdir(exist_ok=True)
    np.save(path, np.array([token for document in documents for token in document], dtype))
    return str(path)


def documents_of(store):
    return [store.tokens(d, 0, int(store.lengths[d])).tolist() for d in range(len(store))]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64, ">u2"], ids=str)
def test_documents_end_with_the_token(tmp_path, tables, dtype):
    store = NpyStore(write(tmp_path / "a.npy", DOCUMENTS, dtype), END, None, tables)
    assert documents_of(store) == DOCUMENTS
    assert store.lengths.tolist() == [4, 1, 2, 6]
    assert store.tokens(3, 2, 5).tolist() == [8, 9, 10]
    assert store.labels(3, 2, 4).tolist() == [9, 10]
    assert store.tokens(0, 1, 2).dtype == np.int64
    assert store.name(3) == f"{tmp_path}/a.npy:7"
    assert (store.vocab_size, store.tokenizer_hash, store.end_of_document) == (None, None, END)


def test_tokens_and_table_are_mapped(tmp_path, tables):
    store = NpyStore(write(tmp_path / "a.npy", DOCUMENTS), END, None, tables)
    assert isinstance(store.arrays[0].base, np.memmap)
    assert isinstance(store.table.base, np.memmap)
    assert np.shares_memory(store.lengths, store.table)


def test_the_end_of_a_file_is_added_where_it_lacks(tmp_path, tables):
    """The file was cut inside its last document."""
    store = NpyStore(write(tmp_path / "a.npy", [*DOCUMENTS, [11, 12]]), END, None, tables)
    assert documents_of(store) == [*DOCUMENTS, [11, 12, END]]
    assert store.tokens(4, 1, 3).tolist() == [12, END]
    assert store.tokens(4, 0, 2).tolist() == [11, 12]


def test_ends_are_found_in_files_longer_than_what_is_read_at_a_time(tmp_path, tables, monkeypatch):
    monkeypatch.setattr("megamem.data.npy_store.SCANNED", 3)
    assert documents_of(NpyStore(write(tmp_path / "a.npy", DOCUMENTS), END, None, tables)) == DOCUMENTS


def test_a_folder_of_files_is_one_source(tmp_path, tables):
    for name, documents in (("b", DOCUMENTS[2:]), ("a", DOCUMENTS[:2])):
        write(tmp_path / "tokens" / f"{name}.npy", documents)
    store = open_store(str(tmp_path / "tokens"), ShardCache(tables, 1), BareTokens(END))
    assert isinstance(store, NpyStore)
    assert documents_of(store) == DOCUMENTS
    assert store.shard_borders.tolist() == [0, 2, 4]
    assert store.name(2) == f"{tmp_path}/tokens/b.npy:0"


@pytest.mark.parametrize("raw_type", ["uint16", "uint32"])
def test_tokens_without_a_header(tmp_path, tables, raw_type):
    """As OLMo writes them, with `numpy.memmap`."""
    path = tmp_path / "part-0.npy"
    np.concatenate(DOCUMENTS).astype(raw_type).tofile(path)
    assert documents_of(NpyStore(str(path), END, raw_type, tables)) == DOCUMENTS
    with pytest.raises(DataError, match=r"part-0\.npy: has no NumPy header; .* give data\.raw_tokens$"):
        NpyStore(str(path), END, None, tables)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"part-0\.npy: truncated or damaged"):
        NpyStore(str(path), END, raw_type, tables)


def test_documents_are_searched_for_once(tmp_path, tables, monkeypatch):
    path = write(tmp_path / "a.npy", DOCUMENTS)
    first = NpyStore(path, END, None, tables)
    with monkeypatch.context() as patch:
        patch.setattr(NpyStore, "_find_documents", None)
        again = NpyStore(path, END, None, tables)
    assert documents_of(again) == DOCUMENTS
    assert again.fingerprint == first.fingerprint
    write(tmp_path / "a.npy", [*DOCUMENTS, [1, END]])
    changed = NpyStore(path, END, None, tables)
    assert documents_of(changed) == [*DOCUMENTS, [1, END]]
    assert changed.fingerprint != first.fingerprint


def test_a_search_that_was_killed_begins_anew(tmp_path, tables):
    path = write(tmp_path / "a.npy", DOCUMENTS)
    NpyStore(path, END, None, tables)
    (facts,) = tables.glob("*.documents.json")
    facts.unlink()
    (table,) = tables.glob("*.documents.npy")
    table.write_bytes(b"half")
    assert documents_of(NpyStore(path, END, None, tables)) == DOCUMENTS


def test_bad_files_are_one_line(tmp_path, tables):
    def refused(path, message, end=END):
        with pytest.raises(DataError, match=message) as caught:
            NpyStore(str(path), end, None, tables)
        assert "\n" not in str(caught.value)

    path = tmp_path / "a.npy"
    refused(path, r"a\.npy: cannot be read \(No such file")
    write(path, DOCUMENTS)
    refused(path, r"a\.npy: does not state the token that ends its documents; give data\.end_of_document", None)
    refused(path, r"a\.npy: none of its 13 tokens is the end of document 500$", 500)
    path.write_bytes(path.read_bytes()[:-2])
    refused(path, r"a\.npy: truncated or damaged")
    others = (np.zeros((2, 2), int), r"int64 of shape \(2, 2\)"), (np.zeros(3), "float64"), (np.zeros(0, int), "int64")
    for array, found in others:
        np.save(path, array)
        refused(path, rf"a\.npy: holds {found}.*; tokens are one axis of integers")
    np.save(path, np.array([{}], object), allow_pickle=True)
    refused(path, r"a\.npy: truncated or damaged")
    with pytest.raises(DataError, match=r"s3://b/a\.npy: \.npy files are mapped into memory; copy them"):
        open_store("s3://b/a.npy", ShardCache(tables, 1), BareTokens(END))


def test_a_folder_of_shards_is_not_taken_for_tokens(tmp_path, tables):
    """It holds an index.npy; without its index.json it is an unfinished one."""
    np.save(tmp_path / "index.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"index\.json: missing"):
        open_store(str(tmp_path), ShardCache(tables, 1), BareTokens(END))


def test_joined_documents_are_trained_on(tmp_path):
    """Every token of an epoch is read once, in rows that documents follow one another in."""
    documents = [[10 * d + i for i in range(1, 5)] + [END] for d in range(1, 9)]
    path = write(tmp_path / "a.npy", documents)
    feeder = feeder_of(
        tmp_path, rows=1, micro=1, sources=path, documents="join", sequence_length=CHUNK, end_of_document=END
    )
    rows = [feeder.batch(step) for step in range(4)]
    text = feeder._rows._sources[0].text.read(0, 0, 40).tokens
    assert sorted(text.reshape(8, 5).tolist()) == documents
    assert sorted(torch.cat([batch.labels[:, 0] for batch in rows]).tolist()) == sorted(text[1:33].tolist())


def test_the_end_is_the_tokenizers_for_training_and_held_out_text(tmp_path):
    end = make_tokenizer(tmp_path / "tokenizer").eos_id
    documents = [[10 + d, 20 + d, 30 + d, end] for d in range(8)]
    train, held_out = (write(tmp_path / name, documents) for name in ("a.npy", "b.npy"))
    config = {"sources": train, "validation": held_out, "documents": "pad", "tokenizer": tmp_path / "tokenizer"}
    feeder = feeder_of(tmp_path, rows=1, micro=1, sequence_length=CHUNK, **config)
    assert feeder.stores[0].lengths.tolist() == feeder.held_out[0].lengths.tolist() == [4] * 8


def test_a_table_that_cannot_be_kept_is_held_in_memory(tmp_path, small_disk, caplog):
    """With the same fingerprint, so that another host, which can keep it, reads the same data."""
    path = write(tmp_path / "a.npy", DOCUMENTS)
    kept = NpyStore(path, END, None, tmp_path / "kept")
    assert not caplog.records
    (tmp_path / "file").touch()
    small_disk.fill()
    for tables in (tmp_path / "file", small_disk.folder / "tables"):
        store = NpyStore(path, END, None, tables)
        assert documents_of(store) == DOCUMENTS
        assert store.fingerprint == kept.fingerprint
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"{tables}: the places of documents cannot be kept"
        for tables in (tmp_path / "file", small_disk.folder / "tables")
    ]
