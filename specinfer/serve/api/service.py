"""Service: from what an endpoint asks to the deltas of its answers, over an engine process of its own.

What all endpoints share is here: whether there is room, how long an answer may be, seeds, ids of works, the
figures of metrics. Endpoints know the fields of their requests and the shape of their answers.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from pydantic import BaseModel

from specinfer.errors import RequestError, naming
from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SamplingParams
from specinfer.serve.api.reports import SharedPrompts
from specinfer.serve.backend.replica_backend import ReplicaBackend
from specinfer.serve.backend.work import BackendError, EngineInfo, Observe, UnavailableError, Work
from specinfer.serve.config import ServeConfig
from specinfer.serve.dialect.dialect import Dialect
from specinfer.serve.fields.policy import FieldPolicy
from specinfer.serve.http.api_error import ADMITTED, CALLER, ApiError, cut
from specinfer.serve.observe.metrics import Metrics
from specinfer.speculate.lookups.alignment import within_reach
from specinfer.tokenizer import ChatEncoder, Tokenizer

_AT_ONCE: Final = 20_000  # characters; longer texts are tokenized in a thread, and others answered meanwhile
_MOST_CHARACTERS: Final = 64  # of a token, on average: a longer prompt cannot fit, and is not tokenized
MOST_FIGURES: Final = 1 << 18  # of prompts' log-probabilities: each is an object here, and 70 bytes of JSON
_Made = TypeVar("_Made")
_Fields = TypeVar("_Fields", bound=BaseModel)


class Service:
    """Makes works of prompts and hands on what the backend answers. Belongs to one event loop."""

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
        self.models = tuple(models)  # the names requests may use, the own one first
        self.adapters = tuple(adapters)  # the names of adapters, which requests name in place of the model
        self.metrics = metrics
        self.field_policy = FieldPolicy(config.unknown_fields, sampling)
        self.sampling = dict(sampling or {})  # of requests that do not say, by name
        self._observers = (metrics.observe, *observers)
        self._most = batch + config.max_waiting  # completions at once
        self._busy = 0
        self.draining = False

    def check_model(self, name: str | None) -> str:
        """The model's name as the answer says it: as it was asked for, or the usual one where it was not.

        Raises ApiError for another model.
        """
        if name and name not in self.models and name not in self.adapters:
            known = ", ".join((*self.models, *self.adapters))
            raise ApiError(
                f"the model {cut(name)!r} is not served here; allowed: {known}",
                param="model",
                status=404,
                code="model_not_found",
            )
        return name or self.models[0]

    def with_defaults(self, fields: _Fields) -> _Fields:
        """A request's fields, with the model's own sampling parameters where they say nothing."""
        if not getattr(fields, "takes_defaults", True):
            return fields
        missing = {
            name: value for name, value in self.sampling.items() if getattr(fields, name, value) is None
        }
        return fields.model_copy(update=missing) if missing else fields

    def check_count(self, n: int | None, prompts: int = 1) -> None:
        """Raise ApiError where more completions are asked for than one request may ever have.

        Before anything is made of each of them: a number costs its sender nothing.
        """
        count, most = max(n or 1, 1), self.config.max_n
        for param, given in (("n", count), ("prompt", prompts)):
            if given > most:
                what = "n is" if param == "n" else "the prompts are"
                raise ApiError(
                    f"{what} {given}; allowed: at most {most} here; ask again for the rest", param=param
                )
        if count * prompts > self._most:
            raise ApiError(
                f"{prompts} prompts with n {count} are {count * prompts} completions; allowed: at most "
                f"{self._most} here; ask again for the rest",
                param="n",
            )

    async def in_thread(self, param: str, make: Callable[[], _Made]) -> _Made:
        """What `make` makes in a thread, while others are answered; its RequestErrors become ApiErrors.

        `param` is the field at fault where an error names none.
        """
        try:
            with naming(param):
                return await asyncio.to_thread(make)
        except RequestError as error:
            raise ApiError.of(error) from None

    async def encode(self, text: str, param: str, *, add_special: bool = True) -> tuple[int, ...]:
        """A prompt's token ids."""
        if not text:
            raise ApiError(f"{param} is empty; give at least one token of text", param=param)
        self.check_sizes({param: len(text)})

        def make() -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(text, add_special=add_special))

        if len(text) >= _AT_ONCE:
            return await self.in_thread(param, make)
        try:
            with naming(param):
                return make()
        except RequestError as error:
            raise ApiError.of(error) from None

    async def encode_fill_in(
        self, prefix: str, suffix: str, param: str, *, files: Sequence[tuple[str, str]] = (), answer: int = 0
    ) -> tuple[int, ...]:
        """The token ids of a fill-in-the-middle prompt.

        `files` are names and texts of other files; the first ones are left out if an answer of `answer`
        tokens needs their room.
        """
        self.check_sizes({param: len(prefix) + len(suffix)})
        most = self._longest_prompt - answer
        fitting, characters = 0, most * _MOST_CHARACTERS  # more cannot fit, and is not tokenized
        for _, text in reversed(files):
            characters -= len(text)
            if characters < 0:
                break
            fitting += 1
        files = files[len(files) - fitting :]
        return await self.in_thread(
            param, lambda: tuple(self.tokenizer.encode_fill_in(prefix, suffix, files, most))
        )

    def fill_in_ends(self, others: Sequence[int] | None) -> list[int]:
        """`stop_token_ids` of a fill-in-the-middle request: the vocabulary's, and the request's own."""
        tokens = self.tokenizer.fill_in
        return [*(others or ()), *(() if tokens is None else tokens.ends)]

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise ApiError where a prompt made of parts of so many characters, by their fields, cannot fit."""
        largest = max(sizes, key=lambda field: sizes[field])
        self._check_length(sum(sizes.values()) // _MOST_CHARACTERS, largest)

    def room(self, prompt: Sequence[int], param: str) -> int:
        """How many tokens an answer to this prompt may have; raises ApiError where there is no room."""
        self._check_length(len(prompt), param)
        return self.facts.longest - len(prompt)

    async def answer(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        *,
        model: str | None = None,
        traced: bool = False,
        announced: bool = False,
    ) -> AsyncGenerator[tuple[int, Delta]]:
        """The deltas of n completions of each prompt, each with its number: prompt * n + completion.

        `model` is the name of the model, or of an adapter that it has for them.

        Sets ADMITTED when the engine has taken all of them; with `max_wait`, when one has begun. Where that
        is to be `announced`, a delta that is empty comes then. One of several that fails in the engine ends
        with finish reason "error", and the others go on.

        Raises ApiError: 429 where too many wait, 400 where the engine refuses one, its parameters leave
        nothing to say or log-probabilities of prompts would be too long, 500 where the engine fails or is
        gone, 503 where it cannot be had now.
        """
        _check_reports(prompts, params)
        scored = [i for i, own in enumerate(params) if own.prompt_logprobs is not None]
        shared = SharedPrompts(max((own.n for own in params), default=1), scored)
        adapter = model if model in self.adapters else None
        works: dict[str, int] = {}
        all_works: list[Work] = []
        for prompt, own in zip(prompts, params, strict=True):
            if own.seed is None:
                own = replace(own, seed=secrets.randbits(63))
            own = await self._predicted(own, len(prompt))
            for index in range(own.n):
                work = Work(uuid.uuid4().hex, prompt, own, index, traced=traced, adapter=adapter)
                works[work.id] = len(all_works)
                all_works.append(work)
        with self._room_for(len(all_works)):
            begun = time.monotonic()
            observed = [[observe(work, begun) for observe in self._observers] for work in all_works]
            unadmitted, failed = set(works), 0
            may_begin = not self.config.max_wait  # a stream that has begun can be refused no more
            try:
                async with aclosing(self.backend.generate(all_works, CALLER.get().session)) as deltas:
                    async for delta in deltas:
                        number = works[delta.id]
                        now = time.monotonic()
                        for one in observed[number]:
                            one.delta(delta, now)
                        if delta.finish_reason is FinishReason.ERROR:
                            failed += 1
                            if not delta.internal_error or failed == len(all_works) or shared.awaits(number):
                                status = 500 if delta.internal_error else 400
                                raise ApiError(
                                    delta.error or "it failed", param=delta.parameter, status=status
                                )
                        unadmitted.discard(delta.id)
                        may_begin = may_begin or delta.begun or not delta.is_empty
                        if may_begin and not unadmitted and delta.finish_reason is None:
                            if (admitted := ADMITTED.get()) is not None:
                                admitted.set()
                            if announced and delta.is_empty:
                                announced = False
                                yield number, delta
                        if not delta.is_empty:
                            for ready in shared.ready(number, delta):
                                yield ready
            except UnavailableError as error:
                raise ApiError(str(error), status=503, headers={"Retry-After": "5"}) from None
            except BackendError as error:
                raise ApiError(str(error), status=500, code="engine_died") from None
            finally:
                now = time.monotonic()
                for one in itertools.chain(*observed):
                    one.end(now)

    async def _predicted(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """The parameters with their prediction as token ids, made once for all n, as far as it can matter."""
        text = params.prediction
        if not isinstance(text, str):
            return params
        room = min(params.max_tokens, self.facts.max_context - prompt_tokens)
        encode = partial(self.tokenizer.encode, add_special=False)
        ids = await self.in_thread("prediction", lambda: within_reach(text, room, encode))
        return replace(params, prediction=ids)

    @contextmanager
    def _room_for(self, count: int) -> Iterator[None]:
        if self.draining:
            raise ApiError("the server is shutting down", status=503, headers={"Retry-After": "5"})
        if self._busy + count > self._most:
            waiting = f"{self._busy} answers are in progress or wait, and {count} more are asked for"
            raise ApiError(
                f"{waiting}; allowed: {self._most} in all; try again soon",
                status=429,
                headers={"Retry-After": "1"},
            )
        self._busy += count
        try:
            yield
        finally:
            self._busy -= count

    @property
    def busy(self) -> int:
        """Completions in progress or waiting."""
        return self._busy

    @property
    def _longest_prompt(self) -> int:
        most = self.facts.longest - 1
        return most if self.config.max_prompt_tokens is None else min(most, self.config.max_prompt_tokens)

    def _check_length(self, tokens: int, param: str) -> None:
        if tokens > (most := self._longest_prompt):
            raise ApiError(
                f"the prompt has {tokens} tokens or more; allowed: at most {most}; shorten it",
                param=param,
                code="context_length_exceeded",
            )


def _check_reports(prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> None:
    """Raise ApiError where log-probabilities of these prompts would be too long to send."""
    asked = [own.prompt_logprobs for own in params]
    figures = sum(
        len(prompt) * (1 + top) for prompt, top in zip(prompts, asked, strict=True) if top is not None
    )
    if figures > MOST_FIGURES:
        raise ApiError(
            f"the log-probabilities of the prompts are {figures} figures; allowed: at most {MOST_FIGURES}; "
            "shorten the prompts, or ask for fewer tokens at each place",
            param="prompt_logprobs",
        )
