"""What a caller asks (SamplingParams, Request) and what comes back (RequestOutput)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specinfer.errors import RequestError

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: the law is a point mass in float32 anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the target's law, and when to stop.

    Raises RequestError on a value outside its range. `temperature=0` is greedy. The filters apply in
    the order temperature, top_k, top_p, min_p, each to the law the one before it left, as in vLLM.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    min_p: float = 0.0  # keep tokens with p >= min_p * max p
    seed: int | None = None  # None: drawn per request, reported in the output
    max_tokens: int = 128
    min_tokens: int = 0  # no end of text, stop token or stop string before this many tokens
    stop: tuple[str, ...] = ()  # cut before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # end after one of these; the token is kept out of the text
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _items("stop", self.stop, "non-empty strings"))
        ids = _items("stop_token_ids", self.stop_token_ids, "token ids >= 0")
        object.__setattr__(self, "stop_token_ids", ids)
        _number("temperature", self.temperature, lambda t: t >= 0, "a finite number >= 0")
        _number("top_p", self.top_p, lambda p: 0 < p <= 1, "a number in (0, 1]; 1 keeps every token")
        _number("min_p", self.min_p, lambda p: 0 <= p <= 1, "a number in [0, 1]; 0 keeps every token")
        _integer("top_k", self.top_k, lambda k: k >= 0, "an integer >= 0; 0 keeps every token")
        _integer("max_tokens", self.max_tokens, lambda n: n > 0, "an integer >= 1")
        _integer("min_tokens", self.min_tokens, lambda n: n >= 0, "an integer >= 0")
        if self.seed is not None:
            _integer("seed", self.seed, lambda s: 0 <= s < 1 << 63, "an integer in [0, 2**63)")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; allowed: True or False")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}); lower it"
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError(f"stop is {list(self.stop)!r}; allowed: non-empty strings")
        if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in self.stop_token_ids):
            raise RequestError(f"stop_token_ids is {list(self.stop_token_ids)!r}; allowed: token ids >= 0")

    @property
    def greedy(self) -> bool:
        """Whether the target's choice is its argmax."""
        return self.temperature < GREEDY_BELOW


def _number(name: str, value: object, ok: Callable[[float], bool], allowed: str) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not ok(value)
    ):
        raise RequestError(f"{name} is {value!r}; allowed: {allowed}")


def _integer(name: str, value: object, ok: Callable[[int], bool], allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not ok(value):
        raise RequestError(f"{name} is {value!r}; allowed: {allowed}")


def _items(name: str, values: object, allowed: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}; allowed: {allowed}")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, tokenized, with everything that decides its text."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # params.seed, or the one drawn for this request


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end of text, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller went away


@dataclass(slots=True)
class SpeculationFigures:
    """What speculation did for one request, or for a run when added up.

    A step here is one pass of the target over a tree after the prefill: neither the prefill nor the first
    token, which comes with it, is counted. Without speculation tokens per step is 1.
    """

    steps: int = 0
    output_tokens: int = 0  # tokens committed by those steps: accepted + one bonus token each
    drafted_tokens: int = 0  # nodes verified, roots not counted
    accepted_tokens: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)  # [depth - 1]: steps accepting >= depth
    drafted_per_depth: list[int] = field(default_factory=list)  # [depth - 1]: steps with a node there
    credit: dict[str, int] = field(default_factory=dict)  # speculator -> accepted tokens it had proposed
    drafted: dict[str, int] = field(default_factory=dict)  # speculator -> tokens it proposed

    @property
    def tokens_per_step(self) -> float:
        """Accepted plus bonus tokens per step; the paper's verified tokens."""
        return self.output_tokens / self.steps if self.steps else 0.0

    def add(self, other: SpeculationFigures) -> None:
        """Add another request's figures to these, in place."""
        self.steps += other.steps
        self.output_tokens += other.output_tokens
        self.drafted_tokens += other.drafted_tokens
        self.accepted_tokens += other.accepted_tokens
        _add_lists(self.accepted_per_depth, other.accepted_per_depth)
        _add_lists(self.drafted_per_depth, other.drafted_per_depth)
        for name, count in other.credit.items():
            self.credit[name] = self.credit.get(name, 0) + count
        for name, count in other.drafted.items():
            self.drafted[name] = self.drafted.get(name, 0) + count


def _add_lists(into: list[int], other: list[int]) -> None:
    into.extend([0] * (len(other) - len(into)))
    for i, count in enumerate(other):
        into[i] += count


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened to one request, in seconds of a monotonic clock."""

    arrived: float
    first_token: float | None
    finished: float | None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request, so far or whole."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]  # stop and end-of-text tokens included
    finish_reason: FinishReason | None  # None while the request runs
    seed: int
    figures: SpeculationFigures
    timing: Timing
    new_text: str = ""  # what the last step added to `text` (streams)

    @property
    def finished(self) -> bool:
        """Whether no more text will come."""
        return self.finish_reason is not None
