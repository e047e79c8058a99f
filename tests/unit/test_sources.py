"""Documents of every input format."""

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
import zstandard
from data_helpers import make_tokenizer

from megamem.errors import DataError, DependencyError
from tokenization.readers import expansion
from tokenization.shards import write_shards
from tokenization.sources import documents, input_files

TEXTS = ["first text\n", "zweiter Text: äöü", "third 🙂\r\nline"]


def write(path, texts=TEXTS):
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()
    if path.name.endswith(".parquet"):
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path)
    elif path.name.endswith(".arrow"):
        write_arrow(path, texts)
    elif path.name.endswith(".tar"):
        with webdataset.TarWriter(str(path)) as tar:
            for i, text in enumerate(texts, start=1):
                tar.write({"__key__": str(i), "json": {"text": text, "id": i}})
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.name.endswith(".zst"):
        half = len(lines) // 2  # two frames, as parallel compressors write
        path.write_bytes(b"".join(zstandard.compress(part) for part in (lines[:half], lines[half:])))
    else:
        path.write_bytes(lines)


def write_arrow(path, texts, kind=pa.ipc.new_stream, batch=2):
    table = pa.table({"id": list(range(len(texts))), "text": texts})
    with kind(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


FORMATS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.tar"]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_with_many_documents(tmp_path, name):
    write(tmp_path / name)
    found = list(documents(input_files([tmp_path / name])))
    assert [document.text for document in found] == TEXTS
    assert [document.name for document in found] == [f"{name}:{i}" for i in (1, 2, 3)]
    size = (tmp_path / name).stat().st_size
    # Arrow and tar end with a mark, and are read in blocks
    slack = {"a.arrow": 16, "a.tar": size}.get(name, 2)
    assert size - slack <= sum(document.source_bytes for document in found) <= size


def test_text_files_are_read_recursively_in_order_of_name(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/y.md", "c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"text of {name}\r\n".encode())
    found = list(documents(input_files([tmp_path])))
    assert [document.name.split("/", 1)[1] for document in found] == ["a/z.txt", "b.txt"]
    assert found[0].text == "text of a/z.txt\r\n"
    assert found[0].source_bytes == len(found[0].text)


def test_empty_documents_and_blank_lines_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": "one"}\n')
    (tmp_path / "b.txt").write_text("")
    pq.write_table(pa.table({"text": [None, "two"]}), tmp_path / "c.parquet")
    assert [document.text for document in documents(input_files([tmp_path]))] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"ab\xff", r"a\.txt: not UTF-8 at byte 2"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl:1: no string field 'text'"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: no string field 'text'"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "a\\ud83d"}\n',
            r"""a\.jsonl:2: field 'text' holds "\\ud83d", half a char""",
        ),
        ("a.jsonl", b'{"text": "x"}\n' + b"[" * 10**5, r"a\.jsonl:2: JSON that is nested too deeply to be read"),
        ("a.txt", b"one\ntwo\xff", r"a\.txt: not UTF-8 at byte 7, on line 2; convert it first"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz: damaged \("),
        ("a.jsonl.zst", b"no zstandard", r"a\.jsonl\.zst: damaged"),
        ("a.parquet", b"no parquet", r"a\.parquet: not a readable parquet file"),
        ("a.arrow", b"no arrow", r"a\.arrow: not a readable Arrow file"),
        ("a.arrow", b"ARROW1 no arrow", r"a\.arrow: not a readable Arrow file"),
        ("a.tar", b"no tar" * 200, r"a\.tar: damaged"),
    ],
)
def test_unreadable_files_are_named_in_one_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        list(documents(input_files([tmp_path])))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_damage_is_placed_by_line(tmp_path, compress):
    """Compressed text of which a first part is whole, and the rest is not."""
    name = "a.jsonl.gz" if compress is gzip.compress else "a.jsonl.zst"
    (tmp_path / name).write_bytes(compress(b'{"text": "x"}\n' * 7) + b"no more of it")
    with pytest.raises(DataError, match=rf"{name}: damaged after line 7 \("):
        list(documents(input_files([tmp_path])))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_text_of_a_table_that_is_not_utf8_is_placed_by_row(tmp_path, suffix):
    buffers = [None, pa.py_buffer(np.array([0, 1, 2, 5], np.int32)), pa.py_buffer(b"ab\xed\xa0\x80")]
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, buffers)})
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match=rf"a\.{suffix}:3: column 'text' holds bytes that are not UTF-8"):
        list(documents(input_files([path])))


def test_two_columns_of_the_name_are_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: has 2 columns 'text'; rename all but one"):
        list(documents(input_files([tmp_path])))


def test_a_name_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / os.fsdecode(b"b\xff.txt")).write_text("text")
    with pytest.raises(DataError, match=r"b\\udcff\.txt': a name that is not UTF-8; rename the file"):
        list(documents(input_files([tmp_path])))


def test_truncated_gzip_is_named(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-12])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: damaged after line \d{3} \("):
        list(documents(input_files([tmp_path])))


@pytest.mark.parametrize("cut", [1, 3, 200])
@pytest.mark.parametrize("frames", [1, 2])
def test_truncated_zstd_is_named_wherever_it_ends(tmp_path, frames, cut):
    """Also where the lines before are whole: what is left of the last frame holds none, as after its first 3 bytes."""
    frame = zstandard.compress(b"".join(b'{"text": "%d"}\n' % (i**3) for i in range(1000)))
    (tmp_path / "a.jsonl.zst").write_bytes(frame * (frames - 1) + frame[:cut])
    after = " after line 1000" if frames == 2 else ""
    with pytest.raises(DataError, match=rf"a\.jsonl\.zst: damaged{after} \(it ends within a frame\)"):
        list(documents(input_files([tmp_path])))
    (tmp_path / "a.jsonl.zst").write_bytes(frame * frames)
    assert len(list(documents(input_files([tmp_path])))) == 1000 * frames


def write_many(path):
    """A file of which most bytes are those of texts."""
    write(path, [f"{i:06d} {hashlib.sha256(bytes([i % 251])).hexdigest()}{i * i}" for i in range(5000)])


@pytest.mark.parametrize(("name", "place"), [("a.jsonl.gz", 20), ("a.jsonl.zst", 50_000), ("a.parquet", 50_000)])
def test_damage_behind_the_header_is_named_in_one_line(tmp_path, name, place):
    """Libraries raise errors of other kinds there than for files that are none of theirs."""
    write_many(tmp_path / name)
    data = bytearray((tmp_path / name).read_bytes())
    data[place : place + 400] = bytes(255 - byte for byte in data[place : place + 400])
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name}: damaged( after (line|row) [1-9]\d*)? \(") as caught:
        list(documents(input_files([tmp_path])))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "kind"), [([1, 2], "int64"), ([b"x"], "binary"), ([["x"]], "list<element: string>")]
)
def test_parquet_columns_of_other_things_than_text_are_refused(tmp_path, values, kind):
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet: column 'text' holds {kind}, not strings"):
        list(documents(input_files([tmp_path])))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_parquet_columns_of_other_kinds_of_text_are_read(tmp_path, kind):
    pq.write_table(pa.table({"text": pa.array([*TEXTS, None], kind)}), tmp_path / "a.parquet")
    assert [document.text for document in documents(input_files([tmp_path]))] == TEXTS


def test_parquet_files_of_many_rows_are_read_in_parts(tmp_path):
    """More rows than are read at a time: names and shares of bytes go on."""
    write_many(tmp_path / "a.parquet")
    found = list(documents(input_files([tmp_path / "a.parquet"])))
    assert [document.name for document in found] == [f"a.parquet:{row}" for row in range(1, 5001)]
    assert {document.source_bytes for document in found} == {(tmp_path / "a.parquet").stat().st_size // 5000}


def test_parquet_without_text_column(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text' \(columns: body\)"):
        list(documents(input_files([tmp_path])))


def test_missing_and_empty_inputs(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        input_files([tmp_path / "nowhere"])
    with pytest.raises(DataError, match=r"no readable file \(known: \.txt, \.jsonl"):
        input_files([tmp_path])


def test_expansion_is_larger_for_compressed_files():
    assert [expansion(name) for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet")] == [1, 1, 4, 4]


def test_arrow_files_are_read_like_streams(tmp_path):
    """`datasets` writes streams, other tools files with a footer."""
    write_arrow(tmp_path / "a.arrow", TEXTS, pa.ipc.new_file)
    found = list(documents(input_files([tmp_path])))
    assert [document.text for document in found] == TEXTS
    assert 0 < sum(document.source_bytes for document in found) <= (tmp_path / "a.arrow").stat().st_size


def test_arrow_damage_is_named_in_one_line(tmp_path):
    write_arrow(tmp_path / "a.arrow", TEXTS * 1000, batch=500)
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"a\.arrow: damaged after row 1000 \(") as caught:
        list(documents(input_files([tmp_path])))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_without_the_column_are_refused(tmp_path, suffix):
    write(tmp_path / f"a.{suffix}")
    message = rf"a\.{suffix}: no column 'content' \(columns: id, text\)"
    with pytest.raises(DataError, match=message):
        list(documents(input_files([tmp_path], "content")))


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_may_have_another_name(tmp_path, name):
    write(tmp_path / name)
    if name.endswith(".parquet"):
        pq.write_table(pq.read_table(tmp_path / name).rename_columns(["text", "content"]), tmp_path / name)
        assert [document.text for document in documents(input_files([tmp_path], "content"))] == TEXTS
    else:
        with pytest.raises(DataError, match=r"no (string field|column) 'content'"):
            list(documents(input_files([tmp_path], "content")))


def test_webdataset_samples_of_text(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
        for i, text in enumerate(TEXTS):
            tar.write({"__key__": f"page/{i}", "txt": text, "json": {"url": "https://example.org"}, "jpg": b"x"})
    found = list(documents(input_files([tmp_path])))
    assert [(document.name, document.text) for document in found] == [
        (f"{tmp_path.name}/a.tar:page/{i}", text) for i, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.jpg": b"x"}, r"a\.tar:1: neither a \.txt nor a \.json in the sample"),
        ({"1.json": b'{"caption": "x"}'}, r"a\.tar:1\.json: no string field 'text'"),
        ({"1.txt": b"ab\xff"}, r"a\.tar:1\.txt: not UTF-8 at byte 2"),
    ],
)
def test_webdataset_samples_without_text_are_named(tmp_path, members, message):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    with pytest.raises(DataError, match=message):
        list(documents(input_files([tmp_path])))


def test_truncated_tars_are_named(tmp_path):
    write(tmp_path / "a.tar", ["x" * 5000] * 20)
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:50_000])
    with pytest.raises(DataError, match=r"a\.tar: damaged \("):
        list(documents(input_files([tmp_path])))


def test_tars_ask_for_the_library(tmp_path, monkeypatch):
    write(tmp_path / "a.tar")
    monkeypatch.setitem(sys.modules, "webdataset.tariterators", None)
    with pytest.raises(DependencyError, match=r"a tar needs webdataset; pip install 'megamem\[webdataset\]'"):
        list(documents(input_files([tmp_path])))


def test_files_of_one_name_are_no_shards(tmp_path):
    """Their documents could not be told apart; below a folder they have their places in it for names."""
    for language in ("en", "de"):
        (tmp_path / language).mkdir()
        (tmp_path / language / "text.jsonl").write_text('{"text": "one and another"}\n')
    english, german = (tmp_path / language / "text.jsonl" for language in ("en", "de"))
    make_tokenizer(tmp_path / "tokenizer")
    shards = tmp_path / "shards"
    for files in ([english, german], [english, english]):
        with pytest.raises(DataError, match=rf"en/text.jsonl and {files[1]}: both would be called text.jsonl; give a"):
            write_shards(files, tmp_path / "tokenizer", shards)
    assert not shards.exists()
