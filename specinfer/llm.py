"""LLM: offline use. Prompts in, answers out."""

from __future__ import annotations

import itertools
import operator
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from specinfer.config import EngineConfig
from specinfer.engine.build import Models, build_engine, load_models
from specinfer.engine.engine import Engine
from specinfer.errors import RequestError
from specinfer.progress import Progress, default_progress
from specinfer.request import Request, RequestOutput
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.speculator import Speculator
from specinfer.tokenizer import Tokenizer
from specinfer.verify.noise import completion_seed

Prompt = str | Sequence[int]  # text, or token ids
Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class LLM:
    """A model with its speculators, for generating text offline.

        llm = LLM("smollm2-135m", ngram=True)
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
            print(output.text)

    Options are the fields of SpeculationConfig, CacheConfig (`kv_cache_memory`, `block_size`),
    SchedulerConfig and EngineConfig. `speculators` are the caller's own (docs/add_a_speculator.md), asked
    after those the options name. What takes long at the start (a download, compiling, loading) shows a bar on
    a terminal; `progress=NoProgress()` (specinfer.progress) shows nothing. Raises ConfigError, ModelError or
    CapacityError.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        speculators: Sequence[Speculator] = (),
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_options(fspath(model), options)
        show = default_progress() if progress is None else progress
        self._models = load_models(self.config, show)
        self.engine: Engine = build_engine(self.config, self._models, speculators, show)
        self._numbers = itertools.count()
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # of requests that somebody listens to

    @classmethod
    def from_models(cls, config: EngineConfig, models: Models, speculators: Sequence[Speculator] = ()) -> LLM:
        """An LLM over models that are loaded already: the same weights under another config."""
        llm = cls.__new__(cls)
        llm.config, llm._models = config, models
        llm.engine = build_engine(config, models, speculators)
        llm._numbers = itertools.count()
        llm._inboxes = {}
        return llm

    @property
    def models(self) -> Models:
        """The loaded models."""
        return self._models

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._models.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, batched as they fit; outputs in the order of the prompts.

        `params` is one for all or one per prompt; where it asks for n completions, an output has all of
        them in `outputs`. `on_output` sees every completion's progress after each of its steps. A request
        whose parameters leave no token to choose ends with finish reason "error" and stops no other. Raises
        RequestError for the first prompt that cannot be served, before any is run.
        """
        return self._answer([self._encode(p) for p in _as_list(prompts)], params, on_output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; else as `generate`."""
        prompts = [self.tokenizer.encode_chat(c) for c in _conversations(messages)]
        return self._answer(prompts, params, on_output)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding its output after each step that adds to it; `new_text` is what came.

        Of n completions each yields its own outputs, told apart by `index`.
        """
        return self._stream(self._requests([self._encode(prompt)], params)[0])

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one conversation as `stream` answers a prompt."""
        return self._stream(self._requests([self.tokenizer.encode_chat(messages)], params)[0])

    def _answer(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        on_output: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        """One output per prompt, its other completions within it."""
        groups = self._requests(prompts, params)
        done: dict[str, RequestOutput] = {}
        for output in self._stream([request for group in groups for request in group]):
            if on_output is not None:
                on_output(output)
            if output.finished:
                done[output.request_id] = output
        answers = [[done[request.request_id] for request in group] for group in groups]
        return [replace(first, others=tuple(others)) for first, *others in answers]

    def _stream(self, requests: Sequence[Request]) -> Iterator[RequestOutput]:
        """Every output of `requests` as it comes, until all have finished."""
        inbox: deque[RequestOutput] = deque()
        running = len(requests)
        try:
            for request in requests:
                self._open(request, inbox)
            while running:
                while inbox:
                    output = inbox.popleft()
                    running -= output.finished
                    yield output
                if running:
                    self._step()
        finally:
            for request in requests:
                self._close(request)  # a caller that stops listening leaves nothing behind

    def _open(self, request: Request, inbox: deque[RequestOutput]) -> None:
        """Queue a request; its outputs arrive in `inbox`, whoever makes the engine step."""
        self.engine.add(request)
        self._inboxes[request.request_id] = inbox

    def _step(self) -> None:
        for output in self.engine.step():
            self._inboxes[output.request_id].append(output)

    def _close(self, request: Request) -> None:
        self.engine.abort(request.request_id)
        self._inboxes.pop(request.request_id, None)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token of text")
        return self.tokenizer.encode(prompt)

    def _requests(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[list[Request]]:
        """For every prompt its n requests."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
            raise RequestError(
                f"the sampling parameters are {params!r}; allowed: a SamplingParams, or one per prompt"
            )
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(params)} sampling parameters for {len(prompts)} prompts; give one, or one per prompt"
            )
        return [self._completions(tuple(prompt), p) for prompt, p in zip(prompts, params, strict=True)]

    def _completions(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Request]:
        number = next(self._numbers)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        guess = params.prediction or ()
        if isinstance(guess, str):
            guess = tuple(self.tokenizer.encode(guess, add_special=False))
        return [
            Request(
                request_id=f"request-{number}" if params.n == 1 else f"request-{number}-{index}",
                prompt_token_ids=prompt,
                params=params,
                seed=completion_seed(seed, index),
                prediction=guess,
                index=index,
            )
            for index in range(params.n)
        ]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt (a string, or token ids) or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping)):
        raise RequestError(f"the prompt is {prompts!r}; allowed: text, token ids, or a list of these")
    several: list[Any] = list(prompts)
    return [several] if several and _is_id(several[0]) else several


def _conversations(messages: object) -> list[Sequence[Message]]:
    """One conversation (a list of messages) or several, as several."""
    several = list(messages) if isinstance(messages, Iterable) and not isinstance(messages, Mapping) else None
    if several is not None and all(isinstance(item, Mapping) for item in several):
        return [several] if several else []
    if several is None or isinstance(messages, str) or not all(isinstance(c, Sequence) for c in several):
        raise RequestError(f"the messages are {messages!r}; allowed: a list of messages, or of such lists")
    return several


def _is_id(value: object) -> bool:
    """Whether it is an integer of any kind; an array of several has `__index__`, too, and is none."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and not getattr(value, "ndim", 0)


def _token_ids(prompt: object) -> list[int]:
    """Token ids of any integer type (numpy's, say) as Python's own."""
    ids: list[Any] = [prompt]
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Mapping)):
        ids = list(prompt)
    for token in ids:
        if not _is_id(token):
            raise RequestError(f"a prompt has {token!r} among its token ids; allowed: text, or integers")
    return [operator.index(token) for token in ids]
