"""Guesses what a request's grammar leaves no choice about: brackets, keys, quotes."""

from __future__ import annotations

from typing import Final

from specinfer.errors import RequestError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.speculator import Speculator
from specinfer.tree import TokenTree, TreeBuilder

_CONFIDENCE: Final = 0.9  # the text is certain, how it is cut into tokens is not


class GrammarSpeculator(Speculator):
    """Proposes the text the grammar forces, as the tokenizer writes it; needs no model and no memory.

    The bytes are certain, the cut into tokens is a guess: the target has the last word, as always.
    """

    name = "grammar"

    def __init__(self, *, depth: int) -> None:
        self._depth = depth

    def most_nodes(self, request: Request) -> int:
        """One chain, where the text has a form."""
        return self._depth if request.params.structured_output is not None else 0

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One chain of forced tokens per entry, point masses; the root alone where there is a choice."""
        return [self._tree(entry) for entry in plan.tree_entries]

    def _tree(self, entry: PlanEntry) -> TokenTree:
        builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
        grammar = entry.processors.grammar if entry.processors is not None else None
        limit = min(self._depth, entry.max_depth, entry.max_nodes - 1)
        node: int | None = 0
        if grammar is None or limit < 1:
            return builder.build()
        try:
            forced = grammar.forced((), limit)
        except RequestError:  # too complex to follow: the target's walk will meet it, and say so
            return builder.build()
        for token in forced:
            assert node is not None
            node = builder.add(node, token, self.name, confidence=_CONFIDENCE)
        return builder.build()
