"""Batches: contents, order, independence of the data-parallel size, checks, evaluation."""

import shutil
import threading

import fsspec
import numpy as np
import pytest
import torch
from data_helpers import CHUNK, SEQUENCE, config_of, feeder_of, make_shards, make_tokenizer

from megamem.data.batch import IGNORED
from megamem.data.feeder import evaluation_documents
from megamem.data.rows import Row
from megamem.data.shard_store import ShardStore
from megamem.errors import ConfigError, DataError
from tokenization.text_size import TextSize
from tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """`a` and `b`: training shards; `held`: held-out shards; `tokenizer`."""
    root = tmp_path_factory.mktemp("data")
    make_shards(root, (40, 700, 5, 300, 1200, 90), "a")
    make_shards(root, (400, 30, 350), "b", seed=50)
    make_shards(root, (60, 1, 33), "held", seed=90)
    return root


MODES = [
    {"feeding": "sequences", "documents": "drop"},
    {"feeding": "sequences", "documents": "pad"},
    {"feeding": "sequences", "documents": "pack"},
    {"feeding": "streams", "documents": "pad"},
]
JOINED = [
    {"feeding": feeding, "documents": "join", "reset": reset}
    for feeding in ("sequences", "streams")
    for reset in ("none", "exact")
]


def modes_of(modes):
    return pytest.mark.parametrize("mode", modes, ids=lambda mode: "-".join(mode.values()))


modes = modes_of(MODES + JOINED)


def two_sources(root):
    return {"sources": ({"path": str(root / "a"), "weight": 3}, {"path": str(root / "b"), "weight": 1})}


def global_batch(feeders, step):
    """Rows of a step by sample id, over all ranks and micro-batches."""
    rows = {}
    for feeder in feeders:
        for accumulation in range(feeder.accumulation_steps):
            batch = feeder.batch(step, accumulation)
            for column, sample in enumerate(batch.sample_ids):
                assert sample not in rows
                arrays = [batch.starts] if batch.begins is None else [batch.starts, batch.begins]
                parts = [batch.tokens, batch.labels, *map(torch.from_numpy, arrays)]
                rows[sample] = [part[:, column] for part in parts]
    return rows


@modes
def test_shapes_and_types(root, mode):
    feeder = feeder_of(root, **mode)
    assert feeder.accumulation_steps == 4
    batch = feeder.batch(5, 3)
    assert batch.tokens.shape == batch.labels.shape == (SEQUENCE, 2)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.tokens.is_contiguous()
    assert batch.labels.is_contiguous()
    assert batch.starts.shape == (SEQUENCE // CHUNK, 2)
    assert batch.starts.dtype == np.int64
    if mode.get("reset") == "exact":
        assert batch.begins.shape == (SEQUENCE, 2)
        assert batch.begins.dtype == np.bool_
    else:
        assert batch.begins is None
    assert batch.sample_ids == (46, 47)


@modes_of(MODES)
def test_labels_are_the_next_tokens_and_resets_are_document_starts(root, mode):
    """Every chunk is found in a document: its labels follow its tokens, and a reset 0 begins a piece of text."""
    feeder = feeder_of(root, **mode)
    store = feeder.stores[0]
    documents = [store.tokens(d, 0, int(store.lengths[d])).tolist() for d in range(len(store))]
    for step in range(12):
        for tokens, labels, starts in global_batch([feeder], step).values():
            labelled = labels != IGNORED
            assert not tokens[~labelled].any()
            for chunk, start in enumerate(starts.tolist()):
                here = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                count = int(labelled[here].sum())
                assert labelled[here].tolist() == [True] * count + [False] * (CHUNK - count)
                stretch = [*tokens[here].tolist()[:count], *labels[here].tolist()[count - 1 : count]]
                assert count == 0 or any(contains(document, stretch) for document in documents)
                follows = chunk and labelled[chunk * CHUNK - 1] and start == starts[chunk - 1] + CHUNK
                if follows and count:
                    assert labels[chunk * CHUNK - 1] == tokens[chunk * CHUNK]
            if mode["feeding"] == "sequences":
                assert starts[0] == 0


def contains(document, stretch):
    text, part = (" ".join(map(str, tokens)) for tokens in (document, stretch))
    return f" {part} " in f" {text} "


def test_streams_continue_from_step_to_step(root):
    feeder = feeder_of(root, feeding="streams", documents="pad", rows=2, micro=2)
    before = feeder.batch(0)
    for step in range(1, 30):
        batch = feeder.batch(step)
        for lane in range(2):
            if batch.starts[0, lane]:
                assert batch.starts[0, lane] == before.starts[-1, lane] + CHUNK
                assert batch.tokens[0, lane] == before.labels[-1, lane]
        before = batch
    assert 0 in before.starts or before.starts.max() > 0


@modes
@pytest.mark.parametrize(("dp_size", "micro"), [(1, 8), (2, 2), (2, 4), (4, 1), (8, 1)])
def test_the_global_batch_does_not_depend_on_the_data_parallel_size(root, mode, dp_size, micro):
    changes = mode | two_sources(root)
    reference = global_batch([feeder_of(root, **changes)], 11)
    ranks = [feeder_of(root, micro=micro, dp_rank=r, dp_size=dp_size, **changes) for r in range(dp_size)]
    rows = global_batch(ranks, 11)
    assert sorted(rows) == sorted(reference) == list(range(88, 96))
    for sample, parts in rows.items():
        assert all(torch.equal(x, y) for x, y in zip(parts, reference[sample], strict=True))


@modes
def test_a_batch_is_a_pure_function_of_seed_and_step(root, mode):
    feeder, other = feeder_of(root, **mode), feeder_of(root, **mode)
    expected = [feeder.batch(step, 1) for step in range(30)]
    for step in (29, 0, 14):
        again = other.batch(step, 1)
        assert torch.equal(again.tokens, expected[step].tokens)
        assert torch.equal(again.labels, expected[step].labels)
        assert (again.starts == expected[step].starts).all()
        assert (again.begins is None) == (mode.get("reset") != "exact")
        assert again.begins is None or (again.begins == expected[step].begins).all()
    different = feeder_of(root, **mode | {"seed": 4})
    assert any(not torch.equal(different.batch(step, 1).tokens, expected[step].tokens) for step in range(30))


def test_a_shard_that_goes_missing_ends_the_run_until_it_is_back(root, tmp_path):
    """The error names it. Batches before it and, once it is back, all others are those of an undisturbed run."""
    folder = shutil.copytree(root / "a", tmp_path / "a")
    options = {"sources": str(folder), "documents": "join", "rows": 2, "micro": 2}
    undisturbed = feeder_of(root, **options | {"sources": str(root / "a")})
    feeder = feeder_of(root, **options)
    feeder.check_files()
    away = (folder / "shard-000001.tar").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"a/shard-000001\.tar: missing \(listed in index\.json\)$"):
        feeder_of(root, **options).check_files()
    read = []
    with feeder.prefetch() as batches, pytest.raises(DataError, match=r"a/shard-000001\.tar: missing"):
        read.extend(batches)  # keeps what it has read when the error comes
    step = len(read)
    assert step < feeder.reports[0].samples // 2
    assert all(torch.equal(batch.tokens, undisturbed.batch(s).tokens) for s, batch in enumerate(read))
    away.rename(folder / "shard-000001.tar")
    with feeder_of(root, **options).prefetch(step) as batches:
        for later, batch in zip(range(step, step + 60), batches, strict=False):
            assert torch.equal(batch.tokens, undisturbed.batch(later).tokens)


def test_windows_of_an_epoch_are_all_different(root):
    feeder = feeder_of(root, rows=1, micro=1)
    count = feeder.reports[0].samples
    rows = [tuple(feeder.batch(step).tokens[:, 0].tolist()) for step in range(2 * count)]
    assert len(set(rows[:count])) == len(set(rows[count:])) == count
    assert set(rows[:count]) == set(rows[count:])
    assert rows[:count] != rows[count:]


def sources_of(feeder, step, rows):
    row = Row.empty(SEQUENCE, CHUNK)
    return [feeder._rows.fill(step, number, row) for number in range(rows)]


def test_sources_are_mixed_by_weight(root):
    feeder = feeder_of(root, rows=1024, micro=4, **two_sources(root))
    assert sources_of(feeder, 2, 1024).count(0) == 768
    lanes = feeder_of(root, feeding="streams", documents="pad", **two_sources(root))
    assert sources_of(lanes, 0, 8) == [0] * 6 + [1] * 2


def test_a_source_without_a_lane_is_refused(root):
    with pytest.raises(ConfigError, match=r"with 1 lanes, .*b gets none"):
        feeder_of(root, feeding="streams", documents="pad", rows=1, micro=1, **two_sources(root))


def test_reports_count_short_documents(root):
    store = ShardStore(str(root / "a"))
    report = feeder_of(root).reports[0]
    assert report.documents == 6
    assert report.short_documents == int((store.lengths <= SEQUENCE).sum()) >= 1
    assert report.dropped_tokens == int(((store.lengths - 1) % SEQUENCE).sum())
    assert report.samples == int(((store.lengths - 1) // SEQUENCE).sum())
    assert "6 documents" in report.summary()
    assert f"{report.dropped_tokens:,} tokens left out" in report.summary()


# Checks


def test_sizes_that_do_not_fit(root):
    with pytest.raises(ConfigError, match=r"data\.sequence_length: 32 is not a multiple of the chunk of 5 tokens"):
        feeder_of(root, chunk=5)
    with pytest.raises(ConfigError, match="a global batch of 8 rows does not divide into micro-batches of 3 rows"):
        feeder_of(root, micro=3)


def test_tokenizer_of_other_shards_is_refused(root, tmp_path):
    make_tokenizer(tmp_path / "tokenizer", seed=8)
    with pytest.raises(DataError, match=r"a: written with tokenizer [0-9a-f]{12}, but .*tokenizer has [0-9a-f]{12}"):
        feeder_of(root, tokenizer=tmp_path / "tokenizer")
    assert feeder_of(root, tokenizer=root / "tokenizer").reports
    foreign = str(make_shards(tmp_path, (300,), "c"))
    with pytest.raises(DataError, match=r"c: written with tokenizer"):
        feeder_of(root, sources=(str(root / "a"), foreign))
    with pytest.raises(DataError, match=r"c: written with tokenizer"):
        feeder_of(root, validation=foreign)
    with pytest.raises(DataError, match=r"meta\.json: missing"):
        feeder_of(root, tokenizer=tmp_path / "nowhere")


def test_missing_sources_are_found_before_training(root):
    for changes in ({"sources": "nowhere"}, {"validation": "nowhere"}):
        with pytest.raises(DataError, match="nowhere: no such shard folder"):
            feeder_of(root, **changes)


def test_no_document_long_enough(root):
    with pytest.raises(DataError, match="no document is long enough: all 6 are shorter than a sequence of 80000"):
        feeder_of(root, sequence_length=80000)


def test_vocabulary_larger_than_the_model(root):
    feeder = feeder_of(root)
    feeder.check_vocab(300)
    with pytest.raises(DataError, match=r"a: its tokens come from a vocabulary of 300, larger than the model's 299"):
        feeder.check_vocab(299)


def test_fingerprint_changes_with_all_that_decides_the_order(root):
    fingerprints = [
        feeder_of(root, **changes).fingerprint()
        for changes in (
            {},
            {"seed": 4},
            {"sequence_length": 64},
            {"documents": "pad"},
            {"documents": "join"},
            {"documents": "join", "reset": "exact"},
            {"feeding": "streams", "documents": "pad"},
            {"feeding": "streams", "documents": "pad", "rows": 4},
            {"feeding": "streams", "documents": "join"},
            {"shuffle_shards": 1},
            {"sources": str(root / "b")},
            two_sources(root),
        )
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    same = feeder_of(root, micro=1, dp_rank=1, dp_size=2, prefetch=1, rows=16)
    assert same.fingerprint() == fingerprints[0]


def test_remote_shards_must_fit_the_cache_or_be_shuffled_in_groups(tmp_path):
    folder = make_shards(tmp_path, [300] * 10, "even")
    sizes = [path.stat().st_size for path in folder.glob("*.tar")]
    assert len(sizes) >= 4
    files = fsspec.filesystem("memory")
    files.put(str(folder), "/even", recursive=True)
    remote = {"sources": "memory://even", "cache_gib": 2 * max(sizes) / 2**30}
    with pytest.raises(ConfigError, match=r"data\.cache_gib: .* do not hold .*data\.shuffle_shards \(now 0\)"):
        feeder_of(tmp_path, **remote)
    feeder = feeder_of(tmp_path, **remote, shuffle_shards=1)
    local = feeder_of(tmp_path, sources=str(folder), shuffle_shards=1)
    for step in range(40):
        assert torch.equal(feeder.batch(step).tokens, local.batch(step).tokens)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= 2 * max(sizes)
    with pytest.raises(ConfigError, match=r"data\.cache_gib"):
        feeder_of(tmp_path, **remote, shuffle_shards=1, feeding="streams", documents="pad")
    files.rm("/even", recursive=True)


# Prefetching


@modes
def test_prefetched_batches_are_the_batches(root, mode):
    feeder = feeder_of(root, **mode)
    with feeder.prefetch(3) as batches:
        for step in (3, 4):
            for accumulation in range(4):
                batch, expected = next(batches), feeder.batch(step, accumulation)
                assert batch.sample_ids == expected.sample_ids
                assert torch.equal(batch.tokens, expected.tokens)
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())
    with pytest.raises(StopIteration):
        next(batches)


# Evaluation


def held_out(root, **options):
    config = config_of(root, validation=str(root / "held"), tokenizer=root / "tokenizer")
    return list(evaluation_documents(config, chunk_size=CHUNK, **options))


def test_held_out_documents_are_read_whole_and_in_order(root):
    store, tokenizer = ShardStore(str(root / "held")), Tokenizer.load(root / "tokenizer")
    documents = held_out(root)
    assert [document.name for document in documents] == [store.name(d) for d in range(3)]
    for number, document in enumerate(documents):
        whole = store.tokens(number, 0, int(store.lengths[number]))
        count = document.predicted_tokens
        assert count == len(whole) - 1
        assert len(document.tokens) == len(document.labels) == -(-count // CHUNK) * CHUNK
        np.testing.assert_array_equal(document.tokens[:count], whole[:-1])
        np.testing.assert_array_equal(document.labels[:count], whole[1:])
        assert (document.labels[count:] == IGNORED).all()
        first = len(tokenizer.decode(whole[:1]).encode())  # read, never predicted
        assert document.text_size.bytes == store.table["text_bytes"][number] - first


def test_held_out_documents_are_cut_and_shared_out(root):
    tokenizer = Tokenizer.load(root / "tokenizer")
    pieces = held_out(root, sequence_length=20)
    assert pieces[0].predicted_tokens == 20
    assert len(pieces[0].tokens) == 24
    text = tokenizer.decode(pieces[0].labels[:20].numpy())
    assert pieces[0].text_size == TextSize(len(text.encode()), len(text), len(text.split()), text.count("\n"))
    shares = [held_out(root, rank=rank, ranks=2) for rank in range(2)]
    assert [[document.name[-5] for document in share] for share in shares] == [["0", "2"], ["1"]]


def test_held_out_pieces_have_every_prediction_of_the_documents_once(root):
    """Pieces of 20 predictions, the first of all documents first; together they are the documents."""
    whole, pieces = held_out(root), held_out(root, sequence_length=20)
    assert [piece.name.split(", ")[0] for piece in pieces[:3]] == [document.name for document in whole]
    for document in whole:
        count = document.predicted_tokens
        own = [piece for piece in pieces if piece.name.startswith(document.name + ", tokens ")]
        assert len(own) == -(-count // 20)
        assert {piece.predicted_tokens for piece in own[:-1]} <= {20}
        for field in ("tokens", "labels"):
            joined = torch.cat([getattr(piece, field)[: piece.predicted_tokens] for piece in own])
            assert torch.equal(joined, getattr(document, field)[:count])


def test_held_out_documents_are_read_anew_each_time(root):
    documents = evaluation_documents(config_of(root, validation=str(root / "held")), chunk_size=CHUNK)
    assert len(documents) == 3
    first, again = list(documents), list(documents)
    assert all(torch.equal(a.tokens, b.tokens) and a.tokens is not b.tokens for a, b in zip(first, again, strict=True))


def test_held_out_documents_of_several_sources_have_names_of_their_own(root):
    """Two sources may have documents of one name, which are no pieces of each other."""
    config = config_of(root).model_copy(update={"validation": (str(root / "held"), str(root / "held"))})
    one = [
        document.name
        for document in evaluation_documents(config_of(root, validation=str(root / "held")), chunk_size=CHUNK)
    ]
    assert [document.name for document in evaluation_documents(config, chunk_size=CHUNK)] == [
        f"{root / 'held'}: {n}" for n in one * 2
    ]


def test_held_out_text_sizes_need_a_tokenizer(root):
    config = config_of(root, validation=str(root / "held"))
    assert {document.text_size for document in evaluation_documents(config, chunk_size=CHUNK)} == {None}


def test_held_out_errors_come_at_once(root):
    with pytest.raises(DataError, match=r"data\.validation: no held-out source is named"):
        evaluation_documents(config_of(root), chunk_size=CHUNK)
    with pytest.raises(DataError, match="nowhere: no such shard folder"):
        evaluation_documents(config_of(root, validation="nowhere"), chunk_size=CHUNK)
