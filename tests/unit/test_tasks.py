"""Synthetic tasks as sources of documents."""

import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megamem.config.data import DataConfig
from megamem.data.batch import IGNORED
from megamem.data.feeder import Feeder, evaluation_documents
from megamem.data.tasks.base import TASKS
from megamem.data.tasks.sorting import by_frequency, draw_sequence
from megamem.data.tasks.store import TaskStore, read_task
from megamem.errors import DataError
from tests.snippets import python_snippets

TASK_FILES = sorted((Path(__file__).resolve().parents[2] / "configs" / "tasks").glob("*/*.yaml"))
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


class TestSorting:
    """Sorting by frequency, against the paper's words: the most frequent first."""

    DESCRIPTION = "kind: sorting\nsymbols: 20\nlength: 420\nexamples: 20\n"

    def order(self, drawn, symbols):
        """The oracle: a loop over the sequence. Counter keeps the order of first occurrences and sorts stably."""
        counted = Counter()
        for symbol in drawn:
            counted[symbol] += 1
        return [symbol for symbol, _ in counted.most_common()] + [s for s in range(symbols) if s not in counted]

    @pytest.mark.parametrize(("symbols", "length"), [(20, 420), (20, 44), (5, 80), (2, 3), (300, 900)])
    def test_the_answer_is_that_of_a_loop(self, tmp_path, symbols, length):
        text = f"kind: sorting\nsymbols: {symbols}\nlength: {length}\nexamples: 50\n"
        store, drawn = TaskStore(write(tmp_path, text)), length - symbols
        assert store.vocab_size == symbols + 1
        for example in range(50):
            tokens, labels = store.tokens(example, 0, length).tolist(), store.labels(example, 0, length).tolist()
            assert len(tokens) == len(labels) == length
            assert set(tokens[:drawn]) <= set(range(symbols))
            assert tokens[drawn] == symbols, "the separator"
            assert labels[:drawn] == [IGNORED] * drawn
            assert labels[drawn:] == self.order(tokens[:drawn], symbols)
            assert tokens[drawn + 1 :] == labels[drawn:-1], "each symbol of the answer is read before the next"

    def test_ties_and_absent_symbols(self):
        """3 and 1 come twice, 3 first; 0 once; 2 and 4 not at all. Then the paper's own example."""
        assert by_frequency(np.array([3, 1, 3, 1, 0]), 5).tolist() == [3, 1, 0, 2, 4]
        assert by_frequency(np.array([1, 2, 1, 3, 1, 0, 3, 1, 3, 2]), 4).tolist() == [1, 3, 2, 0]
        assert by_frequency(np.array([4]), 5).tolist() == [4, 0, 1, 2, 3]

    def test_shares_drift_from_one_distribution_to_the_other(self):
        """Each quarter's counts are within 5 standard deviations of the sum of (1 - r) p_0 + r p_1 over its places."""
        length, symbols = 40_000, 20
        drawn = draw_sequence(length, symbols, np.random.default_rng(3))
        shares = np.random.default_rng(3).integers(1, 10, (2, symbols))  # what is drawn first
        first, last = (share / share.sum() for share in shares)
        assert np.abs(first - last).max() > 0.03
        for quarter in range(4):
            expected, variance = np.zeros(symbols), np.zeros(symbols)
            for place in range(quarter * length // 4, (quarter + 1) * length // 4):
                r = (place + 1) / length
                probability = (1 - r) * first + r * last
                expected += probability
                variance += probability * (1 - probability)
            counts = np.bincount(drawn[quarter * length // 4 : (quarter + 1) * length // 4], minlength=symbols)
            assert (np.abs(counts - expected) < 5 * variance**0.5).all()
            if quarter in (0, 3):  # not without drift, nor with drift the other way round
                for wrong in (length / 8 * (first + last), length / 4 * (first + last) - expected):
                    assert (np.abs(counts - wrong) > 5 * variance**0.5).any()

    def test_the_last_place_is_drawn_from_the_last_distribution_alone(self):
        """r is 1 there: sequences of one symbol whose two distributions differ much, within 4 standard deviations."""
        probabilities, zeros = [], 0
        for example in range(20_000):
            shares = np.random.default_rng((5, example)).integers(1, 10, (2, 2))
            first, last = shares[:, 0] / shares.sum(1)
            if first < 0.4 and last > 0.6:
                probabilities.append(last)
                zeros += int(draw_sequence(1, 2, np.random.default_rng((5, example)))[0] == 0)
        assert len(probabilities) > 1000
        assert abs(zeros - sum(probabilities)) < 4 * sum(p * (1 - p) for p in probabilities) ** 0.5

    def test_shares_are_drawn_anew_for_each_example(self):
        """Two symbols, two places: how often both places agree, within 4 standard deviations.

        The places have (p_0 + p_1) / 2 and p_1, so they agree with probability 1/4 + E[p_1^2 + (1 - p_1)^2] / 2, the
        mean over all pairs of integers from 1 to 9: 0.54. Equal shares would give 0.5.
        """
        pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
        same = sum((a * a + b * b) / (a + b) ** 2 for a, b in pairs) / len(pairs)
        expected = 0.25 + same / 2
        drawn = [draw_sequence(2, 2, np.random.default_rng((7, example))) for example in range(20_000)]
        agree = sum(int(first == second) for first, second in drawn) / 20_000
        error = 4 * (expected * (1 - expected) / 20_000) ** 0.5
        assert abs(agree - expected) < error < expected - 0.5

    def test_what_was_drawn_last_does_not_tell_the_order(self, tmp_path):
        """What came most in the last chunk of 1,024, of the symbols left, is right at 37 % of the places, as docs/ say.

        An example's standard deviation is 0.08, so 0.04 is 5 times that of the mean of 100. By the whole sequence all
        places are right.
        """
        store = TaskStore(write(tmp_path, "kind: sorting\nlength: 4020\nexamples: 100\nseed: 2\n"))
        right = Counter()
        for example in range(100):
            tokens, answer = store.tokens(example, 0, 4000).tolist(), store.labels(example, 4000, 4020).tolist()
            for name, start in (("chunk", 3072), ("whole", 0)):
                left = self.order(tokens[start:], 20)
                for symbol in answer:
                    right[name] += left[0] == symbol
                    left.remove(symbol)
        assert right["chunk"] / 2000 == pytest.approx(0.37, abs=0.04)
        assert right["whole"] == 2000

    def test_lengths_are_drawn_from_a_range(self, tmp_path):
        """Both ends come among 1,500 examples of 9 lengths; the store knows each length before it makes the example."""
        text = "kind: sorting\nsymbols: 4\nlength: 20\nshortest: 12\nexamples: 1500\n"
        store = TaskStore(write(tmp_path, text))
        assert Counter((store.lengths - 1).tolist()).keys() == set(range(12, 21))
        for example in range(100):
            length = int(store.lengths[example]) - 1
            tokens, labels = store.tokens(example, 0, length + 1), store.labels(example, 0, length)
            assert (len(tokens), len(labels)) == (length + 1, length)
            assert tokens.tolist().index(4) == length - 4
            assert labels[-4:].tolist() == self.order(tokens[: length - 4].tolist(), 4)

    def test_examples_are_a_pure_function_of_seed_and_number(self, tmp_path):
        ranged = self.DESCRIPTION + "shortest: 100\n"
        one, same = (TaskStore(write(tmp_path, ranged)) for _ in range(2))
        longer = TaskStore(write(tmp_path, ranged.replace("examples: 20", "examples: 40"), "longer.yaml"))
        other = TaskStore(write(tmp_path, ranged + "seed: 1\n", "other.yaml"))
        assert one.lengths.tolist() == same.lengths.tolist() == longer.lengths[:20].tolist() != other.lengths.tolist()
        assert one.fingerprint == same.fingerprint != other.fingerprint
        for example in range(19, -1, -1):
            stop = int(one.lengths[example])
            assert (one.tokens(example, 5, stop) == same.tokens(example, 0, stop)[5:]).all()
            assert (one.tokens(example, 0, stop) == longer.tokens(example, 0, stop)).all()
            assert (one.tokens(example, 0, 90) != other.tokens(example, 0, 90)).any()
            assert (one.tokens(example, 0, 90) != one.tokens((example + 1) % 20, 0, 90)).any()

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("symbols: 1", r"symbols: .*\(got 1\)"),
            ("length: 20", "length 20 has no room .* take 20; at least 21"),
            ("length: 0", r"length: .*\(got 0\)"),
            ("shortest: 20", "shortest 20 must be larger than symbols 20 and at most length"),
            ("shortest: 421", "shortest 421 must be larger than symbols 20 and at most length"),
            ("symbol: 20", "symbol: unknown key; did you mean 'symbols'"),
            ("vocab_size: 20", "vocab_size: unknown key"),
        ],
    )
    def test_bad_descriptions_are_one_line(self, tmp_path, line, message):
        key = line.split(":")[0]
        kept = [entry for entry in self.DESCRIPTION.splitlines() if not entry.startswith(f"{key}:")]
        path = write(tmp_path, "\n".join([*kept, line]))
        with pytest.raises(DataError, match=f"task.yaml.*{message}") as error:
            read_task(Path(path))
        assert "\n" not in str(error.value)

    def test_examples_of_many_lengths_share_rows(self, tmp_path):
        """Whole examples begin at chunk borders; each is asked for all of its symbols, in training as held out."""
        ranged = "kind: sorting\nsymbols: 4\nlength: 64\nshortest: 10\nexamples: 200\n"
        train, held_out = write(tmp_path, ranged, "train.yaml"), write(tmp_path, ranged + "seed: 1\n", "held_out.yaml")
        data = {"sources": [train], "validation": [held_out], "sequence_length": 64}
        feeder = Feeder(DataConfig(**data, documents="pack"), chunk_size=16, global_rows=8, micro_batch_size=8)
        feeder.check_vocab(5)
        batch, shared = feeder.batch(0), 0
        for tokens, labels in zip(batch.tokens.T.tolist(), batch.labels.T.tolist(), strict=True):
            separators = [place for place, token in enumerate(tokens) if token == 4]
            asked = [place for place, label in enumerate(labels) if label != IGNORED]
            assert asked == [place + after for place in separators for after in range(4)]
            start = 0
            for place in separators:
                assert labels[place : place + 4] == self.order(tokens[start:place], 4)
                start = -(-(place + 4) // 16) * 16  # the next border
            shared += len(separators) > 1
        assert shared
        documents = list(evaluation_documents(DataConfig(**data), chunk_size=16))
        assert len({document.predicted_tokens for document in documents}) > 20
        assert all(int((document.labels != IGNORED).sum()) == 4 for document in documents)
        short = DataConfig(**{**data, "sequence_length": 48}, documents="pad")
        with pytest.raises(DataError, match=r"train.yaml: length 64 is more than data.sequence_length 48.*at least 64"):
            Feeder(short, chunk_size=16, global_rows=8, micro_batch_size=8)


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_tasks_of_the_repository_are_read(path):
    assert read_task(path).kind == path.parent.name


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
