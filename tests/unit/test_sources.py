"""Documents of every input format."""

import gzip
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megamem.errors import DataError
from tokenization.sources import documents, expansion, input_files

TEXTS = ["first text\n", "zweiter Text: äöü", "third 🙂\r\nline"]


def write(path, texts=TEXTS):
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()
    if path.name.endswith(".parquet"):
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.name.endswith(".zst"):
        half = len(lines) // 2  # two frames, as parallel compressors write
        path.write_bytes(b"".join(zstandard.compress(part) for part in (lines[:half], lines[half:])))
    else:
        path.write_bytes(lines)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_formats_with_many_documents(tmp_path, name):
    write(tmp_path / name)
    found = list(documents(input_files([tmp_path / name])))
    assert [document.text for document in found] == TEXTS
    assert [document.name for document in found] == [f"{name}:{i}" for i in (1, 2, 3)]
    size = (tmp_path / name).stat().st_size
    assert size - 2 <= sum(document.source_bytes for document in found) <= size


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
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz: damaged"),
        ("a.jsonl.zst", b"no zstandard", r"a\.jsonl\.zst: damaged"),
        ("a.parquet", b"no parquet", r"a\.parquet: not a readable parquet file"),
    ],
)
def test_unreadable_files_are_named_in_one_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        list(documents(input_files([tmp_path])))
    assert "\n" not in str(caught.value)


def test_truncated_gzip_is_named(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-12])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: damaged"):
        list(documents(input_files([tmp_path])))


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
    with pytest.raises(DataError, match=rf"{name}: damaged \(") as caught:
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


def test_expansion_is_larger_for_compressed_files(tmp_path):
    assert [expansion(tmp_path / name) for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet")] == [1, 1, 4, 4]
