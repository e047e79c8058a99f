"""Megatron's files as sources: ids that are checked as they are read, ends of documents that the files do not state."""

import numpy as np
import pytest
import torch
from data_helpers import CHUNK, SEQUENCE, config_of, feeder_of, make_tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megamem.data.feeder import evaluation_documents
from megamem.errors import DataError
from tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """`tokenizer`."""
    root = tmp_path_factory.mktemp("data")
    make_tokenizer(root / "tokenizer")
    return root


def write_megatron(folder, *documents):
    """`folder`/corpus.bin and .idx of documents, each a list of ids."""
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=np.int32)
    for ids in documents:
        builder.add_item(torch.tensor(ids))
        builder.end_document()
    builder.finalize(str(folder / "corpus.idx"))


def joined_megatron(root, folder, **changes):
    options = {"sources": str(folder / "corpus"), "documents": "join", "sequence_length": CHUNK} | changes
    return feeder_of(root, rows=1, micro=1, **options)


@pytest.mark.parametrize("last", [[], [7]], ids=["without", "with"])
def test_megatron_documents_are_joined_with_an_end_of_document(root, tmp_path, last):
    """Whether the files have the token or it is added, the text is the same."""
    documents = [[10 * d + i for i in range(1, 5)] for d in range(1, 9)]
    write_megatron(tmp_path, *(ids + last for ids in documents))
    feeder = joined_megatron(root, tmp_path, end_of_document=7)
    (report,) = feeder.reports
    assert (report.tokens, report.samples) == (40, 4)
    rows = [feeder.batch(step) for step in range(4)]
    predicted = sorted(torch.cat([batch.labels[:, 0] for batch in rows]).tolist())
    text = feeder._rows._sources[0].text.read(0, 0, 40).tokens
    assert sorted(map(tuple, text.reshape(8, 5).tolist())) == [(*ids, 7) for ids in documents]
    assert predicted == sorted(text[1:33].tolist())


def test_megatron_documents_end_as_the_tokenizer_says(root, tmp_path):
    write_megatron(tmp_path, [1, 2, 3], [4, 5, 6, 7, 8, 9, 10])
    with pytest.raises(DataError, match=r"corpus: does not state the token that ends .*; give data\.end_of_document"):
        joined_megatron(root, tmp_path)
    feeder = joined_megatron(root, tmp_path, tokenizer=root / "tokenizer")
    end = Tokenizer.load(root / "tokenizer").eos_id
    assert feeder.stores[0].tokens(0, 2, 4).tolist() == [3, end]
    assert feeder.stores[0].tokens(1, 1, 3).tolist() == [5, 6]
    other = joined_megatron(root, tmp_path, end_of_document=7)
    assert other.fingerprint() != feeder.fingerprint()
    apart = feeder_of(root, sources=str(tmp_path / "corpus"), tokenizer=root / "tokenizer", documents="pad")
    assert apart.stores[0].lengths.tolist() == [3, 7]


def test_megatron_documents_that_end_in_two_ways_are_refused(root, tmp_path):
    write_megatron(tmp_path, [1, 2, 7], [4, 5, 6])
    with pytest.raises(
        DataError, match="corpus: 1 of 2 documents looked at end with the end of document 7, the others"
    ):
        joined_megatron(root, tmp_path, end_of_document=7)


@pytest.mark.parametrize("wrong", [500, -1])
def test_held_out_megatron_ids_are_those_of_the_tokenizer(root, tmp_path, wrong):
    """Negative ones would be counted from the vocabulary's end."""
    write_megatron(tmp_path, [*range(40), wrong])
    config = config_of(root, validation=str(tmp_path / "corpus"), tokenizer=root / "tokenizer")
    with pytest.raises(DataError, match=rf"corpus: token id {wrong} does not fit the tokenizer's vocabulary of \d+$"):
        list(evaluation_documents(config, chunk_size=CHUNK))


@pytest.mark.parametrize("wrong", [500, -1])
def test_megatron_ids_are_checked_as_they_are_read(tmp_path, wrong):
    write_megatron(tmp_path, [*range(40), wrong])
    feeder = feeder_of(tmp_path, sources=str(tmp_path / "corpus"), rows=1, micro=1, documents="pad")
    feeder.check_vocab(500)
    message = rf"corpus: token id {wrong} does not fit the model's vocabulary of 500"
    with pytest.raises(DataError, match=message):
        [feeder.batch(step) for step in range(2)]
    feeder.check_vocab(501)
    if wrong == 500:
        assert feeder.batch(0).tokens.shape == (SEQUENCE, 1)
