"""LLM: offline generation from prompts and conversations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any

from specinfer.config import EngineConfig, SpecialTokens
from specinfer.engine.admission import AdmittedRequest
from specinfer.engine.build import build_engine
from specinfer.engine.drafts import with_pool_members
from specinfer.engine.engine import Engine
from specinfer.engine.intake import Intake, LoRA, Params, Prompt
from specinfer.engine.loop import EngineLoop
from specinfer.engine.models import Models, load_models, variant_models
from specinfer.engine.steps import Statistics, TreeEvent
from specinfer.errors import ClosedError, PeerLostError
from specinfer.kernels.machine import release_free_memory
from specinfer.plan import StateCounts
from specinfer.progress import Progress, default_progress
from specinfer.request import LoRARequest, RequestOutput
from specinfer.sampling_params import SamplingParams, usual_sampling
from specinfer.speculate.speculator import Speculator
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.chat_encoder import Message, Tool

OnOutput = Callable[[RequestOutput], None]


@dataclass(frozen=True, slots=True)
class _Open:
    """Parts of an LLM that `close` releases."""

    models: Models
    engine: Engine
    intake: Intake
    loop: EngineLoop


class LLM:
    """A model with its speculators, for generating text offline.

        with LLM("smollm2-135m") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
                print(output.text)

    Several threads may use one LLM at once: their requests share the engine's batches, and each thread gets
    its own outputs. With `tensor_parallel` or `pipeline_parallel` other processes compute with this one; when
    one of them is lost, the call raises PeerLostError and the LLM closes. Leaving the `with` block, or
    calling `close`, frees the KV cache and the weights; every later use raises ClosedError.

    Args:
        model: a folder, a GGUF file, a hub id, a catalogue name, or a whole EngineConfig.
        speculators: the caller's own speculators (docs/add_a_speculator.md). They run after those that the
            options name.
        progress: receives the progress of downloading, compiling and loading. By default a terminal shows a
            bar; `NoProgress()` (specinfer.progress) shows nothing.
        **options: fields of EngineConfig, SpeculationConfig, CacheConfig and SchedulerConfig under the names
            of docs/reference.md, such as `kv_cache_memory="2GB"` or `lookup=False`. They override those of an
            EngineConfig given as `model`.

    Raises:
        ConfigError: an option is unknown or out of range.
        ModelError: the model cannot be found, read or run.
        CapacityError: the weights, the adapters or the KV cache do not fit into memory.
    """

    def __init__(
        self,
        model: str | PathLike[str] | EngineConfig,
        *,
        speculators: Sequence[Speculator] = (),
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, EngineConfig):
            config = model.with_options(options)
        else:
            config = EngineConfig.from_options(fspath(model), options)
        show = default_progress() if progress is None else progress
        # Replaces each pool by its drafts: these are loaded, and `variant` compares its drafts with them.
        config = with_pool_members(config)
        models = load_models(config, show)
        self._start(models.settled(config), models, speculators, show)

    @classmethod
    def from_models(
        cls,
        config: EngineConfig,
        models: Models,
        speculators: Sequence[Speculator] = (),
        progress: Progress | None = None,
    ) -> LLM:
        """Return an LLM over models that are already loaded; raises as `LLM` does."""
        llm = cls.__new__(cls)
        llm._start(with_pool_members(config), models, speculators, progress)
        return llm

    def _start(
        self,
        config: EngineConfig,
        models: Models,
        speculators: Sequence[Speculator],
        progress: Progress | None,
    ) -> None:
        self.config, engine = build_engine(config, models, speculators, progress)
        usual: Mapping[str, Any] = usual_sampling(
            models.sampling if config.generation_config == "auto" else {}
        )
        intake = Intake(engine.admission, SamplingParams(**usual), models.adapters)
        loop = EngineLoop(engine)
        self._parts: _Open | None = _Open(models, engine, intake, loop)
        # The loop's thread does not keep the LLM alive; a callback or speculator that refers to it does.
        self._end = weakref.finalize(self, loop.stop, wait=False)
        self._end.atexit = False  # the loop waits then

    def variant(
        self,
        config: EngineConfig | None = None,
        *,
        speculators: Sequence[Speculator] = (),
        progress: Progress | None = None,
        **options: Any,
    ) -> LLM:
        """Return another LLM over the same weights with other options.

        It has its own KV cache, and only those of the caller's speculators that are passed here.

        Args:
            config: the config to start from; by default this LLM's.
            speculators: as for `LLM`.
            progress: as for `LLM`.
            **options: as for `LLM`; they override those of `config`.

        Raises:
            ConfigError: an option needs other weights.
            CapacityError: the KV cache does not fit into memory.
        """
        config = with_pool_members((config or self.config).with_options(options))
        return LLM.from_models(
            config, variant_models(config, self.config, self.models), speculators, progress
        )

    def close(self) -> None:
        """Free the KV cache and release the weights; a second call does nothing.

        Waits for the running step, unless that step waits for streamed weights. Other threads that wait for
        an answer get a ClosedError. Reading of streamed weights ends when no variant and no other reference
        holds the models.
        """
        if (parts := self._parts) is not None:
            parts.loop.close()
            self._end.detach()
            parts.engine.save_policy()
            parts.engine.close_store()
            self._parts = parts = None
            release_free_memory()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open(self) -> _Open:
        if (parts := self._parts) is None:
            raise ClosedError("the LLM was closed; make a new one")
        return parts

    @property
    def models(self) -> Models:
        """The loaded models."""
        return self._open.models

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._open.models.tokenizer

    @property
    def max_context(self) -> int:
        """Maximum tokens of a request, prompt and output together."""
        return self._open.intake.max_context

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of requests that give none: the model's recommendation, else the defaults."""
        return self._open.intake.usual

    @property
    def states(self) -> StateCounts:
        """Slots of recurrent states in each model that has them."""
        return self._open.engine.states

    @property
    def intake(self) -> Intake:
        """The intake, which turns prompts into requests in any thread; for callers that drive `loop`."""
        return self._open.intake

    @property
    def loop(self) -> EngineLoop:
        """The engine loop, which runs requests for any number of threads, in its own thread."""
        return self._open.loop

    @property
    def on_step(self) -> Callable[[Sequence[str]], None] | None:
        """Callback that gets the request ids of each step before the step computes; settable at any time.

        The loop's thread calls it, so it must be quick. Its first exception is logged, and steps continue.
        """
        return self._open.engine.listeners.on_step

    @on_step.setter
    def on_step(self, listener: Callable[[Sequence[str]], None] | None) -> None:
        self._open.engine.listeners.on_step = listener

    @property
    def on_tree(self) -> Callable[[TreeEvent], None] | None:
        """Callback that gets every request's verified tree in every step; settable at any time.

        The loop's thread calls it within the step. An exception that it raises ends the request with an
        error.
        """
        return self._open.engine.listeners.on_tree

    @on_tree.setter
    def on_tree(self, listener: Callable[[TreeEvent], None] | None) -> None:
        self._open.engine.listeners.on_tree = listener

    @property
    def explains(self) -> bool:
        """True if tree events include the policy's reasons (`TreeEvent.decision`); settable, off by default.

        Recording them adds a little time to every step.
        """
        return self._open.engine.listeners.explains

    @explains.setter
    def explains(self, enabled: bool) -> None:
        self._open.engine.listeners.explains = enabled

    def statistics(self) -> Statistics:
        """Return the engine's counters and its number of requests, without waiting for a step."""
        return self._open.engine.statistics()

    def check_integrity(self) -> None:
        """Check the engine's bookkeeping; an IntegrityError or AssertionError reveals a bug of specinfer."""
        self._open.loop.check_integrity()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        lora_request: LoRA = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Generate one completion per prompt, in batches as large as the engine's limits allow.

        A request whose parameters exclude every token ends with finish reason "error"; the other requests
        continue.

        Args:
            prompts: one prompt or several, each a text or a sequence of token ids.
            params: sampling parameters for all prompts, or one per prompt; by default `default_params`.
            lora_request: a LoRA adapter for all prompts, or one per prompt (docs/lora.md).
            on_output: gets the output so far of every completion after each of its steps. An exception that
                it raises cancels all of these requests.

        Returns:
            One output per prompt, in the order of the prompts; `outputs` holds all n completions of it.

        Raises:
            RequestError: a prompt cannot be served; raised for the first one, before any prompt runs.
            ModelError: an adapter cannot be used.
            CapacityError: an adapter does not fit into memory.
        """
        return self._answer(self._open.intake.prompts(prompts, params, lora_request), on_output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        tools: Sequence[Tool] = (),
        special_tokens_in_messages: SpecialTokens = "text",
        lora_request: LoRA = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one or several conversations, through the model's chat template.

        A tool call appears in the output text as the model writes it; no schema constrains it, and the caller
        parses it (`specinfer serve` does so for its clients). Its markers may be special tokens, which texts
        omit unless `visible_token_ids` names them.

        Args:
            messages: one conversation or several, in OpenAI's format: `content` is a text or a list of text
                parts and may be None for an assistant; tool call arguments are JSON text or objects.
            params: as for `generate`.
            tools: tool definitions in OpenAI's format, which the chat template adds to the prompt.
            special_tokens_in_messages: "text" encodes the names of special tokens in messages
                ("<|im_end|>") as plain text, so that they end no turn; "special" encodes them as the tokens.
            lora_request: as for `generate`, per conversation.
            on_output: as for `generate`.

        Returns:
            One output per conversation, in order.

        Raises:
            RequestError: a conversation cannot be served, or the chat template does not support tools.
            ModelError: an adapter cannot be used.
            CapacityError: an adapter does not fit into memory.
        """
        groups = self._open.intake.conversations(
            *(messages, params), tools=tools, special_tokens=special_tokens_in_messages, lora=lora_request
        )
        return self._answer(groups, on_output)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput]:
        """Generate from one prompt and yield the output after every step; `new_text` is the step's text.

        Each of n completions yields its own outputs, with its number in `index`. Closing or dropping the
        generator cancels the request. RequestError is raised by the call itself, not by the first `next`.

        Args:
            prompt: a text or a sequence of token ids.
            params: sampling parameters; by default `default_params`.
            lora_request: a LoRA adapter (docs/lora.md).
        """
        [requests] = self._open.intake.prompts([prompt], params, lora_request)
        return self._stream(requests)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        special_tokens_in_messages: SpecialTokens = "text",
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput]:
        """Generate the next message of one conversation and yield outputs as `stream` does.

        The arguments are those of `chat`, for one conversation.
        """
        [requests] = self._open.intake.conversations(
            *([messages], params), tools=tools, special_tokens=special_tokens_in_messages, lora=lora_request
        )
        return self._stream(requests)

    def _stream(
        self, requests: Sequence[AdmittedRequest], *, ended_only: bool = False
    ) -> Generator[RequestOutput]:
        """Yield the outputs of requests; a PeerLostError closes the LLM."""
        try:
            yield from self._open.loop.stream(requests, ended_only=ended_only)
        except PeerLostError:
            self.close()
            raise

    def _answer(self, groups: list[list[AdmittedRequest]], on_output: OnOutput | None) -> list[RequestOutput]:
        """Run the requests; return one output per prompt, with its other completions in `others`."""
        done: dict[str, RequestOutput] = {}
        # Closed when `on_output` raises: its traceback would otherwise keep the generator alive.
        requests = [one for group in groups for one in group]
        with closing(self._stream(requests, ended_only=on_output is None)) as outputs:
            for output in outputs:
                if on_output is not None:
                    on_output(output)
                if output.finished:
                    done[output.request_id] = output
        answers = [[done[one.request.request_id] for one in group] for group in groups]
        return [replace(first, others=tuple(others)) for first, *others in answers]
