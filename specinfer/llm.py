"""LLM: offline use. Prompts in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from os import PathLike, fspath
from types import TracebackType
from typing import Any

from specinfer.config import EngineConfig, SpecialTokens
from specinfer.engine.admission import Admitted
from specinfer.engine.build import build_engine
from specinfer.engine.engine import Engine
from specinfer.engine.intake import Intake, LoRA, Message, Params, Prompt, Tool
from specinfer.engine.loop import EngineLoop
from specinfer.engine.models import Models, load_models, models_for, with_members
from specinfer.engine.steps import Statistics
from specinfer.engine.trace import TreeEvent
from specinfer.errors import ClosedError, PeerLostError
from specinfer.progress import NoProgress, Progress, default_progress
from specinfer.request import LoRARequest, RequestOutput
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.speculator import Speculator
from specinfer.tokenizer import Tokenizer

OnOutput = Callable[[RequestOutput], None]


@dataclass(frozen=True, slots=True)
class _Open:
    """What an LLM has until it is closed."""

    models: Models
    engine: Engine
    intake: Intake
    loop: EngineLoop


class LLM:
    """A model with its speculators, for generating text offline.

        with LLM("smollm2-135m") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
                print(output.text)

    Options are the fields of SpeculationConfig, CacheConfig (`kv_cache_memory`, `block_size`),
    SchedulerConfig and EngineConfig; an EngineConfig may stand for the model, and options change it. Guesses
    are looked up in the text and in earlier answers unless `lookup=False`.
    `speculators` are the caller's own (docs/add_a_speculator.md), asked after those the options name.
    What takes long at the start (a download, compiling, loading) shows a bar on a terminal, and
    `progress=NoProgress()` (specinfer.progress) shows nothing. Raises ConfigError, ModelError or
    CapacityError.

    Several threads may use one LLM at once: their requests share the engine's batches, and each gets its
    own outputs. With `tensor_parallel` other processes compute with this one; where one of them is lost a
    PeerLostError comes out, and the LLM is closed. Leaving the `with` block, or `close`, frees the KV cache
    and the weights; after it every use raises ClosedError.
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
        # A pool's members are what is loaded, and what a variant's drafts are held against.
        config = with_members(config, show)
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
        """An LLM over models that are loaded already."""
        llm = cls.__new__(cls)
        llm._start(with_members(config, progress or NoProgress()), models, speculators, progress)
        return llm

    def _start(
        self,
        config: EngineConfig,
        models: Models,
        speculators: Sequence[Speculator],
        progress: Progress | None,
    ) -> None:
        self.config, engine = build_engine(config, models, speculators, progress)
        recommended: Mapping[str, Any] = models.sampling if config.generation_config == "auto" else {}
        intake = Intake(engine.admission, SamplingParams(**recommended), models.adapters)
        self._parts: _Open | None = _Open(models, engine, intake, EngineLoop(engine))

    def variant(
        self,
        config: EngineConfig | None = None,
        *,
        speculators: Sequence[Speculator] = (),
        progress: Progress | None = None,
        **options: Any,
    ) -> LLM:
        """Another LLM over the same weights, under `config` or this one's, with other options.

        It has a KV cache of its own, and of the caller's speculators those that are given here. Raises
        ConfigError for an option that needs other weights, CapacityError when the KV cache does not fit.
        """
        show = default_progress() if progress is None else progress
        config = with_members((config or self.config).with_options(options), show)
        return LLM.from_models(config, models_for(config, self.config, self.models), speculators, progress)

    def close(self) -> None:
        """Free the KV cache and let go of the weights; once more does nothing.

        Waits for the step that is running, unless that waits for weights. Whoever waits for an answer in
        another thread gets a ClosedError. Weights that are streamed are read no more once no variant, and
        nobody else, has the models.
        """
        if (parts := self._parts) is not None:
            parts.loop.close()
            parts.engine.keep_learnt()
            self._parts = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """The most tokens a request can have, prompt and output together."""
        return self._open.intake.max_context

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of requests that come without any: those that the model recommends, or the usual."""
        return self._open.intake.usual

    @property
    def intake(self) -> Intake:
        """Makes requests of prompts, in any thread; for callers that hand them to `loop` themselves."""
        return self._open.intake

    @property
    def loop(self) -> EngineLoop:
        """Runs requests for any number of threads; a server starts its thread, others need not know it."""
        return self._open.loop

    @property
    def on_step(self) -> Callable[[Sequence[str]], None] | None:
        """Called with the ids of a step's requests before anything is computed, by the thread that runs it.

        May be set at any time. It has to be quick. The first exception that it raises is logged, and steps
        go on.
        """
        return self._open.engine.on_step

    @on_step.setter
    def on_step(self, listener: Callable[[Sequence[str]], None] | None) -> None:
        self._open.engine.on_step = listener

    @property
    def on_tree(self) -> Callable[[TreeEvent], None] | None:
        """Called with every request's tree in every step, by the thread that runs the step.

        May be set at any time. What it raises goes to whoever ran the step, when the step is done.
        """
        return self._open.engine.on_tree

    @on_tree.setter
    def on_tree(self, listener: Callable[[TreeEvent], None] | None) -> None:
        self._open.engine.on_tree = listener

    @property
    def explains(self) -> bool:
        """Whether `on_tree` is told why so much was guessed, too (`TreeEvent.decision`); may be set.

        It takes a little time of every step, so it is off unless somebody wants to see it.
        """
        return self._open.engine.explains

    @explains.setter
    def explains(self, wanted: bool) -> None:
        self._open.engine.explains = wanted

    def statistics(self) -> Statistics:
        """What the engine did so far, and how many requests it has; never waits for a step."""
        return self._open.engine.statistics()

    def check_integrity(self) -> None:
        """Raise IntegrityError or AssertionError when the engine's bookkeeping is broken: a bug."""
        self._open.loop.check_integrity()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        lora_request: LoRA = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, batched as they fit; outputs in the order of the prompts.

        `params` is one for all or one per prompt, without it `default_params`; where it asks for n
        completions, an output has all of them in `outputs`. `lora_request` is an adapter, for all or one per
        prompt, that the model has for it (docs/lora.md). `on_output` sees every completion's progress
        after each of its steps; when it raises, all these requests are cancelled. A request whose parameters
        leave no token to choose ends with finish reason "error" and stops no other. Raises RequestError for
        the first prompt that cannot be served, before any is run, ModelError for an adapter that cannot be
        used.
        """
        return self._answer(self.intake.prompts(prompts, params, lora_request), on_output)

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
        """Answer one conversation or several, through the model's chat template; else as `generate`.

        Messages are read as OpenAI's clients write them: `content` is a text or a list of parts of text, an
        assistant's may be None, and arguments of its calls are JSON text or objects.
        `tools`, in the shape of OpenAI's chat completions, are what the template tells the model that it may
        call. A call stands in the text as the model writes it, held to no schema: to read it is the caller's
        part, and `specinfer serve` does it. Its marks may be special tokens, which are left out of texts but
        for `visible_token_ids`. Names of special tokens that users and tools write ("<|im_end|>") are texts
        like any other, so that they end no turn; "special" makes them the tokens. Raises RequestError for
        tools that the template knows nothing of.
        """
        groups = self.intake.conversations(
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
        """Answer one prompt; yields the output after every step of it, `new_text` is the part that is new.

        Of n completions each yields its own outputs, told apart by `index`. A stream that is dropped or
        closed cancels its request. Raises RequestError at once, before the first output is asked for.
        """
        [requests] = self.intake.prompts([prompt], params, lora_request)
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
        """Answer one conversation as `stream` answers a prompt; the rest is as `chat` has it."""
        [requests] = self.intake.conversations(
            *([messages], params), tools=tools, special_tokens=special_tokens_in_messages, lora=lora_request
        )
        return self._stream(requests)

    def _stream(self, requests: Sequence[Admitted], *, ended_only: bool = False) -> Generator[RequestOutput]:
        """The outputs of requests as they come; one that a lost rank cuts short closes the LLM."""
        try:
            yield from self._open.loop.stream(requests, ended_only=ended_only)
        except PeerLostError:
            self.close()
            raise

    def _answer(self, groups: list[list[Admitted]], on_output: OnOutput | None) -> list[RequestOutput]:
        """One output per prompt, its other completions within it."""
        done: dict[str, RequestOutput] = {}
        # Closed where `on_output` raises, or the requests would run on as long as somebody keeps the error.
        requests = [one for group in groups for one in group]
        with closing(self._stream(requests, ended_only=on_output is None)) as outputs:
            for output in outputs:
                if on_output is not None:
                    on_output(output)
                if output.finished:
                    done[output.request_id] = output
        answers = [[done[one.request.request_id] for one in group] for group in groups]
        return [replace(first, others=tuple(others)) for first, *others in answers]
