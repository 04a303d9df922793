"""One request's logit processors, applied before temperature and filters.

    structured output, thinking, allowed_token_ids, bad_words,
    min_tokens                                                      set the logits of some tokens to -inf
    logit_bias                                                      adds to logits
    repetition_penalty, frequency_penalty, presence_penalty         change the logits of tokens in the text

Each may depend on the text, so a tree node is processed with its own path. Only nodes whose logits are read
are processed: those the target visits during verification and those a draft model draws from
(docs/losslessness.md). Order and meaning are those of vLLM.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.grammar.grammar import GrammarState
from specinfer.processors.changes import BadWords, Penalties, RowChanges, bans, biases, change_each, joined
from specinfer.processors.thinking import ThinkingState
from specinfer.sampling_params import SamplingParams


class Processors:
    """Processors of one request, with their state about its text.

    `commit` updates the state; `apply` and `permits` have no visible side effects.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        vocab: int,
        ending: Iterable[int],
        bad_words: Sequence[Sequence[int]] = (),
        grammar: GrammarState | None = None,
        thinking: ThinkingState | None = None,
    ) -> None:
        self._vocab = vocab
        self._num_output = 0
        self._min_tokens = params.min_tokens
        self.ending = frozenset(ending)  # tokens that end the text; banned until min_tokens
        self._barred = bans([token for token in sorted(self.ending) if token < vocab])
        self.grammar = grammar  # grammar of the structured output, or None
        self._thinking = thinking  # None once all thinking has ended
        form = params.structured_output
        self._form = "" if form is None else form.parameter
        self._allowed: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self._allowed = np.zeros(vocab, dtype=np.bool_)
            self._allowed[list(params.allowed_token_ids)] = True
        self._bad_words = BadWords(bad_words) if bad_words else None
        self._biases = biases(params.logit_bias) if params.logit_bias else None
        self._penalties = Penalties.of(params, prompt)

    @property
    def idle(self) -> bool:
        """True if logits pass unchanged from here on, for every path."""
        return (
            self.grammar is None
            and self._thinking is None
            and self._allowed is None
            and self._bad_words is None
            and self._penalties is None
            and self._biases is None
            and self._num_output >= self._min_tokens
        )

    @property
    def bans(self) -> list[str]:
        """Return the names of the parameters that may ban a token from here on."""
        names = {
            self._form: self.grammar is not None,
            "thinking": self._thinking is not None,
            "allowed_token_ids": self._allowed is not None,
            "bad_words": self._bad_words is not None,
            "min_tokens": self._num_output < self._min_tokens,
        }
        return [name for name, is_there in names.items() if is_there]

    def apply(self, logits_V: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float32]:
        """Return the processed logits after the text and then the token ids `path`, [vocab].

        Does not mutate `logits_V`, and returns it if no processor applies. All are -inf if the parameters
        allow no token.
        """
        if self.idle:
            return logits_V
        logits_V = logits_V.copy()
        self.change(logits_V, path)
        return logits_V

    def change(self, logits_V: NDArray[np.float32], path: Sequence[int]) -> None:
        """Process `logits_V` in place; see `apply`."""
        if self.grammar is not None:
            logits_V[~self.grammar.allowed(path)] = -np.inf
        if self._thinking is not None and (token := self._thinking.required(path)) is not None:
            kept = logits_V[token]
            logits_V[:] = -np.inf
            logits_V[token] = kept
        if self._allowed is not None:
            logits_V[~self._allowed] = -np.inf
        for part in self._parts(path):
            change_each(logits_V, part)

    def changes(self, path: Sequence[int]) -> RowChanges | None:
        """Return the effect of `change` as sparse changes, or None if a mask covers the whole row."""
        if self.grammar is not None or self._allowed is not None:
            return None
        if self._thinking is not None and self._thinking.required(path) is not None:
            return None
        return joined(list(self._parts(path)))

    def _parts(self, path: Sequence[int]) -> Iterator[RowChanges]:
        """Yield the sparse changes, one processor at a time; within a part an id's changes are equal."""
        if self._bad_words is not None and (completions := self._bad_words.completions(path)):
            yield bans(completions)
        if self._num_output + len(path) < self._min_tokens:
            yield self._barred
        if self._thinking is not None and (barred := self._thinking.barred(path)):
            yield bans(barred)
        if self._biases is not None:
            yield self._biases
        if self._penalties is not None:
            yield self._penalties.changes(path)

    def permits(self, path: Sequence[int], token: int) -> bool:
        """True if `token` may follow the text and `path`; cheaper than a row of logits."""
        if self._num_output + len(path) < self._min_tokens and token in self.ending:
            return False
        if self._allowed is not None and not self._allowed[token]:
            return False
        if self._bad_words is not None and token in self._bad_words.completions(path):
            return False
        if self._thinking is not None and (
            self._thinking.required(path) not in (None, token) or token in self._thinking.barred(path)
        ):
            return False
        return self.grammar is None or self.grammar.permits(path, token)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, in order."""
        self._num_output += len(tokens)
        if self.grammar is not None:
            self.grammar.commit(tokens)
        if self._thinking is not None:
            self._thinking.commit(tokens)
            if self._thinking.done:
                self._thinking = None
        if self._bad_words is not None:
            self._bad_words.commit(tokens)
        if self._penalties is not None:
            self._penalties.commit(tokens)
