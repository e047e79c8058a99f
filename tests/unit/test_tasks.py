"""Synthetic tasks as sources of documents."""

import sys
import types
from collections import Counter

import numpy as np
import pytest
from data_helpers import make_tokenizer, text_of

from megamem.config.data import DataConfig
from megamem.data.batch import IGNORED
from megamem.data.feeder import Feeder, evaluation_documents
from megamem.data.tasks.base import TASKS
from megamem.data.tasks.needle import ADJECTIVES, NOISE, NOUNS
from megamem.data.tasks.store import TaskStore, read_task
from megamem.errors import DataError
from tests.snippets import python_snippets
from tokenization.shards import write_shards
from tokenization.tokenizer import Tokenizer

MQAR = "kind: mqar\nvocab_size: 64\nlength: 48\npairs: 6\nexamples: 20\n"


def write(folder, text, name="task.yaml"):
    path = folder / name
    path.write_text(text)
    return str(path)


class TestRecall:
    @pytest.mark.parametrize("fill", ["true", "false"])
    def test_each_key_is_asked_for_once_and_the_label_is_its_value(self, tmp_path, fill):
        store = TaskStore(write(tmp_path, MQAR + f"random_fill: {fill}\n"))
        for example in range(len(store)):
            tokens, labels = store.tokens(example, 0, 48), store.labels(example, 0, 48)
            pairs = dict(zip(tokens[0:12:2].tolist(), tokens[1:12:2].tolist(), strict=True))
            asked = np.flatnonzero(labels != IGNORED)
            assert len(pairs) == len(asked) == len(set(pairs.values())) == 6
            assert all(1 <= key < 32 <= value < 64 for key, value in pairs.items())
            assert (asked >= 12).all()
            assert (asked % 2 == 0).all()
            assert sorted(tokens[asked]) == sorted(pairs)
            assert [pairs[int(key)] for key in tokens[asked]] == labels[asked].tolist()
            rest = np.setdiff1d(np.arange(12, 48), asked)
            assert (tokens[rest] > 0).any() == (fill == "true")

    def test_gaps_follow_the_power_law(self, tmp_path):
        """Of one pair, the share of each gap is a i^(a-1) normalized: within 4 standard deviations."""
        options = "kind: mqar\nvocab_size: 64\nlength: 22\npairs: 1\nexamples: 4000\npower: 0.5\n"
        store = TaskStore(write(tmp_path, options))
        gaps = Counter((int(np.flatnonzero(store.labels(e, 0, 22) != IGNORED)[0]) - 2) // 2 for e in range(4000))
        weights = np.arange(1, 11) ** -0.5
        for gap, share in enumerate(weights / weights.sum()):
            assert abs(gaps[gap] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5

    def test_examples_are_a_pure_function_of_seed_and_number(self, tmp_path):
        one, same = (TaskStore(write(tmp_path, MQAR)) for _ in range(2))
        other = TaskStore(write(tmp_path, MQAR + "seed: 1\n", "other.yaml"))
        assert (one.tokens(3, 5, 40) == same.tokens(3, 0, 49)[5:40]).all()
        assert one.fingerprint == same.fingerprint != other.fingerprint
        assert (one.tokens(3, 0, 48) != other.tokens(3, 0, 48)).any()

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("length: 47", "length 47 is odd"),
            ("length: 80", "vocab_size 64 must be larger than length 80"),
            ("pairs: 13", "pairs 13 do not fit"),
            ("pair: 3", "pair: unknown key; did you mean 'pairs'"),
            ("pairs: 0", r"pairs: .*\(got 0\)"),
            ("kind: recall", "kind: 'recall' is no task; valid: .*mqar"),
        ],
    )
    def test_bad_descriptions_are_one_line(self, tmp_path, line, message):
        key = line.split(":")[0]
        kept = [entry for entry in MQAR.splitlines() if not entry.startswith(f"{key}:")]
        path = write(tmp_path, "\n".join([*kept, line]))
        with pytest.raises(DataError, match=f"task.yaml.*{message}") as error:
            read_task(tmp_path / "task.yaml")
        assert "\n" not in str(error.value)
        assert path in str(error.value)

    def test_missing_and_broken_files(self, tmp_path):
        with pytest.raises(DataError, match=r"none\.yaml: no such"):
            TaskStore(str(tmp_path / "none.yaml"))
        with pytest.raises(DataError, match="not valid YAML"):
            TaskStore(write(tmp_path, "kind: [mqar"))


class TestNeedle:
    @pytest.fixture(scope="class")
    def data(self, tmp_path_factory):
        root = tmp_path_factory.mktemp("needle")
        make_tokenizer(root / "tokenizer")
        (root / "text").mkdir()
        for document in range(3):
            sentences = (text_of(8, 100 * document + i) for i in range(60))
            (root / "text" / f"{document}.txt").write_text("".join(sentences))
        write_shards([root / "text"], root / "tokenizer", root / "shards")
        return root, root / "shards"

    def options(self, root, **fields):
        fields = {"tokenizer": root / "tokenizer", "length": 700, "examples": 10, **fields}
        return "kind: niah\n" + "".join(f"{name}: {value}\n" for name, value in fields.items())

    @pytest.mark.parametrize(("haystack", "value"), [("noise", "number"), ("text", "number"), ("text", "uuid")])
    def test_the_needle_says_what_is_asked_for(self, data, haystack, value):
        root, shards = data
        where = "noise" if haystack == "noise" else shards
        store = TaskStore(write(root, self.options(root, haystack=where, value=value)))
        tokenizer = Tokenizer.load(root / "tokenizer")
        depths = set()
        for example in range(len(store)):
            tokens, labels = store.tokens(example, 0, 700), store.labels(example, 0, 700)
            answer = tokenizer.decode(labels[labels != IGNORED]).strip()
            text = tokenizer.decode(tokens)
            opening, _, rest = text.partition("One of the special magic ")
            key = rest.partition(" is: ")[0].split(" for ")[1]
            assert rest.startswith(f"{value}s for {key} is: {answer}.")
            assert text.count(answer) == 1
            assert f"What is the special magic {value} for {key} mentioned" in rest
            adjective, noun = key.split("-")
            assert adjective in ADJECTIVES
            assert noun in NOUNS
            assert (labels[: -len(labels[labels != IGNORED])] == IGNORED).all(), "only the end is asked for"
            assert len(answer) == (7 if value == "number" else 36)
            assert (NOISE.strip() in text) == (haystack == "noise")
            depths.add(len(opening))
        assert len(depths) > 3

    def test_all_tokens_may_be_predicted(self, data):
        root, _ = data
        store = TaskStore(write(root, self.options(root, supervise="all")))
        assert (store.labels(0, 0, 699) == store.tokens(0, 1, 700)).all()

    def test_foreign_or_short_haystacks_are_refused(self, data, tmp_path):
        root, shards = data
        make_tokenizer(tmp_path / "tokenizer", vocab_size=280, seed=5)
        foreign = self.options(root, haystack=shards, tokenizer=tmp_path / "tokenizer")
        with pytest.raises(DataError, match="not written with the tokenizer"):
            TaskStore(write(tmp_path, foreign))
        with pytest.raises(DataError, match="no document is longer than length 100000"):
            TaskStore(write(tmp_path, self.options(root, haystack=shards, length=100000)))

    def test_a_length_without_room_for_a_haystack_is_refused(self, data):
        root, _ = data
        with pytest.raises(
            DataError, match=r"task.yaml: length 300 has no room.*take [0-9]+ tokens.*at least [0-9]+"
        ) as error:
            TaskStore(write(root, self.options(root, value="uuid", length=300)))
        least = int(str(error.value).rpartition("at least ")[2])
        store = TaskStore(write(root, self.options(root, value="uuid", length=least)))
        assert all(len(store.tokens(example, 0, least + 1)) == least + 1 for example in range(10))


def test_a_task_is_fed_and_evaluated_like_any_source(tmp_path):
    train, held_out = write(tmp_path, MQAR, "train.yaml"), write(tmp_path, MQAR + "seed: 9\n", "held_out.yaml")
    config = DataConfig(sources=[train], validation=[held_out], sequence_length=48, documents="drop")
    feeder = Feeder(config, chunk_size=16, global_rows=4, micro_batch_size=2)
    feeder.check_vocab(64)
    batch = feeder.batch(0)
    assert batch.tokens.shape == (48, 2)
    assert ((batch.labels != IGNORED).sum(0) == 6).all()
    assert feeder.reports[0].samples == 20
    documents = list(evaluation_documents(config, chunk_size=16))
    assert [d.predicted_tokens for d in documents] == [48] * 20
    assert all(int((d.labels != IGNORED).sum()) == 6 for d in documents)
    with pytest.raises(DataError, match="vocabulary of 64,"):
        feeder.check_vocab(63)
    short = config.model_copy(update={"sequence_length": 32})
    with pytest.raises(DataError, match=r"train.yaml: length 48 is more than data.sequence_length 32.*at least 48"):
        Feeder(short, chunk_size=16, global_rows=4, micro_batch_size=2)
    joined = config.model_copy(update={"documents": "join"})
    with pytest.raises(
        DataError, match=r"train.yaml: examples of a task cannot be joined .*; set data.documents: pad$"
    ):
        Feeder(joined, chunk_size=16, global_rows=4, micro_batch_size=2)


class TestOwnTask:
    """The task that docs/tasks.md shows, registered as another package would register it."""

    @pytest.fixture
    def shown(self, monkeypatch):
        monkeypatch.setattr(TASKS, "_known", dict(TASKS.kinds()))
        (code,) = python_snippets("docs/tasks.md")
        module = types.ModuleType("shown_task")
        monkeypatch.setitem(sys.modules, "shown_task", module)
        exec(code, module.__dict__)
        return module

    def test_it_is_a_source_like_any_other(self, shown, tmp_path):
        train = write(tmp_path, "kind: copy\nlength: 8\nvocab_size: 16\nexamples: 6\n")
        held_out = write(tmp_path, "kind: copy\nlength: 8\nvocab_size: 16\nexamples: 2\nseed: 1\n", "other.yaml")
        data = DataConfig(sources=[str(train)], validation=[str(held_out)], sequence_length=8, documents="pad")
        feeder = Feeder(data, chunk_size=4, global_rows=2, micro_batch_size=2)
        feeder.check_vocab(16)
        assert (len(feeder.stores[0]), feeder.stores[0].name(3)) == (6, "copy:3")
        batch = feeder.batch(0)
        for tokens, labels in zip(batch.tokens.T.tolist(), batch.labels.T.tolist(), strict=True):
            assert tokens[:4] == tokens[4:]
            assert labels == [IGNORED] * 3 + tokens[4:] + [IGNORED]
        documents = list(evaluation_documents(data, chunk_size=4))
        assert [document.predicted_tokens for document in documents] == [8, 8]
        with pytest.raises(DataError, match=f"{train}: its tokens come from a vocabulary of 16"):
            feeder.check_vocab(15)

    def test_its_fields_are_checked(self, shown, tmp_path):
        with pytest.raises(DataError, match=r"task\.yaml: vocab: unknown key; did you mean 'vocab_size'"):
            TaskStore(str(write(tmp_path, "kind: copy\nvocab: 16\n")))
