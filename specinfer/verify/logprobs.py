"""Log-probabilities that are reported to the caller, those of a prompt as numbers until somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from specinfer.request import Logprob, Logprobs
from specinfer.sampling_params import SamplingParams
from specinfer.tokenizer import Tokenizer
from specinfer.verify.law import most_likely
from specinfer.verify.scan import NO_TOKEN, LogitBlock, Scan
from specinfer.verify.target_law import target_law

FIGURE_BYTES: Final = 16  # of one token at one place: id, rank and log-probability


class Scores(NamedTuple):
    """What is reported of one token at each of R rows: its own figures, then those of the likeliest tokens.

    All of it is of the model's own law, as `raw_logprobs` has it.
    """

    ids: NDArray[np.int32]  # [R, 1 + top]; NO_TOKEN behind the last
    logprobs: NDArray[np.float64]  # [R, 1 + top]
    ranks: NDArray[np.int32]  # [R, 1 + top]; one more than the number of likelier tokens

    @classmethod
    def empty(cls, rows: int, top: int) -> Scores:
        """Room for so many rows, in which nothing is known."""
        shape = (rows, 1 + top)
        return cls(np.full(shape, NO_TOKEN, np.int32), np.zeros(shape), np.zeros(shape, np.int32))

    def put(self, places: slice | NDArray[np.int64], part: Scores) -> None:
        """Write the rows of `part` to these places."""
        self.ids[places], self.logprobs[places], self.ranks[places] = part

    def report(self, row: int, text_of: Callable[[int], str]) -> Logprobs:
        """What is known at a row, the token itself first; `text_of` says what a token is as text."""
        columns = self.ids[row].tolist(), self.logprobs[row].tolist(), self.ranks[row].tolist()
        return {
            token: Logprob(logprob, rank, text_of(token))
            for token, logprob, rank in zip(*columns, strict=True)
            if token != NO_TOKEN
        }


def score(
    logits: LogitBlock, rows: NDArray[np.int64], tokens: NDArray[np.int64], top: int, scan: Scan
) -> Scores:
    """The figures of `tokens[i]` at `rows[i]` of the block, and of the `top` likeliest tokens there.

    The same numbers as `report` of `raw_logprobs`, from one scan of all rows and one sum over each.
    """
    scores = Scores.empty(len(rows), top)
    scores.ids[:, 0] = tokens
    if top:
        likeliest = scan.likeliest(logits, rows, top, np.ones(len(rows)))
        values = likeliest.values
        scores.ids[:, 1:] = likeliest.ids
        places = np.arange(1, top + 1)
        begins = np.ones(values.shape, dtype=np.bool_)  # of a run of equal ones, which have one rank
        begins[:, 1:] = values[:, 1:] != values[:, :-1]
        scores.ranks[:, 1:] = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    weights = np.empty(logits.vocab)
    for place, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        logits_V = logits[row]
        highest, own = float(logits_V.max()), logits_V[token]
        np.subtract(logits_V, highest, out=weights, dtype=np.float64)
        mass = np.log(np.exp(weights, out=weights).sum())
        scores.logprobs[place, 0] = float(own) - highest - mass
        scores.ranks[place, 0] = np.count_nonzero(logits_V > own) + 1
        if top:
            scores.logprobs[place, 1:] = values[place].astype(np.float64) - highest - mass
    return scores


def raw_logprobs(logits_V: NDArray[np.float32]) -> NDArray[np.float64]:
    """The model's own log-probabilities, [vocab]: no temperature, no processor, no filter."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def processed_logprobs(logits_V: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Log-probabilities of the law tokens are chosen from, [vocab]; -inf where it excludes them.

    `logits_V` are the processed logits. At temperature 0, where that law is a point mass, they are taken at
    temperature 1 without filters, as in vLLM: the argmax is the same, and a number says how close it was.
    """
    if params.greedy:
        return raw_logprobs(logits_V)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(target_law(logits_V, params).dense()))


def report(logprobs_V: NDArray[np.float64], chosen: int, top: int, tokenizer: Tokenizer) -> Logprobs:
    """The figures of the chosen token and of the `top` likeliest, the chosen one first.

    The rank of a token is one more than the number of likelier ones.
    """
    ranks = {chosen: int((logprobs_V > logprobs_V[chosen]).sum()) + 1}
    likeliest = most_likely(logprobs_V, top).tolist() if top else []
    falling = -logprobs_V[likeliest]  # whatever is likelier than one of them is one of them
    ranks.update(zip(likeliest, (np.searchsorted(falling, falling) + 1).tolist(), strict=True))
    return {
        token: Logprob(logprob=float(logprobs_V[token]), rank=rank, text=tokenizer.text_of(token))
        for token, rank in ranks.items()
    }


class PromptLogprobs(Sequence[Logprobs | None]):
    """The reports of a prompt's tokens, one for each; None for the first, and for one that has none yet.

    A report is made when it is asked for: 21 figures of each of 4,000 tokens are 1.3 MB of numbers, and ten
    times as much in objects. So this is what the completions of a prompt share and what processes send.
    """

    __slots__ = ("_known", "_scores", "_texts", "top")

    def __init__(self, tokens: int, top: int) -> None:
        """Nothing is known yet of a prompt of so many tokens, for each of which `top` are to be reported."""
        self.top = top
        self._known = [False] * tokens
        self._scores: Scores | None = None  # [prompt, 1 + top], as soon as there is one
        self._texts: dict[int, str] = {}  # of all tokens named

    def add(self, first: int, scores: Scores, text_of: Callable[[int], str]) -> None:
        """Take in the figures of the tokens from position `first` on; saying it twice changes nothing."""
        if self._scores is None:
            self._scores = Scores.empty(len(self), self.top)
        places = slice(first, first + len(scores.ids))
        self._scores.put(places, scores)
        for token in set(scores.ids.ravel().tolist()) - self._texts.keys() - {NO_TOKEN}:
            self._texts[token] = text_of(token)
        self._known[places] = [True] * len(scores.ids)  # last: other threads read meanwhile

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, place: int) -> Logprobs | None: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Logprobs | None, ...]: ...

    def __getitem__(self, place: int | slice) -> Logprobs | tuple[Logprobs | None, ...] | None:
        if isinstance(place, slice):
            return tuple([self[one] for one in range(*place.indices(len(self)))])
        if not self._known[place]:
            return None
        assert self._scores is not None
        return self._scores.report(place, self._texts.__getitem__)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # it may still grow
