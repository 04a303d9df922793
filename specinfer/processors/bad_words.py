"""Token sequences that may not occur in an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specinfer.errors import RequestError


class BadWords:
    """Bans the last token of each sequence wherever the output ends in the tokens before it."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._bans: dict[tuple[int, ...], list[int]] = {}  # beginning of sequences -> their last tokens
        for *start, last in dict.fromkeys(map(tuple, words)):
            self._bans.setdefault(tuple(start), []).append(last)
        self._lengths = sorted({len(start) for start in self._bans})
        self._tail: tuple[int, ...] = ()  # of the output, as long as the longest beginning

    def completions(self, path: Sequence[int]) -> list[int]:
        """The token ids banned after the output so far and then `path`: a look-up per length."""
        tail = (*self._tail, *path)
        lengths = [n for n in self._lengths if n <= len(tail)]
        return [token for n in lengths for token in self._bans.get(tail[len(tail) - n :], ())]

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in output tokens, in order."""
        tail = (*self._tail, *tokens)
        self._tail = tail[max(0, len(tail) - max(self._lengths, default=0)) :]


def tokenize_bad_words(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Each text as the tokens it has at the start of an answer, and as those it has behind a space.

    Raises RequestError on a text the tokenizer has no tokens for.
    """
    found: list[list[int]] = []
    for word in words:
        bare = list(encode(word.lstrip()))
        if not bare:
            raise RequestError(f"bad_words has {word!r}, for which the model has no token; take it out")
        spaced = list(encode(" " + word.lstrip()))
        found.extend([bare] if spaced == bare else [bare, spaced])
    return found
