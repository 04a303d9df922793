"""Admission: checks a request and prepares it to run; a failure concerns only that request."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from specinfer.engine.kv_blocks import SequenceState
from specinfer.engine.transcript import Transcript
from specinfer.errors import RequestError, naming
from specinfer.grammar.grammar import GrammarCompiler, GrammarState
from specinfer.processors.changes import tokenize_bad_words
from specinfer.processors.pipeline import Processors
from specinfer.processors.thinking import ThinkingState
from specinfer.request import Delta, Request
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.lookups.prediction import IndexedPrediction
from specinfer.structured_output import StructuredOutput
from specinfer.tokenizer import Tokenizer
from specinfer.verify.coupled import Acceptance
from specinfer.verify.logprobs import LOGPROB_BYTES, PromptLogprobs

if TYPE_CHECKING:  # importing this module does not load torch
    from specinfer.engine.target_laws import TargetLaws

MAX_PROMPT_LOGPROBS: Final = (64 << 20) // LOGPROB_BYTES  # maximum log-probabilities of one prompt


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A checked request that is ready to run once, in one engine, and its state there."""

    request: Request
    sequence: SequenceState  # the scheduler's state
    transcript: Transcript

    def accept(
        self, law: TargetLaws, acceptance: Acceptance, now: float, tokenizer: Tokenizer
    ) -> tuple[int, ...]:
        """Add a step's tokens to the text; returns those up to its end."""
        transcript, sequence = self.transcript, self.sequence
        tokens = transcript.commit(law.tree, acceptance, now)
        if (top := law.request.params.logprobs) is not None:
            # Now, while the processors' state is that of the tree's root.
            nodes = (0, *acceptance.path)[: len(tokens)]
            transcript.logprobs += law.reports(nodes, tokens, top, tokenizer)
        if not transcript.finished:
            sequence.computed += len(acceptance.path)
            if sequence.processors is not None:
                sequence.processors.commit(tokens)
        return tokens

    def delta(self) -> Delta:
        """Return the new output since the last call."""
        self.transcript.cached_tokens, self.transcript.miss = self.sequence.cached_tokens, self.sequence.miss
        return self.transcript.delta()

    def fail(self, error: str) -> Delta:
        """End the request because the engine failed; returns its last delta."""
        self.transcript.fail(error, time.perf_counter(), internal=True)
        return self.delta()


class Admission:
    """Checks requests against one engine and admits them; callable from several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: SpeculationLimits,
        *,
        vocab: int,
        max_context: int,
        capacity: int,
        block_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._limits = limits
        self._vocab = vocab
        self.max_context = max_context  # maximum prompt and output tokens of one request
        self.capacity = capacity  # positions in the KV cache
        self._block_size = block_size  # positions per block, if requests share prefixes
        self._compiler: GrammarCompiler | None = None  # made for the first request with a form
        self._making = threading.Lock()

    @property
    def speculators(self) -> tuple[str, ...]:
        """Names of the engine's speculators, in the order they run."""
        return self._limits.names

    @property
    def unenforced(self) -> dict[str, int]:
        """Requests by keyword of JSON schemas that their form is enforced without."""
        return {} if self._compiler is None else dict(self._compiler.unenforced)

    def admit(
        self,
        request: Request,
        source: str = "prompt",
        prior_output: Sequence[int] = (),
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> AdmittedRequest:
        """Check a request, compile its grammar and make its processors.

        Args:
            request: the request.
            source: the parameter that gave its prompt, for errors.
            prior_output: output tokens from an engine that has ended; the request continues after them.
            prompt_logprobs: the object that another completion of the same prompt fills.

        Raises:
            RequestError: this engine can never serve the request; names the invalid parameter.
        """
        arrived = time.perf_counter()
        with naming(source):
            self._check_prompt(request)
        params = request.params
        for parameter, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("visible_token_ids", params.visible_token_ids),
            ("thinking", () if (bound := params.thinking) is None else (*bound.ending, *bound.barred)),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", params.logit_bias or ()),
            ("prediction", request.prediction),
        ):
            with naming(parameter):
                self._check_ids(parameter, token_ids)
        speculators, tree_nodes = self._limits.of(request)
        processors = self.processors(request)
        self._check_first_token(processors)
        if request.prediction:
            request = replace(request, prediction=IndexedPrediction(request.prediction))
        if request.scores_prompt:
            prompt_logprobs = _prompt_logprobs(request)
        transcript = Transcript(
            request,
            self.tokenizer,
            ending=processors.ending,
            max_context=self.max_context,
            now=arrived,
            prompt_logprobs=prompt_logprobs,
        )
        sequence = SequenceState(
            request,
            transcript.ids,
            tree_nodes=tree_nodes,
            speculators=speculators,
            processors=processors,
        )
        if prior_output:
            with naming("prior_output"):
                self._check_ids("prior_output", prior_output)
                transcript.resume(prior_output)
                processors.commit(prior_output)
        if self._block_size is not None:
            sequence.hash_blocks(self._block_size)  # in the caller's thread, not between two steps
        return AdmittedRequest(request, sequence, transcript)

    def processors(self, request: Request) -> Processors:
        """Return the request's processors at the start of its output; raises RequestError as `admit` does."""
        params = request.params
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= self.tokenizer.eos_token_ids
        with naming("bad_words"):
            bad_words = tokenize_bad_words(
                params.bad_words, lambda text: self.tokenizer.encode(text, add_special=False)
            )
        form = params.structured_output
        grammar = None if form is None else self._grammar(form)
        return Processors(
            params,
            request.prompt_token_ids,
            vocab=self._vocab,
            ending=ending,
            bad_words=bad_words,
            grammar=grammar,
            thinking=None
            if params.thinking is None
            else ThinkingState(params.thinking, self.tokenizer.bytes_of),
        )

    def _grammar(self, form: StructuredOutput) -> GrammarState:
        with self._making:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self.tokenizer, self._vocab)
        with naming(form.parameter):
            return self._compiler.compile(form).state()

    def _check_prompt(self, request: Request) -> None:
        prompt, most = len(request.prompt_token_ids), request.params.max_tokens
        if prompt == 0:
            raise RequestError("the prompt is empty; give at least one token of text")
        allowed = self.max_context - (most > 0)
        if prompt > allowed:
            needs = " and an answer needs at least one" if most > 0 else ""
            raise RequestError(
                f"the prompt has {prompt} tokens; allowed: at most {allowed}, since the context is "
                f"{self.max_context}{needs}; shorten the prompt"
            )
        self._check_ids("the prompt", request.prompt_token_ids)
        longest = min(prompt + most, self.max_context)
        if longest > self.capacity:
            raise RequestError(
                f"{prompt} prompt tokens and max_tokens {most} need {longest} KV cache positions; the cache "
                f"has {self.capacity}; lower max_tokens or raise kv_cache_memory",
                "max_tokens",
            )

    def _check_first_token(self, processors: Processors) -> None:
        """Raise RequestError if the parameters exclude every first token."""
        bans = processors.bans
        if bans and processors.apply(np.zeros(self._vocab, dtype=np.float32), ()).max() == -np.inf:
            raise RequestError(
                f"{' and '.join(bans)} leave no token to begin with; relax one of them", bans[0]
            )

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab:
            token = next(token for token in token_ids if not 0 <= token < self._vocab)
            raise RequestError(
                f"{name} has token id {token}, outside the model's vocabulary of {self._vocab} tokens"
            )


def _prompt_logprobs(request: Request) -> PromptLogprobs:
    """Return the object for a prompt's log-probabilities, which stay in memory until the answer ends."""
    prompt, top = len(request.prompt_token_ids), request.params.prompt_logprobs or 0
    if (figures := prompt * (1 + top)) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs {top} of {prompt} prompt tokens are {figures} figures; allowed: at most "
            f"{MAX_PROMPT_LOGPROBS}; lower prompt_logprobs or shorten the prompt",
            "prompt_logprobs",
        )
    return PromptLogprobs(prompt, top)
