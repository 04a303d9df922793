"""Intake: turns prompts and conversations into checked requests that are ready to run.

All preparation of a request happens here, in the caller's thread, while the engine runs other requests:
tokenizing, the chat template, checks, and compiling the grammar.
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from specinfer.config import SpecialTokens
from specinfer.engine.admission import Admission, AdmittedRequest
from specinfer.errors import RequestError, naming
from specinfer.request import LoRARequest, Request
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.lookups.prediction import relevant_tokens
from specinfer.tokenizer import ChatEncoder
from specinfer.tokenizer.chat_encoder import Message, Tool
from specinfer.verify.noise import completion_seed

if TYPE_CHECKING:  # importing this module does not load models
    from specinfer.models.adapters.adapter_cache import AdapterCache

Prompt = str | Sequence[int]  # text, or token ids
# One for all prompts, or one per prompt. None: the usual parameters, and no adapter.
Params = SamplingParams | Sequence[SamplingParams | None] | None
LoRA = LoRARequest | Sequence[LoRARequest | None] | None
_Kind = TypeVar("_Kind", SamplingParams, LoRARequest)


class Intake:
    """Turns prompts and conversations into admitted requests; callable from several threads at once.

    Every method raises RequestError with the invalid parameter; a failure affects no other request. Request
    ids that callers do not give are made here and are unique.
    """

    def __init__(
        self,
        admission: Admission,
        usual: SamplingParams | None = None,
        adapters: AdapterCache | None = None,
    ) -> None:
        """Make an intake; `usual` are the default parameters, `adapters` those that requests may name."""
        self._admission = admission
        self._adapters = adapters
        self._chat = ChatEncoder(admission.tokenizer)
        self.usual = usual or SamplingParams()
        self._numbers = itertools.count()
        self.tokenizer = admission.tokenizer  # the target's
        self.max_context = admission.max_context  # maximum tokens of a request, prompt and output together
        self.positions = admission.capacity  # of the KV cache
        self.max_length = min(self.max_context, self.positions)
        self.speculators = admission.speculators  # names, in the order they run

    def prompts(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, lora: LoRA = None
    ) -> list[list[AdmittedRequest]]:
        """Return the n requests of each prompt; raises as AdapterCache.named for an adapter."""
        with naming("prompt"):
            encoded = [self._encode(prompt) for prompt in _as_prompts(prompts)]
        return self._admit(encoded, params, "prompt", lora)

    def conversations(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        tools: Sequence[Tool] = (),
        special_tokens: SpecialTokens = "text",
        lora: LoRA = None,
    ) -> list[list[AdmittedRequest]]:
        """Return the n requests of each conversation, through the chat template.

        The template adds `tools` to every prompt. Names of special tokens in messages and tools are encoded
        as plain text, or with "special" as the tokens.
        """
        if special_tokens not in get_args(SpecialTokens):
            raise RequestError(
                f"special_tokens_in_messages is {special_tokens!r}; allowed: text, special",
                "special_tokens_in_messages",
            )
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestError(
                f'the tools are {tools!r}; allowed: a list of {{"type": "function", "function": {{...}}}}',
                "tools",
            )
        with naming("messages"):
            encoded = [
                self._chat.token_ids(chat, tools=tools, special_tokens=special_tokens)
                for chat in _as_conversations(messages)
            ]
        return self._admit(encoded, params, "messages", lora)

    def completion(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        prior_output: Sequence[int] = (),
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> AdmittedRequest:
        """Return the request of the prompt's completion number `index`, for any `params.n`.

        Args:
            prompt: token ids.
            params: the sampling parameters.
            index: the completion; only number 0 reports `prompt_logprobs`, as the others would be equal.
            adapter: the name of an adapter.
            request_id: a unique id; None: one is made.
            prior_output: output tokens from an engine that has ended; the request continues after them. With
                the coupled verifier the text depends only on the target, the prompt and `params.seed`, so
                the result is the text that the other engine would have made.
        """
        with naming("prompt"):
            token_ids = tuple(_prompt_ids(prompt))
        if adapter is not None and (self._adapters is None or adapter not in self._adapters.names):
            raise RequestError(f"the adapter {adapter!r} is not loaded here", "model")
        [request] = self._completions(token_ids, params, [index], adapter)
        if request_id is not None:
            request = replace(request, request_id=request_id)
        return self._admission.admit(request, "prompt", prior_output)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return _prompt_ids(prompt)
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token of text")
        return self.tokenizer.encode(prompt)

    def _admit(
        self, prompts: Sequence[Sequence[int]], params: Params, source: str, lora: LoRA
    ) -> list[list[AdmittedRequest]]:
        """Return the requests of prompts whose token ids came from the parameter `source`."""
        each = _one_each(prompts, params, SamplingParams, "params", "SamplingParams")
        loras = _one_each(prompts, lora, LoRARequest, "lora_request", "LoRARequests")
        adapters = [self._adapter(one) for one in loras]
        admitted: list[list[AdmittedRequest]] = []
        for prompt, wanted, adapter in zip(prompts, each, adapters, strict=True):
            own = self.usual if wanted is None else wanted
            first, *others = self._completions(tuple(prompt), own, range(own.n), adapter)
            group = [self._admission.admit(first, source)]
            reports = group[0].transcript.prompt_logprobs  # computed by the first for all
            group.extend(self._admission.admit(one, source, prompt_logprobs=reports) for one in others)
            admitted.append(group)
        return admitted

    def _adapter(self, lora: LoRARequest | None) -> str | None:
        """Return the name of an adapter, after reading and checking a new one; None: the default one."""
        if lora is None:
            return None if self._adapters is None else self._adapters.default
        if self._adapters is None:
            raise RequestError("the model takes no adapters; leave lora_request out", "lora_request")
        return self._adapters.named(lora)

    def _completions(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        indices: Iterable[int],
        adapter: str | None,
    ) -> list[Request]:
        """Return some of one prompt's n requests."""
        number = next(self._numbers)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        guess: tuple[int, ...] = ()
        if params.prediction:
            room = min(params.max_tokens, self.max_context - len(prompt))
            encode = partial(self.tokenizer.encode, add_special=False)
            with naming("prediction"):
                guess = relevant_tokens(params.prediction, room, encode)
        return [
            Request(
                request_id=f"request-{number}" if params.n == 1 else f"request-{number}-{index}",
                prompt_token_ids=prompt,
                params=params,
                seed=completion_seed(seed, index),
                prediction=guess,
                index=index,
                adapter=adapter,
            )
            for index in indices
        ]


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return one prompt (a string, or token ids) or several as a sequence."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping)):
        raise RequestError(f"the prompt is {prompts!r}; allowed: text, token ids, or a list of these")
    several: list[Any] = list(prompts)
    return [several] if several and _is_id(several[0]) else several


def _as_conversations(messages: object) -> list[Sequence[Message]]:
    """Return one conversation (a list of messages) or several as a list."""
    several = list(messages) if isinstance(messages, Iterable) and not isinstance(messages, Mapping) else None
    if several is not None and all(isinstance(item, Mapping) for item in several):
        return [several] if several else []
    if several is None or isinstance(messages, str) or not all(isinstance(c, Sequence) for c in several):
        raise RequestError(f"the messages are {messages!r}; allowed: a list of messages, or of such lists")
    return several


def _one_each(
    prompts: Sequence[object], given: object, kind: type[_Kind], parameter: str, names: str
) -> Sequence[_Kind | None]:
    """Return one value of a parameter for each of `prompts`; `given` is one for all, or a list of them."""
    if given is None or isinstance(given, kind):
        return [given] * len(prompts)
    if not isinstance(given, Sequence) or not all(isinstance(one, kind | None) for one in given):
        raise RequestError(
            f"{parameter} is {given!r}; allowed: a {kind.__name__}, or one or None per prompt", parameter
        )
    if len(given) != len(prompts):
        raise RequestError(
            f"{len(given)} {names} for {len(prompts)} prompts; give one, or one per prompt", parameter
        )
    return given


def _is_id(value: object) -> bool:
    """Return whether a value is an integer of any type; arrays have `__index__`, but may not be integers."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and not getattr(value, "ndim", 0)


def _prompt_ids(prompt: object) -> list[int]:
    """Return token ids of any integer type, such as NumPy's, as Python integers."""
    ids: list[Any] = [prompt]
    if isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Mapping)):
        ids = list(prompt)
    if set(map(type, ids)) == {int}:  # the fast path for tokenizers and JSON
        return ids
    for token in ids:
        if not _is_id(token):
            raise RequestError(f"a prompt has {token!r} among its token ids; allowed: text, or integers")
    return [operator.index(token) for token in ids]
