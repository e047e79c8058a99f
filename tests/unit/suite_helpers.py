"""A model with lm-eval's interface that answers what it is told to, and texts to hide things in."""

import re
from pathlib import Path

from lm_eval.api.model import LM

from megamem.evaluation.suites.base import Setting

SENTENCES = [f"Sentence {i} speaks of hill{i % 7} and of sea{i % 5}." for i in range(400)]


def words_of(text):
    """A tokenizer of words with the white space before them; what stands behind the last word is lost."""
    return re.findall(r"\s*\S+", text)


class Vocabulary:
    """Numbers pieces as they come."""

    def __init__(self):
        self.pieces = []
        self.ids = {}

    def encode(self, text):
        for piece in words_of(text):
            if piece not in self.ids:
                self.ids[piece] = len(self.pieces)
                self.pieces.append(piece)
        return [self.ids[piece] for piece in words_of(text)]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


def setting_of(folder: Path, **options) -> Setting:
    vocabulary = Vocabulary()
    return Setting(vocabulary.encode, vocabulary.decode, folder, **options)


def write_haystack(folder: Path) -> None:
    (folder / "haystack").mkdir(parents=True)
    (folder / "haystack" / "book.txt").write_text("\n".join(SENTENCES))


class Scripted(LM):
    """Answers by functions of the requests, and keeps these."""

    def __init__(self, answer=None, score=None):
        super().__init__()
        self.answer, self.nats = answer, score
        self.requests = []

    def generate_until(self, requests, disable_tqdm=False):
        self.requests += [request.args for request in requests]
        return [self.answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        self.requests += [request.args for request in requests]
        return [(self.nats(*request.args), False) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return [self.nats("", request.args[0]) for request in requests]
