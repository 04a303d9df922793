"""What a request needs before it may run: checks that never cost another request anything, processors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from specinfer.engine.sequence import SequenceState
from specinfer.errors import RequestError
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.processors.bad_words import tokenize_bad_words
from specinfer.processors.pipeline import Processors
from specinfer.request import Request
from specinfer.speculate.limits import SpeculationLimits
from specinfer.tokenizer import Tokenizer


class Admission:
    """Checks requests against one engine, and turns them into sequences ready to be scheduled."""

    def __init__(
        self, tokenizer: Tokenizer, limits: SpeculationLimits, *, vocab: int, max_context: int, capacity: int
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab = vocab
        self.max_context = max_context  # prompt and output tokens of one request
        self._capacity = capacity  # positions of the KV cache

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, self._vocab)

    def check(self, request: Request) -> None:
        """Raise RequestError when the request can never be served here."""
        self.admit(request)

    def admit(self, request: Request) -> tuple[SequenceState, frozenset[int]]:
        """The request as the scheduler sees it, and the token ids that may end its text.

        Raises RequestError as `check` does.
        """
        self._check_prompt(request)
        params = request.params
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("prediction", request.prediction)
        self._limits.check(request)
        processors = self.processors(request)
        self._check_first_token(processors)
        sequence = SequenceState(
            request,
            tree_nodes=self._limits.nodes(request),
            speculators=self._limits.speculators(request),
            processors=processors,
        )
        return sequence, processors.ending

    def processors(self, request: Request) -> Processors:
        """The request's processors at the start of its output."""
        params = request.params
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= self._tokenizer.eos_token_ids
        form = params.structured_output
        return Processors(
            params,
            request.prompt_token_ids,
            vocab=self._vocab,
            ending=ending,
            bad_words=tokenize_bad_words(
                params.bad_words, lambda text: self._tokenizer.encode(text, add_special=False)
            ),
            grammar=None if form is None else self._grammars.compile(form).state(),
        )

    def _check_prompt(self, request: Request) -> None:
        prompt, most = len(request.prompt_token_ids), request.params.max_tokens
        if prompt == 0:
            raise RequestError("the prompt is empty; give at least one token of text")
        if prompt >= self.max_context:
            raise RequestError(
                f"the prompt has {prompt} tokens; allowed: at most {self.max_context - 1}, since the context "
                f"is {self.max_context} and an answer needs at least one; shorten the prompt"
            )
        self._check_ids("the prompt", request.prompt_token_ids)
        longest = min(prompt + most, self.max_context)
        if longest > self._capacity:
            raise RequestError(
                f"{prompt} prompt tokens and max_tokens {most} need {longest} KV cache positions; the cache "
                f"has {self._capacity}; lower max_tokens or raise kv_cache_memory"
            )

    def _check_first_token(self, processors: Processors) -> None:
        """Parameters that exclude every first token contradict each other; that shows at once."""
        bans = processors.bans
        if bans and processors.apply(np.zeros(self._vocab, dtype=np.float32), ()).max() == -np.inf:
            raise RequestError(f"{' and '.join(bans)} leave no token to begin with; relax one of them")

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._vocab:
                raise RequestError(
                    f"{name} has token id {token}, outside the model's vocabulary of {self._vocab} tokens"
                )
