"""Guesses that are looked up in plain Python: the oracle of the library, and where there is none."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from specinfer.speculate.lookups.lookups import LONGEST_MATCH, PLACES, Ask
from specinfer.speculate.lookups.matches import SUREST_MATCH, match_confidence
from specinfer.speculate.lookups.plain_text_index import PlainTextIndex
from specinfer.speculate.lookups.text_index import NewIndex, TextIndex
from specinfer.tree import Draw, DrawRule, TokenTree, TreeBuilder
from specinfer.tree.draw import as_runs
from specinfer.tree.token_tree import single_node

_SURE: Final = [match_confidence(tokens) for tokens in range(SUREST_MATCH + 1)]


class _Vote(NamedTuple):
    """What followed at one place, as far as its match supports a guess."""

    tokens: Sequence[int]
    matched: int  # tokens before the place
    weight: int


class PlainLookups:
    """`Lookups` for the speculator of that name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.new_index: NewIndex = PlainTextIndex

    def suffix_trees(
        self, asks: Sequence[Ask], *, depth_factor: float, min_probability: float
    ) -> list[TokenTree]:
        """As Lookups says."""
        trees = list[TokenTree]()
        for ask in asks:
            _read(ask.own, ask.text, ask.end)
            root = ask.path[-1] if ask.path else ask.text[ask.end - 1]
            if ask.depth < 1 or ask.nodes < 2:
                trees.append(single_node(root))
            else:
                trees.append(self._grow(_votes(ask, depth_factor), root, ask.nodes, min_probability))
        return trees

    def ngram_trees(self, asks: Sequence[Ask]) -> list[TokenTree]:
        """As Lookups says."""
        trees = list[TokenTree]()
        for ask in asks:
            _read(ask.own, ask.text, ask.end - 1)
            builder = TreeBuilder(ask.path[-1] if ask.path else ask.text[ask.end - 1], ask.nodes)
            if ask.depth > 0 and ask.nodes > 1:
                self._add_chains(builder, ask)
            trees.append(builder.build())
        return trees

    def _grow(self, votes: list[_Vote], root: int, max_nodes: int, min_probability: float) -> TokenTree:
        """The nodes most votes go through, best first; the earlier voter is better when votes are equal."""
        token_ids, parents, draws = [root], [-1], list[Draw]()

        def draw(parent: int, token: int, matched: int, voters: int, share: float) -> int:
            node = len(token_ids)
            token_ids.append(token)
            parents.append(parent)
            sure, seen = share * _SURE[min(matched, SUREST_MATCH)], (float(matched), float(voters), share)
            draws.append(Draw(parent, node, self._name, DrawRule.POINT_MASS, None, sure, seen))
            return node

        least = min_probability * sum([vote.weight for vote in votes])
        # Likeliest first, then oldest: -weight, number, parent, depth, token, longest match, share, voters.
        waiting: list[tuple[int, int, int, int, int, int, float, list[_Vote]]] = []
        made = 0
        node, depth, through = 0, 0, votes
        while len(token_ids) < max_nodes:
            if len(through) == 1 and not waiting:  # and so it stays: one place alone says what follows
                tokens, matched, _ = through[0]
                for token in tokens[depth : depth + max_nodes - len(token_ids)]:
                    node = draw(node, token, matched + depth, 1, 1.0)
                    depth += 1
                break
            below: dict[int, list[_Vote]] = {}
            for vote in through:
                if depth < len(vote.tokens):
                    below.setdefault(vote.tokens[depth], []).append(vote)
            total = sum([vote.weight for vote in through])
            for token, voters in below.items():
                weight = sum([vote.weight for vote in voters])
                if weight >= least:
                    made += 1
                    matched = max([vote.matched for vote in voters]) + depth
                    heapq.heappush(
                        waiting, (-weight, made, node, depth + 1, token, matched, weight / total, voters)
                    )
            if not waiting:
                break
            _, _, parent, depth, token, matched, share, through = heapq.heappop(waiting)
            node = draw(parent, token, matched, len(through), share)
        return TokenTree(tuple(token_ids), tuple(parents), as_runs(draws))

    def _add_chains(self, builder: TreeBuilder, ask: Ask) -> None:
        """Draw a chain for each of the best places, as far as the tree has room."""
        text, end = ask.text, ask.end
        longest = max(ask.own.lengths[-1], SUREST_MATCH)
        tail = array("i", [*text[max(0, end - longest) : end], *ask.path])
        for start in _starts(ask, tail):
            matched = _matched(text, start, tail[-SUREST_MATCH:])
            guess = [*text[start : min(start + ask.depth, end)]]
            guess += ask.path[: ask.depth - len(guess)]
            _loop(guess, ask.depth)
            node = 0
            for i, token in enumerate(guess):
                sure, seen = match_confidence(matched + i), (float(matched + i),)
                added = builder.add(node, token, self._name, confidence=sure, evidence=seen)
                if added is None:
                    return
                node = added


def _read(index: TextIndex, text: Sequence[int], end: int) -> None:
    """Have the index read what it has not of text[:end]."""
    if index.num_tokens < end:
        index.extend(text[index.num_tokens : end])


def _votes(ask: Ask, depth_factor: float) -> list[_Vote]:
    """What followed the end of the text with the path, in the text and in earlier answers."""
    votes: list[_Vote] = []
    tail = ask.own.tail(LONGEST_MATCH)
    if ask.path:
        tail.extend(ask.path)
        tail = tail[-LONGEST_MATCH:]
    for index in (ask.own, ask.kept):
        if index is None:
            continue
        for position, matched in index.occurrences(tail, ask.most):
            reach = min(ask.depth, max(1, int(depth_factor * matched)))
            tokens = index.following(position, reach)
            if index is ask.own and len(tokens) < reach:
                tokens.extend(ask.path[: reach - len(tokens)])
                _loop(tokens, reach)
            votes.append(_Vote(tokens, matched, matched**2))
    return votes


def _starts(ask: Ask, tail: array[int]) -> list[int]:
    """The places of the best earlier occurrences of the end of `tail`, no next token twice."""
    index, text = ask.own, ask.text
    found: dict[int, int] = {}  # next token -> where it stands
    for length in reversed(index.lengths):
        for place in index.places(tail, length, PLACES):
            found.setdefault(text[place], place)
            if len(found) == ask.most:
                return list(found.values())
    return list(found.values())


def _matched(text: Sequence[int], start: int, tail: Sequence[int]) -> int:
    """How many tokens before `start` are the same as at the end of `tail`."""
    most = min(start, len(tail))
    matched = 0
    while matched < most and text[start - 1 - matched] == tail[-1 - matched]:
        matched += 1
    return matched


def _loop(tokens: list[int] | array[int], reach: int) -> None:
    """A guess that runs into the end of the text it comes from goes on into itself."""
    period = len(tokens)
    while len(tokens) < reach:
        tokens.append(tokens[len(tokens) - period])
