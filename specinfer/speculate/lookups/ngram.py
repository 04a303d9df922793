"""N-gram speculation (prompt lookup): what followed these tokens the last time they stood in the text."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.kernels.library import Library
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.lookups.lookups import Ask, Lookups
from specinfer.speculate.lookups.native_lookups import NativeLookups
from specinfer.speculate.lookups.plain_lookups import PlainLookups
from specinfer.speculate.lookups.text_index import TextIndex
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.tree import TokenTree


class NgramSpeculator(Speculator):
    """Guesses that the text goes on as it did after the longest earlier match of its last tokens.

    Up to `branches` earlier occurrences become branches of the tree, longer matches and then newer ones
    first, each with a next token of its own; one that lies behind PLACES others is not seen. A guess that
    runs into the end of the text goes on into itself, so a loop is guessed to loop. A running request's text
    takes 4 bytes a token here and 12 to 24 for each length from `shortest` to `longest`.
    """

    def __init__(
        self,
        *,
        shortest: int,
        longest: int,
        branches: int,
        depth: int,
        name: str = "ngram",
        library: Library | None = None,
    ) -> None:
        """`library` looks guesses up, plain Python without one."""
        self.name = name
        self._lookups: Lookups = PlainLookups(name) if library is None else NativeLookups(name, library)
        self._lengths = range(shortest, longest + 1)
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
        trees = self._lookups.ngram_trees([self._ask(entry) for entry in plan.entries])
        if len(plan.tree_entries) == len(trees):
            return trees
        return [tree for entry, tree in zip(plan.entries, trees, strict=True) if entry.has_tree]

    def extend(self, entry: PlanEntry, path: Sequence[int], most: int) -> TokenTree:
        """A chain, as it followed the newest of the longest earlier matches of the text with `path`."""
        index, depth = self._indexes[entry.request.request_id], min(self._depth, most - 1)
        [tree] = self._lookups.ngram_trees([Ask(index, entry.token_ids, entry.end, path, depth, most, 1)])
        return tree

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget the index of requests that ended."""
        for outcome in outcomes:
            if outcome.finished:
                self._indexes.pop(outcome.request_id, None)

    def _ask(self, entry: PlanEntry) -> Ask:
        """What follows the text of this step."""
        index = self._indexes.get(entry.request.request_id)
        if index is None:
            index = self._indexes[entry.request.request_id] = self._lookups.new_index(self._lengths)
        depth = min(self._depth, entry.max_depth)
        return Ask(index, entry.token_ids, entry.end, (), depth, entry.max_nodes, self._branches)
