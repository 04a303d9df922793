"""Log-probabilities, in the two shapes that OpenAI's endpoints have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from specinfer.request import Logprob, Logprobs
from specinfer.serve.work import Delta
from specinfer.tokenizer import Tokenizer

_NEVER: Final = -9999.0  # JSON has no -inf


def chat_logprobs(logprobs: Iterable[Logprobs], top: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Of each token: its own figures, and those of the `top` likeliest."""

    def entry(token: int, one: Logprob) -> dict[str, Any]:
        return {
            "token": one.text,
            "logprob": finite(one.logprob),
            "bytes": list(tokenizer.token_bytes[token]),
        }

    found = []
    for of_token in logprobs:
        [chosen, *_] = of_token.items()
        found.append(entry(*chosen) | {"top_logprobs": [entry(*one) for one in _likeliest(of_token, top)]})
    return found


class CompletionLogprobs:
    """The older shape: parallel lists, with where each token begins in the text."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0

    def add(self, logprobs: Sequence[Logprobs | None], texts: Sequence[str]) -> dict[str, Any]:
        """The lists for the next tokens; None for the prompt's first, of which nothing is known."""
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": list(texts),
            "token_logprobs": [None if one is None else finite(_chosen(one).logprob) for one in logprobs],
            "top_logprobs": [
                None if one is None else {p.text: finite(p.logprob) for _, p in _likeliest(one, self._top)}
                for one in logprobs
            ],
            "text_offset": offsets,
        }


def _chosen(of_token: Logprobs) -> Logprob:
    return next(iter(of_token.values()))


def _likeliest(of_token: Logprobs, top: int) -> list[tuple[int, Logprob]]:
    return sorted((one for one in of_token.items() if one[1].rank <= top), key=lambda one: one[1].rank)[:top]


def finite(logprob: float) -> float:
    """A log-probability as JSON can write it."""
    return max(logprob, _NEVER)


def prompt_logprobs(reports: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities as vLLM has them: token id -> its figures, None for the first token."""
    return [
        None
        if of_token is None
        else {
            str(token): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.text}
            for token, one in of_token.items()
        }
        for of_token in reports
    ]


class SharedPrompts:
    """Hands the log-probabilities of prompts, which completion 0 has, to the other completions.

    Each has them with its first delta; what comes of others before they are known is held back.
    """

    def __init__(self, n: int, prompts: Iterable[int]) -> None:
        """For n completions of each of these prompts, by number, whose log-probabilities are asked for."""
        self._n = n
        self._held: dict[int, list[tuple[int, Delta]]] = {prompt: [] for prompt in prompts}
        self._known: dict[int, Sequence[Logprobs | None] | None] = {}
        self._begun: set[int] = set()

    def ready(self, number: int, delta: Delta) -> Iterator[tuple[int, Delta]]:
        """What can be told now that a delta of the completion with this number has come: none or several."""
        prompt, completion = divmod(number, self._n)
        if prompt not in self._held or completion == 0:
            yield number, delta
        elif prompt in self._known:
            yield number, self._with_reports(number, delta)
        else:
            self._held[prompt].append((number, delta))
        if prompt in self._held and completion == 0 and prompt not in self._known:
            self._known[prompt] = delta.prompt_logprobs
            for other, held in self._held[prompt]:
                yield other, self._with_reports(other, held)

    def _with_reports(self, number: int, delta: Delta) -> Delta:
        if number in self._begun:
            return delta
        self._begun.add(number)
        return replace(delta, prompt_logprobs=self._known[number // self._n])
