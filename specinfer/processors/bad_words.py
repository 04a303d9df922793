"""Token sequences that may not occur in an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specinfer.errors import RequestError


class BadWords:
    """Bans the last token of each sequence wherever the output ends in the tokens before it."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._words = tuple(dict.fromkeys(tuple(word) for word in words))
        self._longest = max((len(word) for word in self._words), default=0)
        self._output: list[int] = []

    def completions(self, path: Sequence[int]) -> list[int]:
        """The token ids banned after the output so far and then `path`."""
        reach = max(self._longest - 1, 0)
        tail = (*self._output[len(self._output) - min(reach, len(self._output)) :], *path)
        return [word[-1] for word in self._words if _ends_in(tail, word[:-1])]

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in output tokens, in order."""
        self._output.extend(tokens)


def tokenize_bad_words(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Each text as the tokens it has at the start of a word, and, where it differs, behind a space.

    As in vLLM: the second form counts only where the space changes the first token and not the length.
    Raises RequestError on a text the tokenizer has no tokens for.
    """
    found: list[list[int]] = []
    for word in words:
        bare = list(encode(word.lstrip()))
        if not bare:
            raise RequestError(f"bad_words has {word!r}, for which the model has no token; take it out")
        spaced = list(encode(" " + word.lstrip()))
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return found


def _ends_in(tail: Sequence[int], start: Sequence[int]) -> bool:
    return len(start) <= len(tail) and tuple(tail[len(tail) - len(start) :]) == tuple(start)
