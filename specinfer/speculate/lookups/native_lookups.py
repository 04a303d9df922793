"""Guesses that are looked up by a library (cpu/lookups.cpp), a call for all requests of a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref
from functools import partial
from typing import Any, Final, cast

from specinfer.kernels.library import Library, LookedUpArgs, LookupRules
from specinfer.speculate.lookups.lookups import LONGEST_MATCH, PLACES, Ask
from specinfer.speculate.lookups.matches import SUREST_MATCH
from specinfer.speculate.lookups.native_text_index import NativeTextIndex, refuse
from specinfer.speculate.lookups.text_index import NewIndex
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.draw import Run, Runs

_MOST: Final = 1 << 16  # nodes of a tree: more make no difference
_RULE: Final = DrawRule.POINT_MASS
# An Ask about indexes that NativeLookups has made.
_NativeAsk = tuple[NativeTextIndex, Sequence[int], int, Sequence[int], int, int, int, NativeTextIndex | None]


class NativeLookups:
    """`Lookups` for the speculator of that name."""

    def __init__(self, name: str, library: Library) -> None:
        self._name = name
        self._library = library
        self.new_index: NewIndex = partial(NativeTextIndex, library)
        self._of_suffixes = LookupRules(longest=LONGEST_MATCH, surest=SUREST_MATCH)
        self._of_ngrams = byref(LookupRules(longest=SUREST_MATCH, surest=SUREST_MATCH, places=PLACES))
        self._make_room(256)

    def suffix_trees(
        self, asks: Sequence[Ask], *, depth_factor: float, min_probability: float
    ) -> list[TokenTree]:
        """As Lookups says."""
        rules = self._of_suffixes
        rules.depth_factor, rules.min_probability = depth_factor, min_probability
        self._ask(self._library.suffix_trees, byref(rules), asks, 0)
        return self._trees(asks, 3)

    def ngram_trees(self, asks: Sequence[Ask]) -> list[TokenTree]:
        """As Lookups says."""
        self._ask(self._library.ngram_trees, self._of_ngrams, asks, 1)
        return self._trees(asks, 1)

    def _ask(self, look_up: Any, rules: Any, asks: Sequence[Ask], unread: int) -> None:
        """Have texts read but for their last `unread` tokens, 0 or 1, and guesses looked up."""
        told: list[int] = []
        tokens: list[int] = []
        grown: list[tuple[NativeTextIndex, int]] = []
        room = len(asks)
        for own, text, end, path, depth, nodes, most, kept in cast(Sequence[_NativeAsk], asks):
            stop = end - unread
            read = stop - own.num_tokens
            if read > 0:
                tokens += text[own.num_tokens : stop]
                grown.append((own, stop))
            else:
                read = 0
            if unread:
                tokens.append(text[stop])
            tokens += path
            earlier = 0 if kept is None else kept.address
            told += (own.address, earlier, read, unread + len(path), depth, nodes, most)
            room += nodes
        if room > self._room:
            self._make_room(min(room, _MOST * len(asks)))
        lying, numbers = array("i", tokens), array("q", told)
        to, at, behind = self._to, numbers.buffer_info()[0], lying.buffer_info()[0]
        if not look_up(rules, at, len(asks), behind, len(lying), to):
            for own, _ in grown:
                own.recount()  # some may have been read before memory was full
            refuse(lying)
        for own, stop in grown:
            own.num_tokens = stop

    def _trees(self, asks: Sequence[Ask], pieces: int) -> list[TokenTree]:
        """The trees that were found, each draw with so many pieces of evidence."""
        room, nodes, name = self._room, self._nodes, self._name
        trees: list[TokenTree] = []
        first = 0
        for ask, count in zip(asks, nodes[: len(asks)], strict=True):
            root = ask.path[-1] if ask.path else ask.text[ask.end - 1]
            if count == 0:
                trees.append(TokenTree((root,), (-1,)))
                continue
            end = first + count
            parents = nodes[room + first : room + end].tolist()
            tokens = nodes[2 * room + first : 2 * room + end]
            confidences = self._chances[first:end].tolist()
            evidence = self._chances[room + pieces * first : room + pieces * end].tolist()
            run = Run(name, _RULE, parents, range(1, count + 1), confidences, evidence, pieces)
            trees.append(TokenTree((root, *tokens), (-1, *parents), Runs((run,))))
            first = end
        return trees

    def _make_room(self, room: int) -> None:
        """Memory for so many nodes of trees, and as many trees, which is used again in each step."""
        self._room = room
        self._nodes = array("i", bytes(4 * 3 * room))  # counts, parents, tokens
        self._chances = array("d", bytes(8 * 4 * room))  # confidences, evidence
        at, chance = self._nodes.buffer_info()[0], self._chances.buffer_info()[0]
        self._to = byref(LookedUpArgs(room, at, at + 4 * room, at + 8 * room, chance, chance + 8 * room))
