"""N-gram speculation (prompt lookup): what followed these tokens the last time they stood in the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.calibration import SUREST_MATCH, match_confidence
from specinfer.speculate.speculator import Outcome
from specinfer.speculate.text_index import TextIndex
from specinfer.tree import TokenTree, TreeBuilder
from specinfer.tree.token_tree import single_node

PLACES: Final = 64  # earlier occurrences that are looked at for branches, for each length of an n-gram


class NgramSpeculator:
    """Guesses that the text goes on as it did after the longest earlier match of its last tokens.

    Up to `branches` earlier occurrences become branches of the tree, longer matches and then newer ones
    first, each with a next token of its own; one that lies behind PLACES others is not seen. A guess that
    runs into the end of the text goes on into itself, so a loop is guessed to loop. A running request's text
    takes 4 bytes a token here and 12 to 24 for each length from `shortest` to `longest`.
    """

    def __init__(
        self, *, shortest: int, longest: int, branches: int, depth: int, name: str = "ngram"
    ) -> None:
        self.name = name
        self._lengths = range(longest, shortest - 1, -1)  # longer matches are better
        self._branches = branches
        self._depth = depth
        self._indexes: dict[str, TextIndex] = {}

    def most_nodes(self, request: Request) -> int:
        """A chain per branch."""
        return self._branches * self._depth

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One tree per entry: a chain of at most `depth` tokens per branch, all point masses.

        A prompt is read in step with the target. A draw's evidence is how many tokens matched before it.
        """
        for entry in plan.entries:
            self._read(entry)
        return [self._tree(entry) for entry in plan.tree_entries]

    def extend(self, entry: PlanEntry, path: Sequence[int], most: int) -> TokenTree:
        """A chain, as it followed the newest of the longest earlier matches of the text with `path`."""
        text, end = entry.token_ids, entry.end
        builder = TreeBuilder(path[-1], most)
        tail = array("i", [*text[max(0, end - SUREST_MATCH) : end], *path][-SUREST_MATCH:])
        index = self._indexes[entry.request.request_id]
        start = next((place for n in self._lengths for place in index.places(tail, n, 1)), None)
        if start is not None:
            depth = min(self._depth, most - 1)
            followed = [*text[start : min(start + depth, end)]]
            if len(followed) < depth:
                followed += path[: depth - len(followed)]
            self._add_chain(builder, _looped(followed, depth), _matched(text, start, tail))
        return builder.build()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget the index of requests that ended."""
        for outcome in outcomes:
            if outcome.finished:
                self._indexes.pop(outcome.request_id, None)

    def _read(self, entry: PlanEntry) -> None:
        """Index the text of this step and before; not its last token, as something must follow a match."""
        index = self._indexes.get(entry.request.request_id)
        if index is None:
            index = self._indexes[entry.request.request_id] = TextIndex(self._lengths)
        index.extend(entry.token_ids[index.num_tokens : entry.end - 1])

    def _tree(self, entry: PlanEntry) -> TokenTree:
        text, end = entry.token_ids, entry.end
        index = self._indexes[entry.request.request_id]
        depth = min(self._depth, entry.max_depth)
        starts = self._matches(index, text, end)
        if not starts or depth < 1 or entry.max_nodes < 2:
            return single_node(text[end - 1])
        builder = TreeBuilder(text[end - 1], entry.max_nodes)
        for start in starts:
            matched = _matched(text, start, text[max(0, end - SUREST_MATCH) : end])
            followed = [*text[start : min(start + depth, end)]]
            self._add_chain(builder, _looped(followed, depth), matched)
        return builder.build()

    def _add_chain(self, builder: TreeBuilder, guess: Sequence[int], matched: int) -> None:
        """Draw a branch, as far as the tree has room for it."""
        node = 0
        for i, token in enumerate(guess):
            sure, seen = match_confidence(matched + i), (float(matched + i),)
            added = builder.add(node, token, self.name, confidence=sure, evidence=seen)
            if added is None:
                return
            node = added

    def _matches(self, index: TextIndex, text: Sequence[int], end: int) -> list[int]:
        """The positions after the best earlier occurrences of the last tokens, no next token twice."""
        tail = array("i", text[max(0, end - self._lengths[0]) : end])
        found: dict[int, int] = {}  # next token -> where it stands
        for length in self._lengths:
            for place in index.places(tail, length, PLACES):
                found.setdefault(text[place], place)
                if len(found) == self._branches:
                    return list(found.values())
        return list(found.values())


def _matched(text: Sequence[int], start: int, tail: Sequence[int]) -> int:
    """How many tokens before `start` are the same as at the end of `tail`."""
    most = min(start, len(tail))
    matched = 0
    while matched < most and text[start - 1 - matched] == tail[-1 - matched]:
        matched += 1
    return matched


def _looped(guess: list[int], depth: int) -> list[int]:
    """A guess that runs into the end of the text goes on into itself, up to `depth` tokens."""
    period = len(guess)
    while len(guess) < depth:
        guess.append(guess[len(guess) - period])
    return guess
