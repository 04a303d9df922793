"""Lookup speculation by exhaustive search: the oracle of kernels/cpu/lookups.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specinfer.speculate.lookups.lookup import LONGEST_MATCH, LookupOptions, match_confidence
from specinfer.speculate.lookups.text_index import LENGTHS
from specinfer.tree import Draw, DrawRule

VOTERS = 16  # voting positions, of the own text and of earlier answers

Texts = Sequence[Sequence[int]]
Tree = tuple[tuple[int, ...], tuple[int, ...], list[Draw]]


class _Vote(NamedTuple):
    """The continuation of one earlier occurrence, as far as its match supports it."""

    tokens: Sequence[int]
    matched: int  # tokens before the position

    @property
    def weight(self) -> int:
        return self.matched**2


class _Candidate(NamedTuple):
    """A node that may be added."""

    weight: int
    made: int  # number of candidates before it
    parent: int
    depth: int
    token: int
    matched: int
    share: float
    voters: list[_Vote]


def lookup_tree(text: Sequence[int], kept: Texts, options: LookupOptions, depth: int, nodes: int) -> Tree:
    """Return token ids, parents and draws of the proposed tree after `text`.

    Args:
        text: of the request, up to this step's end.
        kept: earlier answers, oldest first.
        options: all but `memory` and the limits of the request.
        depth: largest depth of the tree.
        nodes: largest number of nodes, root included.
    """
    votes: list[_Vote] = []
    tail = text[-LONGEST_MATCH:]
    for texts in ((text,), kept):
        for stop, one, matched in occurrences(texts, tail, options.min_match, VOTERS):
            reach = min(depth, int(max(1.0, min(float(depth), options.depth_factor * matched))))
            follows = list(one[stop : stop + reach])
            period = len(follows)
            while one is text and len(follows) < reach:  # the match continues into itself
                follows.append(follows[len(follows) - period])
            votes.append(_Vote(follows, matched))
    return _grown(votes, text[-1], options.min_probability, nodes if depth > 0 else 1)


def occurrences(
    texts: Texts, tail: Sequence[int], min_match: int, limit: int
) -> list[tuple[int, Sequence[int], int]]:
    """Return earlier occurrences of a suffix of `tail`: position and text of the continuation, matched
    tokens.

    Longer n-grams come first; among equal lengths newer ones. Examines twice `limit` of them.
    """
    found: list[tuple[int, Sequence[int], int]] = []
    lengths = [min_match, *(length for length in LENGTHS if length > min_match)]
    for length in reversed(lengths):
        if length > len(tail):
            continue
        ends = [
            (stop, text)
            for text in reversed(texts)
            for stop in range(len(text), length - 1, -1)
            if text[stop - length : stop] == tail[len(tail) - length :]
        ]
        for stop, text in ends[: 2 * limit]:
            known = any(stop == other and text is one for other, one, _ in found)
            if stop < len(text) and not known and len(found) < limit:
                found.append((stop, text, common_end(text[:stop], tail)))
    return found


def common_end(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common suffix."""
    matched = 0
    while matched < min(len(one), len(other)) and one[-1 - matched] == other[-1 - matched]:
        matched += 1
    return matched


def _grown(votes: list[_Vote], root: int, min_probability: float, nodes: int) -> Tree:
    """Return the nodes with most votes, best first; among equal votes the earlier voter's comes first."""
    token_ids, parents, draws = [root], [-1], list[Draw]()
    least = min_probability * sum(vote.weight for vote in votes)
    waiting: list[_Candidate] = []
    made, node, depth, through = 0, 0, 0, votes
    while len(token_ids) < nodes:
        total = sum(vote.weight for vote in through)
        below: dict[int, list[_Vote]] = {}
        for vote in through:
            if depth < len(vote.tokens):
                below.setdefault(vote.tokens[depth], []).append(vote)
        for token, voters in below.items():
            weight = sum(vote.weight for vote in voters)
            if weight >= least:
                made += 1
                matched = max(vote.matched for vote in voters) + depth
                waiting.append(
                    _Candidate(weight, made, node, depth + 1, token, matched, weight / total, voters)
                )
        if not waiting:
            break
        best = max(waiting, key=lambda one: (one.weight, -one.made))
        waiting.remove(best)
        node, depth, through = len(token_ids), best.depth, best.voters
        token_ids.append(best.token)
        parents.append(best.parent)
        sure = best.share * match_confidence(best.matched)
        seen = (float(best.matched), float(len(through)), best.share)
        draws.append(Draw(best.parent, node, "lookup", DrawRule.POINT_MASS, None, sure, seen))
    return tuple(token_ids), tuple(parents), draws
