"""Log-probabilities of output and prompt tokens; those of a prompt stay arrays until they are read."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from specinfer.request import Logprob, Logprobs
from specinfer.sampling_params import SamplingParams
from specinfer.tokenizer import Tokenizer
from specinfer.verify.scan import NO_TOKEN, LogitBlock, Scan
from specinfer.verify.target_law import most_likely, target_law

LOGPROB_BYTES: Final = 16  # bytes for one token at one position: id, rank and log-probability


class Scores(NamedTuple):
    """Log-probabilities of R rows' tokens and of the likeliest tokens.

    They are those of the model's distribution, as from `raw_logprobs`.
    """

    ids: NDArray[np.int32]  # [R, 1 + top]; NO_TOKEN after the last
    logprobs: NDArray[np.float64]  # [R, 1 + top]
    ranks: NDArray[np.int32]  # [R, 1 + top]; 1 + the number of likelier tokens

    @classmethod
    def empty(cls, rows: int, top: int) -> Self:
        """Return arrays for `rows` rows without values."""
        shape = (rows, 1 + top)
        return cls(np.full(shape, NO_TOKEN, np.int32), np.zeros(shape), np.zeros(shape, np.int32))

    def put(self, places: slice | NDArray[np.int64], part: Self) -> None:
        """Write the rows of `part` to the rows `places` of this, in place."""
        self.ids[places], self.logprobs[places], self.ranks[places] = part

    def report(self, row: int, text_of: Callable[[int], str]) -> Logprobs:
        """Return the log-probabilities at a row, the row's token first; `text_of` decodes a token."""
        columns = self.ids[row].tolist(), self.logprobs[row].tolist(), self.ranks[row].tolist()
        return {
            token: Logprob(logprob, rank, text_of(token))
            for token, logprob, rank in zip(*columns, strict=True)
            if token != NO_TOKEN
        }


def score(
    logits: LogitBlock, rows: NDArray[np.int64], tokens: NDArray[np.int64], top: int, scan: Scan
) -> Scores:
    """Return the scores of `tokens[i]` at `rows[i]` of the block, and of the `top` likeliest tokens there.

    The numbers equal those of `report(raw_logprobs(...))`, with one scan of all rows and one sum over each.
    """
    scores = Scores.empty(len(rows), top)
    scores.ids[:, 0] = tokens
    if top:
        likeliest = scan.likeliest(logits, rows, top, np.ones(len(rows)))
        values = likeliest.values
        scores.ids[:, 1:] = likeliest.ids
        places = np.arange(1, top + 1)
        begins = np.ones(values.shape, dtype=np.bool_)  # start of a run of equal values, which share a rank
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
    """Return the model's log-probabilities, [vocab], without temperature, processors and filters."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def processed_logprobs(logits_V: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Return the log-probabilities of the distribution that is sampled, [vocab]; -inf for excluded tokens.

    `logits_V` are the processed logits. At temperature 0 that distribution is a point mass; the result is
    then that of temperature 1 without filters, as in vLLM: the argmax is the same, and it shows the margin.
    """
    if params.greedy:
        return raw_logprobs(logits_V)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(target_law(logits_V, params).dense()))


def report(logprobs_V: NDArray[np.float64], chosen: int, top: int, tokenizer: Tokenizer) -> Logprobs:
    """Return the log-probabilities of the chosen token and of the `top` likeliest, the chosen one first.

    A token's rank is 1 + the number of likelier tokens.
    """
    ranks = {chosen: int((logprobs_V > logprobs_V[chosen]).sum()) + 1}
    likeliest = most_likely(logprobs_V, top).tolist() if top else []
    falling = -logprobs_V[likeliest]  # a token that is likelier than one of these is itself in the list
    ranks.update(zip(likeliest, (np.searchsorted(falling, falling) + 1).tolist(), strict=True))
    return {
        token: Logprob(logprob=float(logprobs_V[token]), rank=rank, text=tokenizer.text_of(token))
        for token, rank in ranks.items()
    }


class PromptLogprobs(Sequence[Logprobs | None]):
    """Log-probabilities of a prompt's tokens; None for the first, and for tokens not computed yet.

    An item is made when it is read: 21 entries for each of 4,000 tokens are 1.3 MB as arrays, and ten times
    as much as objects. The completions of a prompt share this object, and processes send it.
    """

    __slots__ = ("_known", "_scores", "_texts", "top")

    def __init__(self, tokens: int, top: int) -> None:
        """Start without values, for `tokens` prompt tokens and the `top` likeliest tokens at each."""
        self.top = top
        self._known = [False] * tokens
        self._scores: Scores | None = None  # [prompt, 1 + top]; None before the first `add`
        self._texts: dict[int, str] = {}  # text of every token in the scores

    def add(self, first: int, scores: Scores, text_of: Callable[[int], str]) -> None:
        """Store the scores of the tokens from position `first` on, in place; repeating it changes nothing."""
        if self._scores is None:
            self._scores = Scores.empty(len(self), self.top)
        places = slice(first, first + len(scores.ids))
        self._scores.put(places, scores)
        for token in set(scores.ids.ravel().tolist()) - self._texts.keys() - {NO_TOKEN}:
            self._texts[token] = text_of(token)
        self._known[places] = [True] * len(scores.ids)  # last, as other threads may read at any time

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
