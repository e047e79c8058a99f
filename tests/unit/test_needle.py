"""Examples of the task `niah`: tokens, labels and their length. Their text: test_ruler.py."""

import re

import numpy as np
import pytest
from data_helpers import make_tokenizer, text_of

from megamem.data.batch import IGNORED
from megamem.data.tasks.ruler import KEYS, NOISE
from megamem.data.tasks.store import TaskStore
from megamem.errors import DataError
from tokenization.shards import write_shards
from tokenization.tokenizer import Tokenizer


def write(folder, text):
    path = folder / "task.yaml"
    path.write_text(text)
    return str(path)


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

    @pytest.mark.parametrize(
        ("haystack", "value", "start"),
        [("noise", "number", "first"), ("text", "number", "first"), ("text", "uuid", "random")],
    )
    def test_the_needle_says_what_is_asked_for(self, data, haystack, value, start):
        root, shards = data
        where = "noise" if haystack == "noise" else shards
        store = TaskStore(write(root, self.options(root, haystack=where, value=value, start=start)))
        tokenizer = Tokenizer.load(root / "tokenizer")
        depths, openings = set(), set()
        for example in range(len(store)):
            tokens, labels = store.tokens(example, 0, 700), store.labels(example, 0, 700)
            asked = np.flatnonzero(labels != IGNORED)
            assert (np.diff(asked) == 1).all(), "the answer is one piece"
            assert (tokens[asked[-1] + 2 :] == tokenizer.eos_id).all(), "padding stands behind the answer"
            answer = tokenizer.decode(labels[asked])
            assert answer[0] == " "
            answer = answer[1:]
            prompt = tokenizer.decode(tokens[: asked[0] + 1])
            opening, _, rest = prompt.partition("One of the special magic ")
            key = rest.partition(" is: ")[0].split(" for ")[1]
            assert rest.startswith(f"{value}s for {key} is: {answer}.")
            assert prompt.count(answer) == 1
            assert prompt.endswith(f"The special magic {value} for {key} mentioned in the provided text is")
            assert key in KEYS
            assert len(answer) == (7 if value == "number" else 36)
            assert (NOISE in prompt) == (haystack == "noise")
            depths.add(len(opening))
            openings.add(re.sub(r"\s*One of the special .*?\.\s", "", prompt.split("afterwards.\n")[1])[:40])
        assert len(depths) > 3
        assert (len(openings) > 2) == (start == "random")

    @pytest.mark.parametrize("haystack", ["noise", "text"])
    def test_one_more_unit_of_haystack_would_not_fit(self, data, haystack):
        """The text, written again for one more line or word, has more tokens than an example reads and predicts."""
        root, shards = data
        where = "noise" if haystack == "noise" else shards
        store = TaskStore(write(root, self.options(root, haystack=where)))
        tokenizer = store.task.tokenizer
        words = " ".join(text for n in range(3) for text in (root / "text" / f"{n}.txt").read_text().split()).split()
        for example in range(len(store)):
            labels = store.labels(example, 0, 700)
            end = int(np.flatnonzero(labels != IGNORED)[-1]) + 1
            text = tokenizer.decode(np.append(store.tokens(example, 0, end), labels[end - 1]))
            context = text.split("afterwards.\n")[1].split("\nWhat is")[0]
            needle = context[context.index("One of the special") :]
            needle = needle[: needle.index(".") + 1]
            if haystack == "noise":
                assert set(context.split("\n")) == {NOISE, needle}
                added = f"\n{NOISE}"
            else:
                used = context.replace(needle, "").split()
                assert used == words[: len(used)], "the text from its start"
                added = f" {words[len(used)]}"
            assert len(tokenizer.encode(text)) <= 701
            # at another place the same words may take one token less
            assert len(tokenizer.encode(text + added)) >= 701

    def test_all_tokens_may_be_predicted(self, data):
        root, _ = data
        store = TaskStore(write(root, self.options(root, supervise="all")))
        labels, tokens = store.labels(0, 0, 699), store.tokens(0, 1, 700)
        text = labels != IGNORED
        assert (labels[text] == tokens[text]).all()
        assert (tokens[~text] == store.task.tokenizer.eos_id).all()

    def test_foreign_or_short_haystacks_are_refused(self, data, tmp_path):
        root, shards = data
        make_tokenizer(tmp_path / "tokenizer", vocab_size=280, seed=5)
        foreign = self.options(root, haystack=shards, tokenizer=tmp_path / "tokenizer")
        with pytest.raises(DataError, match="not written with the tokenizer"):
            TaskStore(write(tmp_path, foreign))
        with pytest.raises(DataError, match=r"holds [0-9]+ tokens, too few for length 100000"):
            TaskStore(write(tmp_path, self.options(root, haystack=shards, length=100000)))

    def test_a_length_without_room_for_a_haystack_is_refused(self, data):
        root, _ = data
        with pytest.raises(
            DataError, match=r"task.yaml: length 300 has no room.*takes [0-9]+ tokens.*at least [0-9]+"
        ) as error:
            TaskStore(write(root, self.options(root, value="uuid", length=300)))
        least = int(str(error.value).rpartition("at least ")[2])
        store = TaskStore(write(root, self.options(root, value="uuid", length=least)))
        assert all(len(store.tokens(example, 0, least + 1)) == least + 1 for example in range(10))
