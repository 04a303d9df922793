"""Service: turns the prompts of an endpoint into works for the engines, and returns the deltas.

It holds the code that all endpoints share: limits of the queue and of lengths, seeds, ids of works, and
metrics. Endpoints read the fields of requests and write the shape of answers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from specinfer.errors import RequestError, naming
from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SamplingParams
from specinfer.serve.backend.replica_backend import ReplicaBackend
from specinfer.serve.backend.work import BackendError, EngineInfo, Observe, UnavailableError, Work
from specinfer.serve.config import ServeConfig
from specinfer.serve.dialect.dialect import Dialect
from specinfer.serve.fields.body import FieldPolicy
from specinfer.serve.http.api_error import CALLER, ApiError
from specinfer.serve.observe.metrics import Metrics
from specinfer.speculate.lookups.prediction import relevant_tokens
from specinfer.tokenizer import ChatEncoder, Tokenizer

_MAX_CHARACTERS: Final = 64  # a token, on average; a longer prompt cannot fit and is not tokenized
MAX_FIGURES: Final = 1 << 18  # log-probabilities of prompts; each is an object here and 70 bytes of JSON
_Made = TypeVar("_Made")


class Service:
    """Submits prompts to the backend and returns its deltas. Belongs to one event loop."""

    def __init__(
        self,
        config: ServeConfig,
        backend: ReplicaBackend,
        tokenizer: Tokenizer,
        facts: EngineInfo,
        dialect: Dialect,
        *,
        models: Sequence[str],
        adapters: Sequence[str] = (),
        batch: int,
        metrics: Metrics,
        observers: Sequence[Observe] = (),
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.tokenizer = tokenizer
        self.chat = ChatEncoder(tokenizer)
        self.facts = facts
        self.dialect = dialect
        self.models = tuple(models)  # names of the model, the default first
        self.adapters = tuple(adapters)  # names of adapters, for the `model` field
        self.metrics = metrics
        self.field_policy = FieldPolicy(config.unknown_fields, config.max_body)
        self.sampling = dict(sampling or {})  # defaults of sampling fields, by name
        self._observers = (metrics.observe, *observers)
        self._max_completions = batch + config.max_waiting  # maximum of completions at a time
        self.busy = 0  # completions in progress or waiting
        self.draining = False

    def check_count(self, n: int | None, prompts: int = 1) -> None:
        """Raise ApiError for more completions than one request may have, before any of them takes memory."""
        count, limit = max(n or 1, 1), self.config.max_n
        for param, given in (("n", count), ("prompt", prompts)):
            if given > limit:
                what = "n is" if param == "n" else "the prompts are"
                raise ApiError(
                    f"{what} {given}; allowed: at most {limit} here; send the rest in another request",
                    param=param,
                )
        if count * prompts > self._max_completions:
            raise ApiError(
                f"{prompts} prompts with n {count} are {count * prompts} completions; allowed: at most "
                f"{self._max_completions} here; send the rest in another request",
                param="n",
            )

    async def in_thread(self, param: str, make: Callable[..., _Made], *given: Any) -> _Made:
        """Call `make` in a thread and return its result; its RequestErrors become ApiErrors.

        `param` is the field for errors that name none.
        """
        try:
            with naming(param):
                return await asyncio.to_thread(make, *given)
        except RequestError as error:
            raise ApiError.of(error) from None

    async def encode(self, text: str, param: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt; raises ApiError."""
        if not text:
            raise ApiError(f"{param} is empty; give at least one token of text", param=param)
        self.check_sizes({param: len(text)})
        return await self.in_thread(
            param, lambda: tuple(self.tokenizer.encode(text, add_special=add_special))
        )

    async def encode_fill_in(
        self, prefix: str, suffix: str, param: str, *, files: Sequence[tuple[str, str]] = (), answer: int = 0
    ) -> tuple[int, ...]:
        """Return the token ids of a fill-in-the-middle prompt; raises ApiError.

        `files` are names and texts of other files; the first ones are dropped if the prompt leaves fewer than
        `answer` tokens for the answer.
        """
        self.check_sizes({param: len(prefix) + len(suffix)})
        limit = self.facts.max_length - 1 - answer
        fitting, characters = 0, limit * _MAX_CHARACTERS  # more cannot fit, and is not tokenized
        for _, text in reversed(files):
            characters -= len(text)
            if characters < 0:
                break
            fitting += 1
        files = files[len(files) - fitting :]
        return await self.in_thread(
            param, lambda: tuple(self.tokenizer.encode_fill_in(prefix, suffix, files, limit))
        )

    def fill_in_ends(self, others: Sequence[int] | None) -> list[int]:
        """Return `stop_token_ids` of a fill-in-the-middle request: the request's and the vocabulary's."""
        tokens = self.tokenizer.fill_in
        return [*(others or ()), *(() if tokens is None else tokens.ends)]

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise ApiError if a prompt cannot fit; `sizes` holds the characters of each field."""
        largest = max(sizes, key=sizes.__getitem__)
        self._check_length(sum(sizes.values()) // _MAX_CHARACTERS, largest)

    def room(self, prompt: Sequence[int], param: str) -> int:
        """Return the maximum of tokens of an answer to this prompt; raises ApiError if it is 0."""
        self._check_length(len(prompt), param)
        return self.facts.max_length - len(prompt)

    async def answer(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        *,
        model: str | None = None,
        traced: bool = False,
    ) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield the deltas of n completions of each prompt, each with its number: prompt * n + completion.

        `model` is the name of the model or of an adapter. An empty delta is yielded when the engine has
        accepted all works; with `max_wait`, when one has started. A stream may start then. If one of several
        completions fails in the engine, it ends with finish reason "error", and the others continue.

        Raises ApiError. Status 429: the queue is full. 400: the engine refuses a work, the parameters allow
        no token, or there are too many prompt log-probabilities. 500: the engine failed or ended. 503: no
        engine is available now.
        """
        adapter = model if model in self.adapters else None
        works: dict[str, int] = {}
        all_works: list[Work] = []
        for prompt, own in zip(prompts, params, strict=True):
            if isinstance(own.prediction, str):
                own = replace(own, prediction=await self._prediction(own.prediction, own, len(prompt)))
            for index in range(own.n):
                work = Work(uuid.uuid4().hex, prompt, own, index, traced=traced, adapter=adapter)
                works[work.id] = len(all_works)
                all_works.append(work)
        self._check_load(all_works)
        started = time.monotonic()
        observed = [[observe(work, started) for observe in self._observers] for work in all_works]
        unadmitted, failed, announced = set(works), 0, False
        may_start = not self.config.max_wait  # a started stream can no longer be refused
        self.busy += len(all_works)
        try:
            async with aclosing(self.backend.generate(all_works, CALLER.get().session)) as deltas:
                async for delta in deltas:
                    number = works[delta.id]
                    now = time.monotonic()
                    for one in observed[number]:
                        one.delta(delta, now)
                    if delta.finish_reason is FinishReason.ERROR:
                        failed += 1
                        if not delta.internal_error or failed == len(all_works):
                            status = 500 if delta.internal_error else 400
                            raise ApiError(
                                delta.error or "the completion failed in the engine",
                                param=delta.parameter,
                                status=status,
                            )
                    unadmitted.discard(delta.id)
                    may_start = may_start or delta.started or not delta.is_empty
                    if not delta.is_empty:
                        yield number, delta
                    elif may_start and not unadmitted and not announced:
                        announced = True
                        yield number, delta
        except UnavailableError as error:
            raise ApiError(str(error), status=503, headers={"Retry-After": "5"}) from None
        except BackendError as error:
            # Another try would end the engine again, and delay every request.
            once = {"x-should-retry": "false"}
            raise ApiError(str(error), status=500, code="engine_died", headers=once) from None
        finally:
            self.busy -= len(all_works)
            now = time.monotonic()
            for one in itertools.chain(*observed):
                one.end(now)

    async def _prediction(self, text: str, params: SamplingParams, prompt_tokens: int) -> tuple[int, ...]:
        """Tokenize a prediction, once for all n, up to the length that can be used."""
        room = min(params.max_tokens, self.facts.max_context - prompt_tokens)
        encode = partial(self.tokenizer.encode, add_special=False)
        return await self.in_thread("prediction", relevant_tokens, text, room, encode)

    def _check_load(self, works: Sequence[Work]) -> None:
        """Raise ApiError if works have too many log-probabilities to send, or cannot be taken now."""
        tops = ((work, work.params.prompt_logprobs) for work in works if work.index == 0)
        figures = sum(len(work.prompt_token_ids) * (1 + top) for work, top in tops if top is not None)
        if figures > MAX_FIGURES:
            raise ApiError(
                f"the prompts have {figures} log-probabilities; allowed: at most {MAX_FIGURES}; "
                "shorten the prompts, or lower prompt_logprobs",
                param="prompt_logprobs",
            )
        if self.draining:
            raise ApiError("the server is shutting down", status=503, headers={"Retry-After": "5"})
        if self.busy + len(works) > self._max_completions:
            waiting = f"{self.busy} answers are in progress or waiting, and this request has {len(works)}"
            raise ApiError(
                f"{waiting}; allowed: {self._max_completions} in all; try again soon",
                status=429,
                headers={"Retry-After": "1"},
            )

    def _check_length(self, tokens: int, param: str) -> None:
        if tokens > (limit := self.facts.max_length - 1):
            raise ApiError(
                f"the prompt has {tokens} tokens or more; allowed: at most {limit}; shorten it",
                param=param,
                code="context_length_exceeded",
            )
