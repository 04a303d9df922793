"""How likely the tokens of a prompt were, kept as numbers until somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, overload

from specinfer.request import Logprobs
from specinfer.verify.logprobs import Scores
from specinfer.verify.scan import NO_TOKEN

FIGURE_BYTES: Final = 16  # of one token at one place: id, rank and log-probability


class PromptLogprobs(Sequence[Logprobs | None]):
    """The reports of a prompt's tokens, one for each; None for the first, and for one that has none yet.

    A report is made when it is asked for: 21 figures of each of 4,000 tokens are 1.3 MB of numbers, and ten
    times as much in objects. So this is what the completions of a prompt share and what processes send.
    """

    __slots__ = ("_known", "_scores", "_texts", "_top")

    def __init__(self, tokens: int, top: int) -> None:
        """Nothing is known yet of a prompt of so many tokens, for each of which `top` are to be reported."""
        self._top = top
        self._known = [False] * tokens
        self._scores: Scores | None = None  # [prompt, 1 + top], as soon as there is one
        self._texts: dict[int, str] = {}  # of all tokens named

    @property
    def top(self) -> int:
        """How many of the likeliest tokens are reported at each place."""
        return self._top

    def add(self, first: int, scores: Scores, text_of: Callable[[int], str]) -> None:
        """Take in the figures of the tokens from position `first` on; saying it twice changes nothing."""
        if self._scores is None:
            self._scores = Scores.empty(len(self), self._top)
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
