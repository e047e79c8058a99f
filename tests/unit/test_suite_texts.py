"""Texts that suites write: stories whose answers follow from their sentences, needles, and stories in a book."""

import random
import re

import pytest

from megamem.data.tasks.ruler import hide_in_noise, hide_in_text, split_sentences, write_example
from megamem.errors import DataError
from megamem.evaluation.suites.babi import STORIES
from megamem.evaluation.suites.babilong import documents
from megamem.evaluation.suites.ruler import FORMS, NEW_TOKENS, examples, largest, write_needles
from tests.unit.suite_helpers import SENTENCES, setting_of

WORDS = " ".join(SENTENCES).split()


class Reader:
    """Follows a story sentence by sentence, by its words alone."""

    def __init__(self, facts):
        self.room, self.holder, self.places, self.given, self.lies = {}, {}, {}, [], {}
        for fact in facts:
            self.read(fact.rstrip(".").split())

    def read(self, words):
        person, last = words[0], words[-1]
        if re.match(r"(moved|went|journeyed|travelled)", words[1]):
            self.room[person] = last
            for thing, holder in self.holder.items():
                if holder == person:
                    self.seen(thing, last)
        elif words[1] in ("gave", "passed", "handed"):
            self.given.append((person, words[3], last))
            assert self.holder[words[3]] == person, "nobody gives what they do not hold"
            self.holder[words[3]] = last
        elif words[0] != "The":
            thing = next(word for word in words if word in ("apple", "football", "milk"))
            if words[1] in ("picked", "got", "took", "grabbed"):
                assert thing not in self.holder, "nobody takes what another one holds"
                assert self.lies.get(thing) in (None, self.room.get(person)), "nobody takes what is elsewhere"
                self.holder[thing] = person
                self.seen(thing, self.room[person])
            else:
                assert self.holder.pop(thing) == person
                self.lies[thing] = self.room.get(person)

    def seen(self, thing, room):
        rooms = self.places.setdefault(thing, [])
        if not rooms or rooms[-1] != room:
            rooms.append(room)

    def answers(self, question):
        words = question.rstrip("?").split()
        if words[:2] == ["Where", "is"]:
            return {self.room[words[2]]} if words[2] in self.room else {self.places[words[3]][-1]}
        if words[:2] == ["Where", "was"]:
            rooms = self.places[words[3]]
            assert rooms[-1] == words[-1]
            return {rooms[-2]}
        giver, thing, taker = self.given[-1]
        return {"What": {thing}, "Who": {giver} if words[1] == "gave" else {taker}}[words[0]]


@pytest.mark.parametrize("name", ["qa1", "qa2", "qa3"])
def test_answers_follow_from_the_sentences(name):
    draws = random.Random(0)
    answers = set()
    for _ in range(300):
        story = STORIES[name](draws)
        assert Reader(story.facts).answers(story.question) == {story.answer}
        answers.add(story.answer)
    assert len(answers) == 6


def test_what_is_given_follows_from_the_last_handing_over():
    draws = random.Random(1)
    kinds = set()
    for _ in range(300):
        story = STORIES["qa5"](draws)
        handed = [f.rstrip(".").split() for f in story.facts if f.split()[1] in ("gave", "passed", "handed")]
        giver, _, _, thing, _, taker = handed[-1]
        question = story.question.split()
        kinds.add((question[0], question[1]))
        expected = thing if question[0] == "What" else giver if question[1] == "gave" else taker
        assert story.answer == expected
    assert kinds == {("What", "did"), ("Who", "gave"), ("Who", "did"), ("Who", "received")}


def test_rooms_lie_where_the_sentences_say():
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    draws = random.Random(2)
    for _ in range(300):
        story = STORIES["qa4"](draws)
        facts = {re.match(r"The (\w+) is (\w+) of the (\w+)\.", fact).groups() for fact in story.facts}
        facts |= {(right, opposite[where], left) for left, where, right in facts}
        if found := re.match(r"What is (\w+) of the (\w+)\?", story.question):
            where, right = found.groups()
            assert [left for left, side, other in facts if (side, other) == (where, right)] == [story.answer]
        else:
            left, where = re.match(r"What is the (\w+) (\w+) of\?", story.question).groups()
            assert [right for one, side, right in facts if (one, side) == (left, where)] == [story.answer]


class TestBabilong:
    @pytest.mark.parametrize("length", [512, 1500])
    def test_sentences_stand_in_their_order_in_the_book(self, tmp_path, length):
        setting = setting_of(tmp_path)
        for name in ("qa1", "qa4"):
            told = documents(name, 0, 5, [], setting)
            hidden = documents(name, length, 5, SENTENCES, setting)
            for document in hidden:
                text = document["input"]
                tokens = len(setting.encode(text))
                assert length - 20 <= tokens <= length
                facts = [s for s in split_sentences(text) if s not in SENTENCES]
                reader = Reader(facts) if name == "qa1" else None
                assert reader is None or reader.answers(document["question"]) == {document["target"]}
                book = [s for s in split_sentences(text) if s in SENTENCES]
                at = SENTENCES.index(book[0])
                assert book == [SENTENCES[(at + i) % len(SENTENCES)] for i in range(len(book))]
            assert len(told) == 5
            assert {len(d["input"]) for d in told} < set(range(1000))

    def test_a_story_needs_room(self, tmp_path):
        with pytest.raises(DataError, match="babilong: 4 tokens have no room for a story"):
            documents("qa1", 4, 1, SENTENCES, setting_of(tmp_path))


class TestNeedles:
    @pytest.mark.parametrize(("name", "value", "text"), [
        ("niah_single_1", "number", False), ("niah_single_2", "number", True), ("niah_single_3", "uuid", True),
    ])  # fmt: skip
    def test_single_needles_are_those_of_the_training_task(self, name, value, text):
        for seed in range(20):
            found = write_needles(random.Random(seed), FORMS[name], 60, WORDS)
            hide = (lambda d, n: hide_in_text(d, n, WORDS[:60])) if text else (lambda d, n: hide_in_noise(d, n, 60))
            prompt, answer = write_example(random.Random(seed), value, hide)
            assert f"{found['prompt']} {found['question']}" == prompt
            assert found["answers"] == [answer]

    @pytest.mark.parametrize("name", FORMS)
    def test_what_is_asked_for_stands_in_the_text(self, name):
        form = FORMS[name]
        for seed in range(20):
            found = write_needles(random.Random(seed), form, 100, WORDS)
            assert len(found["answers"]) == form.queries * form.values
            assert all(f" is: {answer}." in found["prompt"] for answer in found["answers"])

    @pytest.mark.parametrize("name", FORMS)
    @pytest.mark.parametrize("length", [2000, 4200])
    def test_haystacks_are_as_large_as_fits(self, tmp_path, name, length):
        setting = setting_of(tmp_path)
        form = FORMS[name]
        found = examples(form, length, 3, WORDS * 3, setting)
        step = 500 if form.haystack == "text" else 25 if length >= 4096 else 5
        # words of a step of lines; a needle among needles has 10 words, noise 18
        room = step * {"text": 1, "noise": 18, "needles": 10}[form.haystack]
        for document in found:
            tokens = len(setting.encode(document["prompt"])) + NEW_TOKENS
            assert tokens <= length
            assert tokens > length - 2 * room - 40
        assert len({document["prompt"] for document in found}) == 3

    def test_no_room(self, tmp_path):
        with pytest.raises(DataError, match="ruler: 100 tokens have no room for a haystack"):
            examples(FORMS["niah_single_1"], 100, 1, [], setting_of(tmp_path))


def test_the_largest_number_that_fits():
    for most in range(6):
        for limit in range(7):
            assert largest(lambda n, limit=limit: n <= limit, most) == min(most, limit)
