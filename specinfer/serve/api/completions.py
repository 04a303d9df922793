"""POST /v1/completions: continuations of prompts."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Final, Generic, TypeVar

from pydantic import Field

from specinfer.request import Delta, Logprobs
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api.reports import CompletionLogprobs, Tally, reported_prompt
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
            allowed = "text, token ids, or a list of these"
            raise ApiError(f"prompt is an empty list; give {allowed}", param="prompt")
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]

    def check(self) -> None:
        """Raise ApiError for unsupported combinations of fields."""
        super().check()
        if self.suffix:
            if self.echo:
                raise ApiError(
                    "echo and suffix are given; remove echo, and add prompt and suffix yourself", param="echo"
                )
            if not all(isinstance(one, str) for one in self.prompts()):
                raise ApiError("suffix needs a text prompt; give text in place of token ids", param="prompt")


class ChoicesAnswer(ABC, Generic[_Fields]):
    """The answers to one request as a list of choices, which streams send in pieces."""

    prefix: ClassVar[str]  # prefix of ids
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]  # type of stream objects

    def __init__(self, service: Service, fields: _Fields) -> None:
        self._service = service
        self._fields = fields
        self._n = fields.n or 1
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = service.check_model(fields.model)
        self._tally = Tally(0, n=self._n)

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """Return the whole answer as one object."""

    async def events(self) -> AsyncGenerator[str]:
        """Yield the answer as stream events."""
        options, started = self._fields.stream_options, set[int]()
        usage_at_end = options is not None and bool(options.include_usage)
        usage_in_chunks = options is not None and bool(options.continuous_usage_stats)
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if piece["index"] not in started:
                    started.add(piece["index"])
                    self._first(piece)
                so_far = self._tally.usage() if usage_in_chunks else None
                chunk = self._object([piece], self.chunk_kind)
                yield event(chunk | ({"usage": so_far} if usage_at_end else {}))
        if usage_at_end:
            yield event(self._object([], self.chunk_kind) | self._report())

    @abstractmethod
    def _pieces(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the choices of stream chunks, one for each delta."""

    def _first(self, piece: dict[str, Any]) -> None:
        """Add the fields of the first chunk of a choice, in place."""

    def _report(self) -> dict[str, Any]:
        return self._tally.report(steps=bool(self._fields.trace))

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
        fields.check()
        self._given = fields.prompts()
        service.check_count(fields.n, len(self._given))
        super().__init__(service, fields)
        self._prompts: list[tuple[int, ...]] = []
        self._logprobs: dict[int, CompletionLogprobs] = {}

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer as one object."""
        choices: dict[int, dict[str, Any]] = {}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                choice = choices.setdefault(piece["index"], piece)
                if choice is not piece:
                    _append(choice, piece)
        return self._object([choices[number] for number in sorted(choices)]) | self._report()

    async def _pieces(self) -> AsyncGenerator[dict[str, Any]]:
        fields, service = self._fields, self._service
        self._prompts = [await self._encode(one) for one in self._given]
        self._tally.prompt_tokens = sum(map(len, self._prompts))
        params = [self._params(prompt) for prompt in self._prompts]
        answers = service.answer(self._prompts, params, model=self._model, traced=bool(fields.trace))
        started: set[int] = set()
        async with aclosing(answers):
            async for number, delta in answers:
                self._tally.add(delta, number)
                first = number not in started
                if delta.prompt_logprobs is None:
                    yield self._choice(number, delta, first=first)
                else:  # in a thread, because it is as long as the prompt
                    yield await asyncio.to_thread(self._choice, number, delta, first=first)
                started.add(number)

    async def _encode(self, given: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(given, str):
            return tuple(given)
        if suffix := self._fields.suffix:
            return await self._service.encode_fill_in(given, suffix, "suffix")
        add_special = self._fields.add_special_tokens is not False
        return await self._service.encode(given, "prompt", add_special=add_special)

    @property
    def _scored(self) -> int | None:
        """Number of top tokens to report at each prompt token; None for no log-probabilities."""
        fields = self._fields
        tops = [fields.prompt_logprobs, fields.logprobs if fields.echo else None]
        return max((top for top in tops if top is not None), default=None)

    def _params(self, prompt: tuple[int, ...]) -> SamplingParams:
        fields = self._fields
        room = self._service.room(prompt, "prompt")
        guess = fields.prediction
        max_tokens = min(_DEFAULT_TOKENS, room) if fields.max_tokens is None else fields.max_tokens
        return fields.params(
            max_tokens=room if max_tokens == -1 else max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=self._scored,
            prediction=guess.text if isinstance(guess, Prediction) else guess,
            stop_token_ids=self._service.fill_in_ends(fields.stop_token_ids) if fields.suffix else None,
        )

    def _choice(self, number: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        fields = self._fields
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
        if delta.prompt_logprobs is not None and fields.prompt_logprobs is not None:
            reports = delta.prompt_logprobs if number % self._n == 0 else ()  # once a prompt
            choice["prompt_logprobs"] = reported_prompt(reports, fields.prompt_logprobs) or None
        return choice

    def _shape(self, top: int, tokens: Sequence[int]) -> CompletionLogprobs:
        """Create the log-probabilities of a choice, which start with those of `tokens`."""
        tokenizer = self._service.tokenizer
        text = b"".join(tokenizer.token_bytes[token] for token in tokens) if self._fields.echo else b""
        cut = text.startswith(b" ") and tokenizer.token_bytes.strips_first_space
        return CompletionLogprobs(top, tokenizer, behind=int(cut))


def _append(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    """Append a later piece to a choice, in place."""
    choice["text"] += piece["text"]
    choice["finish_reason"] = piece["finish_reason"]
    if choice["logprobs"] is not None:
        for name, values in piece["logprobs"].items():
            choice["logprobs"][name].extend(values)
    if "trees" in choice:
        choice["trees"].extend(piece["trees"])
    if "prompt_logprobs" in piece:
        choice["prompt_logprobs"] = piece["prompt_logprobs"]
