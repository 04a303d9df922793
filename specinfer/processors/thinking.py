"""Thinking: ends a text's thinking once it has used its budget of tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specinfer.sampling_params import ThinkingBudget


class _Place(NamedTuple):
    """A place in a text, before or within thinking."""

    inside: bool
    tail: bytes  # the end of the text, which may be the start of a delimiter
    used: int = 0  # tokens of thinking
    forced: int = 0  # tokens of the ending that are in the text


class ThinkingState:
    """One request's thinking: how much of it there is on every path below the committed text.

    Thinking ends by itself with its closing delimiter, however the tokenizer spells it. Once the budget is
    used, the tokens of `budget.ending` must follow, one by one, and those of `budget.barred` do not begin it
    again. Only `commit` moves the position.
    """

    def __init__(self, budget: ThinkingBudget, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` returns a token's bytes; those of a special token are its name."""
        self._budget = budget
        self._bytes_of = bytes_of
        self._open, self._close = budget.open.encode(), budget.close.encode()
        self._place: _Place | None = _Place(budget.started, b"")

    @property
    def done(self) -> bool:
        """True if the rest of the text is free, whatever it is."""
        return self._place is None

    def required(self, path: Sequence[int] = ()) -> int | None:
        """Return the only token that may follow the text and `path`; None if the budget excludes none."""
        place = self._spent(path)
        return self._budget.ending[place.forced] if place is not None and place.inside else None

    def barred(self, path: Sequence[int] = ()) -> Sequence[int]:
        """Return the tokens that may not follow the text and `path`, because they begin thinking again."""
        place = self._spent(path) if self._budget.barred else None
        if place is None or place.inside or not place.tail.endswith(self._budget.head.encode()):
            return ()
        return self._budget.barred

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; each must be allowed."""
        for token in tokens:
            if self._place is not None:
                self._place = self._after(self._place, token)

    def _spent(self, path: Sequence[int]) -> _Place | None:
        """Return the place after the text and `path` if the budget is used there and matters."""
        place = self._place
        if place is None or (not place.forced and place.used + len(path) < self._budget.tokens):
            return None
        for token in path:
            place = self._after(place, token)
            if place is None:
                return None
        return place if place.used >= self._budget.tokens else None

    def _is_ending(self, place: _Place) -> bool:
        return place.inside and place.used >= self._budget.tokens

    def _after(self, place: _Place, token: int) -> _Place | None:
        """Return the place after one more token; None if no thinking follows."""
        if self._is_ending(place):
            place = place._replace(forced=place.forced + 1)
            return place if place.forced < len(self._budget.ending) else self._behind(place)
        text = place.tail + self._bytes_of(token)
        if place.inside:
            if self._close in text:
                return self._behind(place)
            return _Place(True, _end(text, self._close), place.used + 1)
        text = text if self._budget.repeats else text.lstrip()
        at = text.find(self._open)
        if at >= 0 if self._budget.repeats else at == 0:
            return _Place(True, text[at + len(self._open) :], place.used)
        if self._budget.repeats:
            return _Place(False, _end(text, self._open), place.used)
        return _Place(False, text) if self._open.startswith(text) else None

    def _behind(self, place: _Place) -> _Place | None:
        return _Place(False, b"", place.used) if self._budget.repeats else None


def _end(text: bytes, delimiter: bytes) -> bytes:
    """Return the end of a text that may be the start of a delimiter which it does not contain."""
    return text[max(0, len(text) - len(delimiter) + 1) :]
