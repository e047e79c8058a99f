"""Shards written in parts on several nodes, and the index over all of them."""

import json
import shutil

import fsspec
import numpy as np
import pytest
from data_helpers import feeder_of, make_tokenizer, text_of
from test_shards import contents

from megamem.data.cache import ShardCache
from megamem.data.shard_store import ShardStore
from megamem.data.verify import verify_shards
from megamem.errors import ConfigError, DataError
from tokenization import shards
from tokenization.parts import Part, merge_parts
from tokenization.shards import write_shards

FILES = 7
OPTIONS = {"shard_text_bytes": 6000}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """`text` of 7 files with 5 documents each, `tokenizer`, `whole` written at once, `parts` in three parts."""
    root = tmp_path_factory.mktemp("parts")
    make_tokenizer(root / "tokenizer")
    (root / "text").mkdir()
    for file in range(FILES):
        lines = [json.dumps({"text": text_of(100 + 80 * file, 5 * file + line)}) + "\n" for line in range(5)]
        (root / "text" / f"{file}.jsonl").write_text("".join(lines))
    write_shards([root / "text"], root / "tokenizer", root / "whole", **OPTIONS)
    for number in (1, 2, 3):
        write_part(root, Part(number, 3), root / "parts")
    merge_parts(root / "parts")
    return root


@pytest.fixture
def parts(root, tmp_path):
    """A copy of the merged parts."""
    return shutil.copytree(root / "parts", tmp_path / "parts")


def write_part(root, part, folder, **changes):
    return write_shards([root / "text"], root / "tokenizer", folder, part=part, **OPTIONS | changes)


def all_documents(store):
    return [(store.name(d), store.tokens(d, 0, int(store.lengths[d])).tolist()) for d in range(len(store))]


def test_parts_hold_every_document_once_and_in_the_same_order(root):
    whole, merged = ShardStore(str(root / "whole")), ShardStore(str(root / "parts"))
    assert len(whole) == 5 * FILES
    assert all_documents(merged) == all_documents(whole)
    np.testing.assert_array_equal(merged.table["text_bytes"], whole.table["text_bytes"])
    assert (merged.index.tokens, merged.index.text_bytes) == (whole.index.tokens, whole.index.text_bytes)
    assert merged.index.header == whole.index.header
    assert verify_shards(root / "parts").documents == 5 * FILES


def test_a_part_is_a_folder_of_shards_itself(root):
    folders = sorted((root / "parts").glob("part-*"))
    found = [document for folder in folders for document in all_documents(ShardStore(str(folder)))]
    assert found == all_documents(ShardStore(str(root / "whole")))


def test_runs_read_the_same_rows_from_parts(root):
    """The order of joined documents is a function of their numbers, which parts do not change."""
    whole, merged = (
        feeder_of(root, documents="join", sources=str(root / name), tokenizer=root / "tokenizer")
        for name in ("whole", "parts")
    )
    for step in range(3):
        assert whole.batch(step).tokens.equal(merged.batch(step).tokens)


def test_merging_again_changes_nothing(root, parts):
    before = contents(parts)
    merge_parts(parts)
    assert contents(parts) == before


def test_merged_parts_behind_a_url(root, tmp_path):
    store = fsspec.filesystem("memory")
    store.put(str(root / "parts"), "/merged", recursive=True)
    remote = ShardStore("memory://merged", ShardCache(tmp_path / "cache", 1 << 20))
    assert all_documents(remote) == all_documents(ShardStore(str(root / "whole")))
    store.rm("/merged", recursive=True)


def test_an_interrupted_part_continues_with_the_same_bytes(root, tmp_path, monkeypatch):
    original = shards._shard

    def failing(plan, folder):
        if plan.number == 1:
            raise KeyboardInterrupt
        return original(plan, folder)

    part = Part(3, 3)
    monkeypatch.setattr(shards, "_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        write_part(root, part, tmp_path)
    monkeypatch.setattr(shards, "_shard", original)
    folder = tmp_path / part.folder
    first = (folder / "shard-000000.tar").stat().st_mtime_ns
    assert not (folder / "index.json").exists()
    write_part(root, part, tmp_path)
    assert (folder / "shard-000000.tar").stat().st_mtime_ns == first, "what was finished is kept"
    assert contents(folder) == contents(root / "parts" / part.folder)


def test_parts_without_text_are_parts_all_the_same(root, tmp_path):
    """Files of empty documents and files without any, in the first, a middle and the last part."""
    (tmp_path / "text").mkdir()
    kept = (root / "text" / "2.jsonl").read_text(), (root / "text" / "5.jsonl").read_text()
    empty = json.dumps({"text": ""}) + "\n"
    for number, text in enumerate((100 * empty, kept[0], "", kept[1], empty)):
        (tmp_path / "text" / f"{number}.jsonl").write_text(text)
    write_shards([tmp_path / "text"], root / "tokenizer", tmp_path / "whole", **OPTIONS)
    counts = []
    for number in range(1, 6):
        part = Part(number, 5)
        index = write_shards([tmp_path / "text"], root / "tokenizer", tmp_path / "parts", part=part, **OPTIONS)
        counts.append((index.documents, bool(index.shards)))
    assert counts == [(0, False), (5, True), (0, False), (5, True), (0, False)]
    assert merge_parts(tmp_path / "parts").documents == 10
    whole, merged = ShardStore(str(tmp_path / "whole")), ShardStore(str(tmp_path / "parts"))
    assert all_documents(merged) == all_documents(whole)
    assert verify_shards(tmp_path / "parts").tokens == whole.index.tokens


def test_parts_that_are_all_empty_are_an_empty_corpus(root, tmp_path):
    (tmp_path / "text").mkdir()
    for number in (1, 2):
        (tmp_path / "text" / f"{number}.jsonl").write_text(json.dumps({"text": ""}) + "\n")
    for number in (1, 2):
        write_shards([tmp_path / "text"], root / "tokenizer", tmp_path / "parts", part=Part(number, 2))
    with pytest.raises(DataError, match=r"parts: empty corpus, no part holds a document$"):
        merge_parts(tmp_path / "parts")
    assert not (tmp_path / "parts" / "index.json").exists()


def test_missing_and_unfinished_parts_are_named(parts):
    (parts / "part-0002-of-0003" / "index.json").unlink()
    with pytest.raises(DataError, match=r"part 2/3 is not finished; run `megamem shards write` with --part 2/3$"):
        merge_parts(parts)
    shutil.rmtree(parts / "part-0002-of-0003")
    with pytest.raises(DataError, match="part 2/3 is missing"):
        merge_parts(parts)
    with pytest.raises(DataError, match="nowhere: holds no part of token shards"):
        merge_parts(parts / "nowhere")


def test_parts_of_another_tokenizer_inputs_or_division_are_refused(root, parts):
    folder = parts / "part-0002-of-0003"
    shutil.rmtree(folder)
    make_tokenizer(parts / "other", seed=5)
    write_shards([root / "text"], parts / "other", parts, part=Part(2, 3), **OPTIONS)
    with pytest.raises(DataError, match=r"part-0002-of-0003: written with another tokenizer \(\w{12}\) than part 1/3"):
        merge_parts(parts)
    shutil.rmtree(folder)
    write_shards([root / "text", root / "text" / "0.jsonl"], root / "tokenizer", parts, part=Part(2, 3), **OPTIONS)
    with pytest.raises(DataError, match="written with other input files or another --text-field"):
        merge_parts(parts)
    shutil.rmtree(folder)
    shutil.copytree(parts / "part-0001-of-0003", folder)
    with pytest.raises(DataError, match=r"part-0002-of-0003: holds part 1/3, not 2/3"):
        merge_parts(parts)
    write_part(root, Part(1, 2), parts)
    with pytest.raises(DataError, match="holds parts of 2 and of 3; remove those of one division"):
        merge_parts(parts)


def test_missing_and_damaged_files_of_parts_are_named(parts):
    shard = parts / "part-0001-of-0003" / "shard-000000.tar"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(DataError, match=r"part-0001-of-0003/shard-000000\.tar: missing or of another size"):
        merge_parts(parts)
    shard.write_bytes(data)
    table = parts / "part-0003-of-0003" / "index.npy"
    table.write_bytes(table.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"part-0003-of-0003/index\.npy: missing or damaged"):
        merge_parts(parts)


def test_a_foreign_shard_in_a_later_part_is_found_when_it_is_read(parts):
    """Documents are counted from the part's first one in the names inside its tars."""
    folder = parts / "part-0002-of-0003"
    shard = folder / "shard-000000.tar"
    shard.write_bytes(shard.read_bytes().replace(b"000000000.tokens", b"000000001.tokens"))
    store = ShardStore(str(parts))
    first = store.index.first_documents[1]
    with pytest.raises(DataError, match=rf"foreign shard: document {first} of index\.json is not in its place"):
        store.tokens(first, 0, 1)


def test_a_folder_of_parts_is_not_written_to_as_a_whole(root, tmp_path):
    write_part(root, Part(1, 3), tmp_path / "parts")
    with pytest.raises(DataError, match="not empty and not a folder of token shards"):
        write_shards([root / "text"], root / "tokenizer", tmp_path / "parts", **OPTIONS)


def test_parts_are_not_written_into_a_folder_of_shards(root, tmp_path):
    """A merge would replace its index."""
    folder = shutil.copytree(root / "whole", tmp_path / "whole")
    with pytest.raises(DataError, match="whole: holds shards that are in no part; choose another folder for parts"):
        write_part(root, Part(1, 3), folder)
    shutil.copytree(root / "parts" / "part-0001-of-0003", folder / "part-0001-of-0001")
    with pytest.raises(DataError, match="holds shards that are in no part"):
        merge_parts(folder)


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "a/b", "1/0", "-1/2", "1/2/3"])
def test_parts_are_written_as_k_of_n(text):
    with pytest.raises(ConfigError, match=r"not K/N with K from 1 to N, such as 3/8"):
        Part.parse(text)


def test_shares_are_consecutive_and_about_equal():
    sizes = [5, 5, 5, 5, 100, 5, 5, 5, 5, 100, 1, 1]
    for count in range(1, len(sizes) + 1):
        shares = [Part(k, count).share(range(len(sizes)), sizes) for k in range(1, count + 1)]
        assert [item for share in shares for item in share] == list(range(len(sizes)))
        assert all(shares)
        # each border is nearest to its place: neither side is off by more than half of the largest item
        if count <= 3:
            assert all(abs(sum(sizes[i] for i in share) - sum(sizes) / count) <= max(sizes) for share in shares)
    with pytest.raises(ConfigError, match=r"--part 2/3: there are 2 input files; use at most as many parts"):
        Part(2, 3).share("ab", [1, 1])
