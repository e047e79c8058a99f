"""lm-eval's tasks on a model as it is being trained, under any layout.

The tasks' arithmetic (what is a context, where windows lie) is lm-eval's; the model is read as in training, and what
requests have in common once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megamem.errors import ConfigError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.reading import Progress
from megamem.evaluation.sampling import Sampling
from tokenization.tokenizer import Tokenizer

MAX_NEW_TOKENS = 256
"""lm-eval's default."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""lm-eval's names of the same setting; the first that is given counts."""


class HarnessModel(TemplateLM):
    """All ranks of a model make the same calls with the same requests and get the same answers."""

    def __init__(
        self, evaluator: Evaluator, tokenizer: Tokenizer, max_length: int, progress: Progress | None = None
    ) -> None:
        """Read through `evaluator`.

        Args:
            tokenizer: the model's.
            max_length: tokens of a window; longer texts are cut as lm-eval does.
            progress: told how many batches of the requests at hand are done.
        """
        super().__init__()
        self.evaluator, self.words, self.max_length, self.progress = evaluator, tokenizer, max_length, progress

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
        scored = [
            min(len(continuation), len(sequence) - 1)
            for (_, _, continuation), sequence in zip(requests, sequences, strict=True)
        ]
        found = self.evaluator.score(sequences, scored, progress=self.progress)
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

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop string, the end of the document or the limit.

        Raises: ConfigError where a window holds no more than what is written.
        """
        asked = [_Writing.of(request.args[1], index) for index, request in enumerate(requests)]
        most = max((each.limit for each in asked), default=0)
        if most >= self.max_length:
            raise ConfigError(
                f"--max-length {self.max_length}, or data.sequence_length while a run trains, leaves no token for "
                f"prompts, as a task writes up to {most}"
            )
        prompts = [
            self.tok_encode(request.args[0])[-(self.max_length - each.limit) :] or [self.prefix_token_id]
            for request, each in zip(requests, asked, strict=True)
        ]

        def holds(index: int, tokens: list[int]) -> bool:
            """Return whether the text of new tokens holds a stop string of their request."""
            text = self.words.decode(tokens) if asked[index].stops else ""
            return any(stop in text for stop in asked[index].stops)

        greedy = [index for index, each in enumerate(asked) if not each.sampling.temperature]
        found: dict[int, list[int]] = {}
        written = self.evaluator.continue_greedily(
            [prompts[index] for index in greedy],
            [asked[index].limit for index in greedy],
            end_token=self.eot_token_id,
            stop=lambda row, tokens: holds(greedy[row], tokens),
            progress=self.progress,
        )
        found.update(zip(greedy, written, strict=True))
        sampled = sorted(set(range(len(requests))) - set(greedy))
        progress = self.progress or (lambda done, of: None)
        for done, index in enumerate(sampled):
            with self.evaluator.reader.telling(partial(progress, done, len(sampled))):
                (found[index],) = self.evaluator.generate(
                    [prompts[index]],
                    asked[index].limit,
                    sampling=asked[index].sampling,
                    end_token=self.eot_token_id,
                    stop=lambda _, tokens, index=index: holds(index, tokens),  # type: ignore[misc]
                )
            progress(done + 1, len(sampled))
        answers = [self._answer(found[index], asked[index].stops) for index in range(len(requests))]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _answer(self, tokens: Sequence[int], stops: Sequence[str]) -> str:
        """Return the text of new tokens up to the first stop string."""
        text = self.words.decode([token for token in tokens if token != self.eot_token_id])
        for stop in stops:
            text = text.split(stop)[0] if stop else text
        return text


@dataclass(frozen=True)
class _Writing:
    """How the continuation of a request is written."""

    stops: tuple[str, ...]
    """Strings that end it."""
    limit: int
    """New tokens at most."""
    sampling: Sampling

    @classmethod
    def of(cls, settings: Mapping[str, Any], seed: int) -> _Writing:
        """Read lm-eval's settings of a request as its own models do. seed: another one for each request."""
        stops = settings.get("until") or ()
        draws = settings.get("do_sample")
        limits = [settings[name] for name in _LIMITS if settings.get(name) is not None]
        return cls(
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            limit=int(limits[0]) if limits else MAX_NEW_TOKENS,
            sampling=Sampling(
                temperature=0.0 if draws is False else float(settings.get("temperature", 1.0 if draws else 0.0)),
                top_k=settings.get("top_k") or None,
                top_p=float(settings.get("top_p", 1.0)),
                seed=seed,
            ),
        )
