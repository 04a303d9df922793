"""What one request's parameters make of a row of logits, before temperature and filters.

    structured output, allowed_token_ids, bad_words, min_tokens     some tokens become impossible: -inf
    logit_bias                                                      added
    repetition_penalty, frequency_penalty, presence_penalty         of tokens the text has already

All of it may depend on the text, so at a node of a tree it is computed with the node's own path, and only at
nodes somebody asks about: the target where its walk goes, a draft model where it draws (the sixth rule of
docs/losslessness.md). The order and the meaning of each are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.grammar.grammar import GrammarState
from specinfer.processors.changes import BadWords, Penalties, RowChanges, bans, biases, change_each, joined
from specinfer.sampling_params import SamplingParams


class Processors:
    """One request's processors, and what they must remember of its text.

    `commit` tells them what became text; `apply` and `permits` change nothing that can be seen.
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
    ) -> None:
        self._vocab = vocab
        self._num_output = 0
        self._min_tokens = params.min_tokens
        self.ending = frozenset(ending)  # after one of these no text follows; barred before min_tokens
        self._barred = bans([token for token in sorted(self.ending) if token < vocab])
        self.grammar = grammar  # the form the text must have, if any
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
        """Whether logits pass unchanged from here on, whatever the path."""
        return (
            self.grammar is None
            and self._allowed is None
            and self._bad_words is None
            and self._penalties is None
            and self._biases is None
            and self._num_output >= self._min_tokens
        )

    @property
    def bans(self) -> list[str]:
        """The parameters that may make a token impossible from here on, by name."""
        names = {
            self._form: self.grammar is not None,
            "allowed_token_ids": self._allowed is not None,
            "bad_words": self._bad_words is not None,
            "min_tokens": self._num_output < self._min_tokens,
        }
        return [name for name, is_there in names.items() if is_there]

    def apply(self, logits_V: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float32]:
        """The processed logits after the text and then the token ids `path`, [vocab].

        `logits_V` is not mutated; it comes back itself where nothing applies. All are -inf where the
        parameters leave no token.
        """
        if self.idle:
            return logits_V
        logits_V = logits_V.copy()
        self.change(logits_V, path)
        return logits_V

    def change(self, logits_V: NDArray[np.float32], path: Sequence[int]) -> None:
        """Process `logits_V` in place, as `apply` does a copy."""
        if self.grammar is not None:
            logits_V[~self.grammar.allowed(path)] = -np.inf
        if self._allowed is not None:
            logits_V[~self._allowed] = -np.inf
        for part in self._parts(path):
            change_each(logits_V, part)

    def changes(self, path: Sequence[int]) -> RowChanges | None:
        """What `change` does, as changes of single logits; None where a mask covers the whole row."""
        if self.grammar is not None or self._allowed is not None:
            return None
        return joined(list(self._parts(path)))

    def _parts(self, path: Sequence[int]) -> Iterator[RowChanges]:
        """The changes of single logits, in which no two of an id differ, part after part."""
        if self._bad_words is not None and (completions := self._bad_words.completions(path)):
            yield bans(completions)
        if self._num_output + len(path) < self._min_tokens:
            yield self._barred
        if self._biases is not None:
            yield self._biases
        if self._penalties is not None:
            yield self._penalties.changes(path)

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Whether `token` may follow the text and `path` at all: cheaper than a row of logits."""
        if self._num_output + len(path) < self._min_tokens and token in self.ending:
            return False
        if self._allowed is not None and not self._allowed[token]:
            return False
        if self._bad_words is not None and token in self._bad_words.completions(path):
            return False
        return self.grammar is None or self.grammar.permits(path, token)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that became text, in order."""
        self._num_output += len(tokens)
        if self.grammar is not None:
            self.grammar.commit(tokens)
        if self._bad_words is not None:
            self._bad_words.commit(tokens)
        if self._penalties is not None:
            self._penalties.commit(tokens)
