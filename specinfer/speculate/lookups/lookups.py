"""Guesses looked up in texts: what the suffix and the n-gram speculator ask, of all requests at once.

They are answered in plain Python (plain_lookups.py) or, to the last bit alike, by a library
(native_lookups.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from specinfer.speculate.lookups.text_index import NewIndex, TextIndex
from specinfer.tree import TokenTree

LONGEST_MATCH: Final = 32  # tokens; a longer match of a suffix is no better a guess
PLACES: Final = 64  # earlier occurrences of an n-gram that are looked at for branches


class Ask(NamedTuple):
    """What is asked about one request, whose text may have grown since its index has read it."""

    own: TextIndex  # of text[:end], or less: what is missing is read
    text: Sequence[int]
    end: int  # of the text in this step
    path: Sequence[int]  # guessed tokens behind it, which are not read; the tree's root is the last of all
    depth: int  # of the tree, at most
    nodes: int  # the same, the root included
    most: int  # of suffixes: places in each index that vote; of n-grams: branches
    kept: TextIndex | None = None  # of suffixes: earlier answers


class Lookups(Protocol):
    """Looks guesses up for one speculator, with indexes that it has made; one thread at a time may ask."""

    @property
    def new_index(self) -> NewIndex:
        """Makes the indexes."""
        ...

    def suffix_trees(
        self, asks: Sequence[Ask], *, depth_factor: float, min_probability: float
    ) -> list[TokenTree]:
        """A tree for each, best first, as SuffixSpeculator says.

        All of the text is read. A draw's evidence is how many tokens matched before it, how many places vote
        for it, and their share.
        """
        ...

    def ngram_trees(self, asks: Sequence[Ask]) -> list[TokenTree]:
        """A tree for each, a chain a branch, as NgramSpeculator says.

        The text is read but for its last token, as something must follow a match. A draw's evidence is how
        many tokens matched before it.
        """
        ...
