"""lm-eval's tasks on a model as it is being trained, under any layout. Exports go through lm-eval's own `hf` model.

The tasks' arithmetic (what is a context, where windows lie) is lm-eval's; the model is read as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.sampling import Sampling
from tokenization.tokenizer import Tokenizer

MAX_NEW_TOKENS = 256
"""lm-eval's default."""


class HarnessModel(TemplateLM):
    """All ranks of a model make the same calls with the same requests and get the same answers."""

    def __init__(self, evaluator: Evaluator, tokenizer: Tokenizer, max_length: int) -> None:
        """max_length: tokens of a window; longer texts are cut as lm-eval does."""
        super().__init__()
        self.evaluator, self.words, self.max_length = evaluator, tokenizer, max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.words.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self.words.eos_id if self.words.meta.bos_id is None else self.words.meta.bos_id

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's records."""
        return self.words.hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; nothing is added."""
        return [int(token) for token in self.words.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores of continuations (third of each request) after contexts (second), long contexts cut at their start."""
        sequences = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        scored = [len(continuation) for _, _, continuation in requests]
        order = sorted(range(len(requests)), key=lambda i: -len(sequences[i]))  # little padding
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        rows = self.evaluator.rows
        for first in range(0, len(order), rows):
            batch = order[first : first + rows]
            scores = self.evaluator.score([sequences[i] for i in batch], [scored[i] for i in batch])
            for i, score in zip(batch, scores, strict=True):
                found[i] = score
        for (key, _, _), score in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of `max_length` tokens that are scored once each."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (nats, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[index] += nats
        return totals

    def _holds(self, stops: Sequence[str], row: int, tokens: list[int]) -> bool:
        """Whether the text of `tokens` holds a stop string."""
        text = self.words.decode(tokens)
        return any(stop in text for stop in stops)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop string, the end of the document or the limit."""
        answers = []
        for request in requests:
            context, settings = request.args
            stops = settings.get("until") or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            limit = int(settings.get("max_gen_toks", MAX_NEW_TOKENS))
            prompt = self.tok_encode(context)[-max(self.max_length - limit, 1) :] or [self.prefix_token_id]
            warm = bool(settings.get("do_sample")) and float(settings.get("temperature", 1.0)) > 0
            (tokens,) = self.evaluator.generate(
                [prompt],
                limit,
                sampling=Sampling(temperature=float(settings.get("temperature", 1.0)) if warm else 0.0),
                end_token=self.eot_token_id,
                stop=partial(self._holds, stops),
            )
            text = self.words.decode([token for token in tokens if token != self.eot_token_id])
            for stop in stops:
                text = text.split(stop)[0] if stop else text
            answers.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return answers
