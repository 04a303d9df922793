"""Log-probabilities, in the two shapes that OpenAI's endpoints have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from specinfer.request import Logprob, Logprobs
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
