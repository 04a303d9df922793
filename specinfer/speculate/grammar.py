"""GrammarSpeculator: guesses the text that a request's grammar forces, such as brackets, keys and quotes."""

from typing import Final

from specinfer.errors import RequestError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.speculator import Speculator
from specinfer.tree import TokenTree, TreeBuilder

_CONFIDENCE: Final = 0.9  # the text is certain, its tokenization is not


class GrammarSpeculator(Speculator):
    """Proposes the text that the grammar forces, as the tokenizer encodes it; needs no model.

    The bytes are certain and their tokenization is a guess, which the target verifies.
    """

    name = "grammar"

    def __init__(self, *, depth: int) -> None:
        self._depth = depth

    def max_nodes(self, request: Request) -> int:
        """Return the length of one chain if the request has a form, else 0."""
        return self._depth if request.params.structured_output is not None else 0

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Return a chain of forced tokens per entry, as point masses; only the root if nothing is forced."""
        return [self._tree(entry) for entry in plan.tree_entries]

    def _tree(self, entry: PlanEntry) -> TokenTree:
        builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
        grammar = entry.processors.grammar if entry.processors is not None else None
        limit = min(self._depth, entry.max_depth, entry.max_nodes - 1)
        if grammar is None or limit < 1:
            return builder.build()
        try:
            forced = grammar.forced((), limit)
        except RequestError:  # the grammar is too complex; verification raises this error for the request
            return builder.build()
        for node, token in enumerate(forced):
            builder.add(node, token, self.name, confidence=_CONFIDENCE)
        return builder.build()
