"""What the engine is asked (Request) and what comes back (RequestOutput)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from os import PathLike
from typing import Any

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, tokenized, with everything that decides its text."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # params.seed, or the one drawn for this request
    prediction: tuple[int, ...] = ()  # params.prediction as token ids
    index: int = 0  # which of the prompt's n completions
    adapter: str | None = None  # the name of a low-rank adapter (LoRA) that the target has for it

    @property
    def scores_prompt(self) -> bool:
        """Whether it computes log-probabilities of the prompt; the first of n completions does so for all."""
        return self.params.prompt_logprobs is not None and self.index == 0


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The low-rank adapter (LoRA) of a request, as vLLM has it: a name, a number, and a PEFT folder.

    Without a path it is one that was named before. Raises RequestError for no name, or a number below 1.
    """

    lora_name: str
    lora_int_id: int  # that no other adapter has
    lora_path: str | PathLike[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name is {self.lora_name!r}; allowed: a name", "lora_request")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError(f"lora_int_id is {self.lora_int_id!r}; allowed: 1, 2, ...", "lora_request")


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end of text, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # its own parameters left no token to choose; `RequestOutput.error` says why


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely one token was at one place."""

    logprob: float  # natural logarithm; -inf where the law excludes it
    rank: int  # 1 for the most likely
    text: str  # the token alone, decoded


Logprobs = Mapping[int, Logprob]  # token id -> its figures, at one position; the chosen token's come first


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
    accepted_by: dict[str, int] = field(default_factory=dict)  # speculator -> accepted tokens it had proposed
    proposed_by: dict[str, int] = field(default_factory=dict)  # speculator -> tokens it proposed

    @property
    def tokens_per_step(self) -> float:
        """Accepted plus bonus tokens per step; the paper's verified tokens."""
        return self.output_tokens / self.steps if self.steps else 0.0

    @property
    def credit(self) -> dict[str, int]:
        """The former name of `accepted_by`."""
        return self.accepted_by

    @property
    def drafted(self) -> dict[str, int]:
        """The former name of `proposed_by`."""
        return self.proposed_by

    def copy(self) -> SpeculationFigures:
        """The figures as they are now."""
        figures = SpeculationFigures()
        figures.add(self)
        return figures

    def add(self, other: SpeculationFigures) -> None:
        """Add another request's figures to these, in place."""
        self.steps += other.steps
        self.output_tokens += other.output_tokens
        self.drafted_tokens += other.drafted_tokens
        self.accepted_tokens += other.accepted_tokens
        _add_lists(self.accepted_per_depth, other.accepted_per_depth)
        _add_lists(self.drafted_per_depth, other.drafted_per_depth)
        for name, count in other.accepted_by.items():
            self.accepted_by[name] = self.accepted_by.get(name, 0) + count
        for name, count in other.proposed_by.items():
            self.proposed_by[name] = self.proposed_by.get(name, 0) + count


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
class Delta:
    """What an answer has gained since its last delta."""

    id: str  # the request's
    text: str = ""
    token_ids: tuple[int, ...] = ()  # stop and end-of-text tokens included
    logprobs: tuple[Logprobs, ...] = ()  # of these tokens, where asked for
    trees: tuple[Mapping[str, Any], ...] = ()  # of these steps, where asked for: `TreeEvent.to_json`
    steps: tuple[tuple[int, int], ...] = ()  # of these steps, drafted and accepted tokens
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None  # the stop string that ended it
    error: str | None = None  # why it ended, where finish_reason is "error"
    parameter: str | None = None  # at fault, where the engine refused the request
    internal_error: bool = False  # the engine's or the model's, and not the request's own
    figures: SpeculationFigures | None = None  # of the whole answer, with its end
    prompt_logprobs: Sequence[Logprobs | None] | None = None  # with the first token, or without one
    cached_tokens: int = 0  # of the prompt
    begun: bool = False  # whether its first step begins

    @property
    def finished(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None

    @property
    def is_empty(self) -> bool:
        """Whether it adds nothing to the answer: it says that the request is admitted, or that it begins."""
        told = self.token_ids or self.text or self.trees or self.finish_reason or self.prompt_logprobs
        return not told

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """One or more deltas of an answer, in order, as one."""
        if len(deltas) == 1:
            return deltas[0]
        reports = [one.prompt_logprobs for one in deltas if one.prompt_logprobs is not None]
        return replace(
            deltas[-1],
            text="".join([one.text for one in deltas]),
            token_ids=tuple(chain.from_iterable([one.token_ids for one in deltas])),
            logprobs=tuple(chain.from_iterable([one.logprobs for one in deltas])),
            trees=tuple(chain.from_iterable([one.trees for one in deltas])),
            steps=tuple(chain.from_iterable([one.steps for one in deltas])),
            prompt_logprobs=reports[0] if reports else None,
            cached_tokens=max(one.cached_tokens for one in deltas),  # none behind a restart
            begun=any(one.begun for one in deltas),
        )


class Answer:
    """An answer as far as it went at some time: the first parts of lists that only grow, joined when read."""

    __slots__ = ("_end", "_ids", "_logprobs", "_num_pieces", "_pieces", "_start")

    def __init__(
        self,
        pieces: Sequence[str],
        ids: Sequence[int],
        start: int = 0,
        logprobs: Sequence[Logprobs] | None = None,
    ) -> None:
        """The text is that of all `pieces`, and the tokens those of `ids` from `start` on, as of now."""
        self._pieces = pieces
        self._num_pieces = len(pieces)
        self._ids = ids
        self._start = start
        self._end = len(ids)
        self._logprobs = logprobs

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self._pieces[: self._num_pieces])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of its tokens."""
        return tuple(self._ids[self._start : self._end])

    @property
    def logprobs(self) -> tuple[Logprobs, ...] | None:
        """Those of its tokens, if asked for."""
        return None if self._logprobs is None else tuple(self._logprobs[: self._end - self._start])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        return (self.text, self.token_ids, self.logprobs) == (other.text, other.token_ids, other.logprobs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Answer({self.text!r}, {self.token_ids})"


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request, so far or whole: a view, which joins a text when it is read."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    answer: Answer
    finish_reason: FinishReason | None  # None while the request runs
    seed: int
    figures: SpeculationFigures
    timing: Timing
    new_text: str = ""  # what the last step added to `text` (streams)
    index: int = 0  # which of the prompt's n completions
    # [prompt tokens], None first, if asked for; n completions have one object. Each item is made when read.
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    cached_tokens: int = 0  # prompt tokens whose KV an earlier request had left behind
    error: str | None = None  # why it ended, where finish_reason is "error"
    internal_error: bool = False  # it is the engine's, or the model's, and not the request's own
    stopped_by: str | None = None  # the stop string that ended it
    others: tuple[RequestOutput, ...] = ()  # the prompt's other completions, when n > 1

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's tokens, stop and end-of-text tokens included."""
        return self.answer.token_ids

    @property
    def logprobs(self) -> tuple[Logprobs, ...] | None:
        """[output tokens], if asked for."""
        return self.answer.logprobs

    @property
    def finished(self) -> bool:
        """Whether no more text will come."""
        return self.finish_reason is not None

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All n completions of the prompt, this one first."""
        return (self, *self.others)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Tokens of `params.prediction` that became text."""
        return self.figures.accepted_by.get("prediction", 0)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Tokens of `params.prediction` that were tried and did not."""
        return self.figures.proposed_by.get("prediction", 0) - self.accepted_prediction_tokens
