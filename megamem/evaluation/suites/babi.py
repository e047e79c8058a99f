"""Stories of small worlds with a question each, as in bAbI's tasks 1 to 5.

Weston et al., "Towards AI-Complete Question Answering: A Set of Prerequisite Toy Tasks", 2015. People walk between
rooms, take, drop and hand over things; a question asks for what follows from one, two or three of the sentences.
Sentences and words are those of the published sets; the stories are drawn here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
MOVES = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
TAKES = ("picked up", "got", "took", "grabbed")
DROPS = ("dropped", "discarded", "left", "put down")
GIVES = ("gave", "passed", "handed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


@dataclass(frozen=True)
class Story:
    """Sentences in their order, a question about them, and its answer of one word."""

    facts: tuple[str, ...]
    question: str
    answer: str


class World:
    """People, what they hold, and where they and things have been."""

    def __init__(self, draws: random.Random, people: tuple[str, ...] = PEOPLE) -> None:
        """Begin where nobody has been seen yet."""
        self.draws, self.people = draws, people
        self.room: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.places: dict[str, list[str]] = {}
        """The rooms in which each thing has been seen, the last one at the end."""
        self.lying: dict[str, str] = {}
        self.facts: list[str] = []

    def move(self) -> None:
        """Let somebody walk into another room."""
        person = self.draws.choice(self.people)
        room = self.draws.choice([room for room in ROOMS if room != self.room.get(person)])
        self.room[person] = room
        self.facts.append(f"{person} {self.draws.choice(MOVES)} the {room}.")
        for thing, holder in self.holder.items():
            if holder == person:
                self._seen(thing, room)

    def take(self) -> bool:
        """Let somebody take a thing where it lies, or one that was not seen before; False if nobody can."""
        free = [
            (person, thing)
            for person, room in self.room.items()
            for thing in THINGS
            if thing not in self.holder and self.lying.get(thing, room) == room
        ]
        if not free:
            return False
        person, thing = self.draws.choice(free)
        self.holder[thing] = person
        self.lying.pop(thing, None)
        self._seen(thing, self.room[person])
        there = self.draws.choice((" there", ""))
        self.facts.append(f"{person} {self.draws.choice(TAKES)} the {thing}{there}.")
        return True

    def drop(self) -> bool:
        """Let somebody put down what they hold; False if nobody holds anything."""
        if not self.holder:
            return False
        thing = self.draws.choice(sorted(self.holder))
        person = self.holder.pop(thing)
        self.lying[thing] = self.room[person]
        there = self.draws.choice((" there", ""))
        self.facts.append(f"{person} {self.draws.choice(DROPS)} the {thing}{there}.")
        return True

    def act(self) -> None:
        """Let one of these things happen."""
        kind = self.draws.random()
        if kind < 0.5 or not (self.take() if kind < 0.8 else self.drop()):
            self.move()

    def _seen(self, thing: str, room: str) -> None:
        """Note the room in which a thing is."""
        rooms = self.places.setdefault(thing, [])
        if not rooms or rooms[-1] != room:
            rooms.append(room)


def where_is_somebody(draws: random.Random) -> Story:
    """Return a story of task 1: one supporting fact."""
    world = World(draws)
    for _ in range(draws.randint(2, 10)):
        world.move()
    person = draws.choice(sorted(world.room))
    return Story(tuple(world.facts), f"Where is {person}?", world.room[person])


def where_is_something(draws: random.Random) -> Story:
    """Return a story of task 2: two supporting facts, who has a thing and where they are."""
    world, least = World(draws), draws.randint(6, 30)
    while len(world.facts) < least or not world.places:
        world.act()
    thing = draws.choice(sorted(world.places))
    return Story(tuple(world.facts), f"Where is the {thing}?", world.places[thing][-1])


def where_was_something(draws: random.Random) -> Story:
    """Return a story of task 3: three supporting facts, where a thing was before it came to a room."""
    world, least = World(draws), draws.randint(10, 60)
    while len(world.facts) < least or not _moved(world):
        world.act()
    thing = draws.choice(_moved(world))
    *_, before, last = world.places[thing]
    return Story(tuple(world.facts), f"Where was the {thing} before the {last}?", before)


def _moved(world: World) -> list[str]:
    """Return the things that were seen in at least two rooms."""
    return sorted(thing for thing, rooms in world.places.items() if len(rooms) > 1)


def which_room_lies_there(draws: random.Random) -> Story:
    """Return a story of task 4: two argument relations, one of them asked about from either side."""
    left, middle, right = draws.sample(ROOMS, 3)
    first, second = draws.choice([("north", "south"), ("east", "west"), ("south", "north"), ("west", "east")])
    # two facts about one room, on its two sides
    facts = [f"The {left} is {first} of the {middle}.", f"The {right} is {second} of the {middle}."]
    draws.shuffle(facts)
    questions = [
        (f"What is {first} of the {middle}?", left),
        (f"What is {second} of the {middle}?", right),
        (f"What is the {middle} {OPPOSITE[first]} of?", left),
        (f"What is the {middle} {OPPOSITE[second]} of?", right),
    ]
    question, answer = draws.choice(questions)
    return Story(tuple(facts), question, answer)


def who_gave_what(draws: random.Random) -> Story:
    """Return a story of task 5: three argument relations, the last handing over of a thing."""
    world, least = World(draws, GIVERS), draws.randint(3, 20)
    given: list[tuple[str, str, str]] = []
    while len(world.facts) < least or not given:
        if world.holder and draws.random() < 0.4:
            thing = draws.choice(sorted(world.holder))
            giver = world.holder[thing]
            taker = draws.choice([person for person in GIVERS if person != giver])
            world.holder[thing] = taker
            world.room[taker] = world.room[giver]
            given.append((giver, thing, taker))
            world.facts.append(f"{giver} {draws.choice(GIVES)} the {thing} to {taker}.")
        else:
            world.act()
    giver, thing, taker = given[-1]
    question, answer = draws.choice(
        [
            (f"What did {giver} give to {taker}?", thing),
            (f"Who gave the {thing} to {taker}?", giver),
            (f"Who did {giver} give the {thing} to?", taker),
            (f"Who received the {thing}?", taker),
            (f"Who gave the {thing}?", giver),
        ]
    )
    return Story(tuple(world.facts), question, answer)


STORIES: dict[str, Callable[[random.Random], Story]] = {
    "qa1": where_is_somebody,
    "qa2": where_is_something,
    "qa3": where_was_something,
    "qa4": which_room_lies_there,
    "qa5": who_gave_what,
}
"""By the names of bAbI's tasks."""
