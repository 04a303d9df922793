"""Token statistics of answers: usage, speculation and log-probabilities."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from specinfer.request import Delta, Logprob, Logprobs, PrefixMiss, SpeculationFigures
from specinfer.tokenizer import Tokenizer

_NEVER: Final = -9999.0  # JSON has no -inf


@dataclass(slots=True)
class Tally:
    """Counts the completions of one request, delta by delta."""

    prompt_tokens: int  # sum over the prompts
    completion_tokens: int = 0
    n: int = 1  # completions of each prompt
    reasoning_tokens: int = 0
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)
    steps: list[tuple[int, int]] = field(default_factory=list)  # drafted and accepted tokens, step by step
    miss: PrefixMiss | None = None  # the last prompt's that was not wholly found
    _cached: dict[int, int] = field(default_factory=dict)  # by prompt

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens, summed over the prompts."""
        return sum(self._cached.values())

    def add(self, delta: Delta, number: int = 0) -> None:
        """Add a delta of completion `number`."""
        self.completion_tokens += len(delta.token_ids)
        prompt, completion = divmod(number, self.n)
        if completion == 0:
            self.miss = delta.miss or self.miss
            self._cached[prompt] = max(self._cached.get(prompt, 0), delta.cached_tokens)
        if delta.figures is not None:
            self.figures.add(delta.figures)
        self.steps.extend(delta.steps)

    def report(self, *, steps: bool) -> dict[str, Any]:
        """Return usage and metrics; `steps` adds counts for each step, which may be thousands."""
        metrics = self.metrics()
        if steps:
            drafted, accepted = zip(*self.steps, strict=True) if self.steps else ((), ())
            per_step = {"per_step_accepted": list(accepted), "per_step_drafted": list(drafted)}
            metrics["speculative_decoding"] |= per_step
        return {"usage": self.usage(), "metrics": metrics}

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        credited, tried = self.figures.accepted_by, self.figures.proposed_by
        accepted = credited.get("prediction", 0)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": tried.get("prediction", 0) - accepted,
            },
        }

    def metrics(self) -> dict[str, Any]:
        """Return vLLM's metrics, with counts of accepted and proposed tokens by speculator."""
        figures, drafted = self.figures, self.figures.drafted_tokens
        at_least = [figures.steps, *figures.accepted_per_depth, 0]
        # Not what another's prompt has there.
        miss = self.miss and {name: getattr(self.miss, name) for name in ("position", "reason", "sent")}
        found = {} if miss is None else {"prefix_miss": miss}
        return found | {
            "speculative_decoding": {
                "mean_acceptance_length": round(figures.tokens_per_step, 4),
                "draft_acceptance_rate": round(figures.accepted_tokens / drafted, 4) if drafted else None,
                "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
                "num_spec_steps": figures.steps,
                "num_accepted_draft_tokens": figures.accepted_tokens,
                "num_draft_tokens": drafted,
                "accepted_by": dict(figures.accepted_by),
                "proposed_by": dict(figures.proposed_by),
            }
        }


class _Reported(NamedTuple):
    """A token whose text has not been sent yet."""

    entry: dict[str, Any]
    text: str  # the characters that it completes
    begun: int  # bytes of the character that it begins
    start: int  # its place in the answer's text
    end: int


class ChatLogprobs:
    """The log-probabilities of one answer's tokens, and of the `top` likeliest alternatives of each.

    `bytes` are the token's part of the text, so those of all tokens together are the text: empty for special
    tokens, and for tokens that a stop string removes. A token is therefore reported when its text is sent.
    """

    def __init__(self, top: int, tokenizer: Tokenizer, visible: Iterable[int]) -> None:
        """`visible` are the special tokens that the engine's text shows; a message never has them."""
        self._top = top
        self._tokenizer = tokenizer
        self._visible = frozenset(visible)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: deque[_Reported] = deque()
        self._read = self._sent = 0  # characters of the tokens, and of the deltas

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Take the next delta; returns the entries of tokens whose text is sent with it, or has been."""
        self._sent += len(delta.text)
        for token, of_token in zip(delta.token_ids, delta.logprobs, strict=False):
            self._hold(token, of_token)
        found = []
        while self._held and (self._held[0].end <= self._sent or delta.finish_reason is not None):
            one = self._held.popleft()
            if one.end > self._sent:  # a stop string has removed its end
                removed = len(one.text[max(self._sent - one.start, 0) :].encode()) + one.begun
                raw = one.entry["bytes"]
                one.entry["bytes"] = raw[: max(len(raw) - removed, 0)]
            found.append(one.entry)
        return found

    def _hold(self, token: int, of_token: Logprobs) -> None:
        [chosen, *_] = of_token.items()
        entry = self._entry(*chosen)
        entry["top_logprobs"] = [self._entry(*one) for one in _likeliest(of_token, self._top)]
        shown = token in self._visible or not self._tokenizer.is_special(token)
        text = self._decoder.decode(self._tokenizer.bytes_of(token) if shown else b"")
        begun = len(self._decoder.getstate()[0])
        start, self._read = self._read, self._read + len(text)
        self._held.append(_Reported(entry, text, begun, start, self._read + bool(begun)))

    def _entry(self, token: int, one: Logprob) -> dict[str, Any]:
        found = list(self._tokenizer.token_bytes[token])
        return {"token": one.text, "logprob": finite(one.logprob), "bytes": found}


def reported_prompt(logprobs: Iterable[Logprobs | None], top: int) -> list[dict[str, Any] | None]:
    """Return a prompt's log-probabilities in vLLM's shape: token id -> values, None for the first token."""

    def values(of_token: Logprobs) -> dict[str, Any]:
        [chosen, *_] = of_token.items()
        return {
            str(token): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.text}
            for token, one in dict([chosen, *_likeliest(of_token, top)]).items()
        }

    return [None if of_token is None else values(of_token) for of_token in logprobs]


class CompletionLogprobs:
    """The log-probabilities of /v1/completions: parallel lists, with the text offset of each token.

    `behind` is the number of leading characters that decoding strips from the tokens' text.
    """

    def __init__(self, top: int, tokenizer: Tokenizer, behind: int = 0) -> None:
        self._top = top
        self._tokenizer = tokenizer
        self._offset = -behind

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> dict[str, Any]:
        """Return the lists for the next tokens; None for the first prompt token, which has no probability."""
        tokenizer, offsets = self._tokenizer, []
        for token in token_ids:
            offsets.append(max(self._offset, 0))
            # Count the UTF-8 characters that start in this token.
            self._offset += sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes[token])
        return {
            "tokens": [tokenizer.text_of(token) for token in token_ids],
            "token_logprobs": [
                None if one is None else finite(next(iter(one.values())).logprob) for one in logprobs
            ],
            "top_logprobs": [None if one is None else self._likeliest(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _likeliest(self, of_token: Logprobs) -> dict[str, float]:
        """Return the likeliest tokens by text; of tokens with equal text, the likelier one."""
        found: dict[str, float] = {}
        for _, one in _likeliest(of_token, self._top):
            found.setdefault(one.text, finite(one.logprob))
        return found


def _likeliest(of_token: Logprobs, top: int) -> list[tuple[int, Logprob]]:
    return sorted((one for one in of_token.items() if one[1].rank <= top), key=lambda one: one[1].rank)[:top]


def finite(logprob: float) -> float:
    """Return a finite log-probability, for JSON."""
    return max(logprob, _NEVER)
