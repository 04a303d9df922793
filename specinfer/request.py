"""Request, the engine's input, and RequestOutput, its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, zip_longest
from os import PathLike
from typing import Any, Literal, Self

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One tokenized prompt with everything that determines its text."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # params.seed, or one drawn for this request
    prediction: tuple[int, ...] = ()  # params.prediction as token ids
    index: int = 0  # number of the completion among the prompt's n
    adapter: str | None = None  # name of the request's LoRA adapter

    @property
    def scores_prompt(self) -> bool:
        """True if this request computes the prompt's log-probabilities: the first of n completions does."""
        return self.params.prompt_logprobs is not None and self.index == 0


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter of a request, with the fields of vLLM's class of this name.

    Raises RequestError for an empty name or a number below 1.
    """

    lora_name: str
    lora_int_id: int  # unique among adapters, 1 or more
    lora_path: str | PathLike[str] = ""  # folder saved by PEFT; "": an adapter that was named before

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name is {self.lora_name!r}; allowed: a name", "lora_request")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError(f"lora_int_id is {self.lora_int_id!r}; allowed: 1, 2, ...", "lora_request")


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Why a prompt's tokens from `position` on were not read from the KV cache of earlier requests."""

    position: int
    # cold: no kept text begins like it; ended: the kept text ends there; differs: it goes on otherwise;
    # evicted: it was given away; states: it is kept without a recurrent state there
    reason: Literal["cold", "ended", "differs", "evicted", "states"]
    kept_ids: tuple[int, ...] = ()  # tokens of the kept text from there on, if it differs
    sent_ids: tuple[int, ...] = ()  # the prompt's
    kept: str = ""  # the same as text, in outputs
    sent: str = ""

    def read(self, text_of: Callable[[int], str]) -> Self:
        """Return it with texts, of tokens that `text_of` decodes."""
        kept, sent = ("".join(map(text_of, ids)) for ids in (self.kept_ids, self.sent_ids))
        return replace(self, kept=kept, sent=sent)


class FinishReason(StrEnum):
    """Reason why a request ended."""

    STOP = "stop"  # end of text, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller cancelled it
    ERROR = "error"  # no token can be chosen; `RequestOutput.error` has the message


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float  # natural logarithm; -inf for an excluded token
    rank: int  # 1 for the most likely token
    text: str  # the decoded token


Logprobs = Mapping[int, Logprob]  # token id -> its log-probability at one position; the chosen token first


@dataclass(slots=True)
class SpeculationFigures:
    """Counters of speculation for one request, or for a run as their sum.

    A step is one pass of the target over a tree after the prefill. The prefill and the first token, which it
    yields, are not counted. Without speculation there is one token per step.
    """

    steps: int = 0
    output_tokens: int = 0  # tokens committed by these steps: accepted tokens and one bonus token per step
    drafted_tokens: int = 0  # verified nodes without the roots
    accepted_tokens: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)  # [depth - 1]: steps accepting >= depth
    drafted_per_depth: list[int] = field(default_factory=list)  # [depth - 1]: steps with a node there
    accepted_by: dict[str, int] = field(default_factory=dict)  # speculator -> accepted tokens it had proposed
    proposed_by: dict[str, int] = field(default_factory=dict)  # speculator -> tokens it proposed

    @property
    def tokens_per_step(self) -> float:
        """Accepted and bonus tokens per step; 0 without steps. The paper calls them verified tokens."""
        return self.output_tokens / self.steps if self.steps else 0.0

    def copy(self) -> Self:
        """Return a copy that later steps do not change."""
        figures = type(self)()
        figures.add(self)
        return figures

    def add(self, other: Self) -> None:
        """Add another request's counters to these, in place."""
        self.steps += other.steps
        self.output_tokens += other.output_tokens
        self.drafted_tokens += other.drafted_tokens
        self.accepted_tokens += other.accepted_tokens
        for depths, more in (
            (self.accepted_per_depth, other.accepted_per_depth),
            (self.drafted_per_depth, other.drafted_per_depth),
        ):
            depths[:] = map(sum, zip_longest(depths, more, fillvalue=0))
        for counts, others in ((self.accepted_by, other.accepted_by), (self.proposed_by, other.proposed_by)):
            for name, count in others.items():
                counts[name] = counts.get(name, 0) + count


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request, in seconds of a monotonic clock."""

    arrived: float
    first_token: float | None  # None before it
    finished: float | None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived


@dataclass(frozen=True, slots=True)
class Delta:
    """New part of an answer since its last delta."""

    id: str  # the request's
    text: str = ""
    token_ids: tuple[int, ...] = ()  # stop and end-of-text tokens included
    logprobs: tuple[Logprobs, ...] = ()  # one per token id, if requested
    trees: tuple[Mapping[str, Any], ...] = ()  # one `TreeEvent.to_json` per step, if requested
    steps: tuple[tuple[int, int], ...] = ()  # drafted and accepted tokens of each step
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None  # the stop string that ended the answer
    error: str | None = None  # message, if finish_reason is "error"
    parameter: str | None = None  # the invalid parameter, if the engine refused the request
    internal_error: bool = False  # True if the engine or the model failed, not the request
    figures: SpeculationFigures | None = None  # figures of the whole answer, in its last delta
    prompt_logprobs: Sequence[Logprobs | None] | None = None  # in the delta of the prefill, if requested
    cached_tokens: int = 0  # prompt tokens read from the KV cache
    miss: PrefixMiss | None = None  # why not the rest, in the last delta
    started: bool = False  # True in the delta that the request's first step sends before it computes

    @property
    def finished(self) -> bool:
        """True if this is the last delta."""
        return self.finish_reason is not None

    @property
    def is_empty(self) -> bool:
        """True if it adds nothing to the answer, but reports that the request is admitted or starts."""
        return not (self.token_ids or self.text or self.trees or self.finish_reason or self.prompt_logprobs)

    @classmethod
    def joined(cls, deltas: Sequence[Self]) -> Self:
        """Join one or more consecutive deltas of an answer."""
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
            cached_tokens=max(one.cached_tokens for one in deltas),  # 0 after a restart
            started=any(one.started for one in deltas),
        )


class Answer:
    """View of an answer at one time: prefixes of lists that only grow, joined when they are read."""

    __slots__ = ("_end", "_ids", "_logprobs", "_num_pieces", "_pieces", "_start")

    def __init__(
        self,
        pieces: Sequence[str],
        ids: Sequence[int],
        start: int = 0,
        logprobs: Sequence[Logprobs] | None = None,
    ) -> None:
        """View all present `pieces` of text, and the present token `ids` from `start` on."""
        self._pieces = pieces
        self._num_pieces = len(pieces)
        self._ids = ids
        self._start = start
        self._end = len(ids)
        self._logprobs = logprobs

    @property
    def text(self) -> str:
        """The text."""
        return "".join(self._pieces[: self._num_pieces])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids."""
        return tuple(self._ids[self._start : self._end])

    @property
    def logprobs(self) -> tuple[Logprobs, ...] | None:
        """Log-probabilities, one per token id; None unless requested."""
        return None if self._logprobs is None else tuple(self._logprobs[: self._end - self._start])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        return (self.text, self.token_ids, self.logprobs) == (other.text, other.token_ids, other.logprobs)

    def __repr__(self) -> str:
        return f"Answer({self.text!r}, {self.token_ids})"


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of one request, so far or complete; `text` is joined when it is read."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    answer: Answer
    finish_reason: FinishReason | None  # None while the request runs
    seed: int
    figures: SpeculationFigures
    timing: Timing
    new_text: str = ""  # text that the last step added (streams)
    index: int = 0  # number of the completion among the prompt's n
    # [prompt tokens], the first is None; None unless requested. n completions share one object, whose items
    # are made when read.
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    cached_tokens: int = 0  # prompt tokens read from the KV cache of earlier requests
    miss: PrefixMiss | None = None  # why not the rest; None: only the last token was computed, or not known
    error: str | None = None  # message, if finish_reason is "error"
    internal_error: bool = False  # True if the engine or the model failed, not the request
    stopped_by: str | None = None  # the stop string that ended the text
    others: tuple[Self, ...] = ()  # the prompt's other completions, if n > 1

    @property
    def text(self) -> str:
        """The output text."""
        return self.answer.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output tokens, including stop and end-of-text tokens."""
        return self.answer.token_ids

    @property
    def logprobs(self) -> tuple[Logprobs, ...] | None:
        """Log-probabilities, [output tokens]; None unless requested."""
        return self.answer.logprobs

    @property
    def finished(self) -> bool:
        """True if the output is complete."""
        return self.finish_reason is not None

    @property
    def outputs(self) -> tuple[Self, ...]:
        """All n completions of the prompt, this one first."""
        return (self, *self.others)

    @property
    def accepted_prediction_tokens(self) -> int:
        """Number of tokens of `params.prediction` that were accepted."""
        return self.figures.accepted_by.get("prediction", 0)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Number of tokens of `params.prediction` that were verified and rejected."""
        return self.figures.proposed_by.get("prediction", 0) - self.accepted_prediction_tokens
