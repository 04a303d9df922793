"""POST /v1/completions: continuations of prompts."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, Final, TypeVar

from pydantic import Field

from specinfer.request import Delta, Logprobs
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api.answer import EndpointAnswer, Event, Prompts
from specinfer.serve.api.reports import CompletionLogprobs, reported_prompt
from specinfer.serve.api.service import Service
from specinfer.serve.fields.body import Ids, Items
from specinfer.serve.fields.sampling import MAX_LOGPROBS, Prediction, SamplingFields
from specinfer.serve.http.api_error import ApiError
from specinfer.serve.http.event_stream import event
from specinfer.version import VERSION

_Fields = TypeVar("_Fields", bound=SamplingFields)
_DEFAULT_TOKENS: Final = 16  # default max_tokens, as in OpenAI's API
_FINGERPRINT: Final = f"specinfer-{VERSION}"


class CompletionFields(SamplingFields):
    """The request body: one prompt or several, as text or token ids."""

    prompt: str | Ids | Items[str] | Items[Ids]
    max_tokens: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    prediction: str | Prediction | None = None
    add_special_tokens: bool | None = Field(
        None, description="Whether to add the model's begin-of-text token to a text."
    )
    suffix: str | None = Field(None, description="Text after the answer, for models that fill in the middle.")

    def prompts(self) -> list[str | Ids]:
        """Return the prompts as a list; raises ApiError if it is empty."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(
                "prompt is an empty list; give text, token ids, or a list of these", param="prompt"
            )
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]

    def check(self) -> None:
        """Raise ApiError for unsupported combinations of fields."""
        super().check()
        if self.echo and self.logprobs is not None and (self.n or 1) > 1:
            raise ApiError(
                f"n is {self.n} with echo and logprobs; allowed there: 1, because only the first choice has "
                "the log-probabilities of the prompt",
                param="n",
            )
        if self.suffix:
            if self.echo:
                raise ApiError(
                    "echo and suffix are given; remove echo, and add prompt and suffix yourself", param="echo"
                )
            if not all(isinstance(one, str) for one in self.prompts()):
                raise ApiError("suffix needs a text prompt; give text in place of token ids", param="prompt")


class ChoicesAnswer(EndpointAnswer[_Fields]):
    """The answers to one request as a list of choices; its events are pieces of them."""

    prefix: ClassVar[str]  # prefix of ids
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]  # type of stream objects

    def __init__(self, service: Service, fields: _Fields) -> None:
        super().__init__(service, fields)
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices: dict[int, Event] = {}  # so far, by number
        self._started: set[int] = set()  # numbers of choices
        self._usage_at_end = fields.stream_options is not None and bool(fields.stream_options.include_usage)

    def _keep(self, events: list[Event]) -> None:
        for piece in events:
            choice = self._choices.setdefault(piece["index"], piece)
            if choice is not piece:
                append(choice, piece)

    def _finish(self) -> dict[str, Any]:
        return self._object([self._choices[number] for number in sorted(self._choices)]) | self._report()

    def _written(self, events: list[Event]) -> str:
        """Write each piece as a chunk."""
        options, more = self._fields.stream_options, {}
        if self._usage_at_end:
            more = {"usage": self._tally.usage() if options and options.continuous_usage_stats else None}
        return "".join(event(self._object([piece], self.chunk_kind) | more) for piece in events)

    def _closing(self) -> str:
        return event(self._object([], self.chunk_kind) | self._report()) if self._usage_at_end else ""

    def _report(self) -> dict[str, Any]:
        return self._tally.report(steps=bool(self._fields.trace))

    def _reported_prompt(self, delta: Delta) -> dict[str, Any]:
        """Return the log-probabilities of a prompt as a field of its first choice.

        They are as long as the prompt, so this runs in a thread.
        """
        top = self._fields.prompt_logprobs
        if delta.prompt_logprobs is None or top is None:
            return {}
        return {"prompt_logprobs": reported_prompt(delta.prompt_logprobs, top) or None}

    def _object(self, choices: list[dict[str, Any]], kind: str = "") -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind or self.kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }


class Completions(ChoicesAnswer[CompletionFields]):
    """The answers to one request while they are generated."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, fields: CompletionFields) -> None:
        self._given = fields.prompts()
        service.check_count(fields.n, len(self._given))
        super().__init__(service, fields)
        self._prompts: list[tuple[int, ...]] = []
        self._logprobs: dict[int, CompletionLogprobs] = {}

    async def _prepare(self) -> Prompts:
        self._prompts = [await self._encode(one) for one in self._given]
        return self._prompts, [self._params(prompt) for prompt in self._prompts]

    async def _take(self, number: int, delta: Delta) -> list[Event]:
        if delta.prompt_logprobs is None:
            return [self._choice(number, delta)]
        return [await asyncio.to_thread(self._choice, number, delta)]  # it is as long as the prompt

    async def _encode(self, given: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(given, str):
            return tuple(given)
        if suffix := self._fields.suffix:
            return await self._service.encode_fill_in(given, suffix, "suffix")
        add_special = self._fields.add_special_tokens is not False
        return await self._service.encode(given, "prompt", add_special=add_special)

    def _params(self, prompt: tuple[int, ...]) -> SamplingParams:
        fields = self._fields
        room = self._service.room(prompt, "prompt")
        guess, ends = fields.prediction, fields.stop_token_ids
        # Numbers of top tokens to report at each prompt token.
        tops = [fields.prompt_logprobs, fields.logprobs if fields.echo else None]
        max_tokens = min(_DEFAULT_TOKENS, room) if fields.max_tokens is None else fields.max_tokens
        return fields.params(
            max_tokens=room if max_tokens == -1 else max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=max((top for top in tops if top is not None), default=None),
            prediction=guess.text if isinstance(guess, Prediction) else guess,
            stop_token_ids=self._service.fill_in_ends(ends) if fields.suffix else ends,
        )

    def _choice(self, number: int, delta: Delta) -> dict[str, Any]:
        fields, first = self._fields, number not in self._started
        self._started.add(number)
        choice: dict[str, Any] = {"index": number, "text": delta.text, "logprobs": None}
        tokens = delta.token_ids
        logprobs: Sequence[Logprobs | None] = delta.logprobs
        if fields.echo and first:
            prompt = self._prompts[number // self._n]
            choice["text"] = self._service.tokenizer.decode(prompt) + delta.text
            tokens, logprobs = (
                (*prompt, *tokens),
                (*(delta.prompt_logprobs or [None] * len(prompt)), *logprobs),
            )
        if fields.logprobs is not None:
            shape = self._logprobs.get(number)
            if shape is None:
                shape = self._logprobs[number] = self._shape(fields.logprobs, tokens)
            choice["logprobs"] = shape.add(tokens, logprobs)
        choice["finish_reason"] = None if delta.finish_reason is None else delta.finish_reason.value
        if fields.trace:
            choice["trees"] = list(delta.trees)
        return choice | self._reported_prompt(delta)

    def _shape(self, top: int, tokens: Sequence[int]) -> CompletionLogprobs:
        """Create the log-probabilities of a choice, which start with those of `tokens`."""
        tokenizer = self._service.tokenizer
        text = b"".join(tokenizer.token_bytes[token] for token in tokens) if self._fields.echo else b""
        cut = text.startswith(b" ") and tokenizer.token_bytes.strips_first_space
        return CompletionLogprobs(top, tokenizer, behind=int(cut))


def append(whole: dict[Any, Any], piece: dict[Any, Any]) -> None:
    """Append a later piece to an object, in place: texts and lists grow, and other values stay."""
    for name, value in piece.items():
        match whole.get(name), value:
            case list() as before, list():
                before.extend(value)
            case dict() as before, dict():
                append(before, value)
            case str() as before, str():
                whole[name] = before + value
            case None, _:
                whole[name] = value
