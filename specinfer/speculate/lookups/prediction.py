"""PredictionSpeculator: guesses from the caller's predicted output."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.errors import ConfigError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.lookups.alignment import SIDE_DEPTH, Alignment
from specinfer.speculate.lookups.lookup import match_confidence
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.tree import TokenTree, TreeBuilder
from specinfer.tree.token_tree import single_node


class PredictionSpeculator(Speculator):
    """Guesses that the output is `request.prediction`, and realigns with it after each difference.

    The output starts at token 0 of its prediction. While both agree, the tree is one chain of `depth` tokens.
    After a difference it has up to `branches` continuations, all but the first of them short (alignment.py),
    so at most 1 + depth + (branches - 1) * SIDE_DEPTH nodes. A request without a prediction gets only the
    root, and no state. Raises ConfigError for an option outside its range.
    """

    def __init__(self, *, depth: int = 15, branches: int = 4, name: str = "prediction") -> None:
        for option, value in (("depth", depth), ("branches", branches)):
            if value < 1:
                raise ConfigError(f"{option} of the prediction speculator is {value}; allowed: 1 or more")
        self.name = name
        self._depth = depth
        self._branches = branches
        self._alignments: dict[str, Alignment] = {}

    def max_nodes(self, request: Request) -> int:
        """Return the nodes of one chain and its short branches, or 0 without a prediction."""
        return self._depth + (self._branches - 1) * SIDE_DEPTH if request.prediction else 0

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Return one tree per tree entry, the likeliest guess first, with point masses.

        A draw's evidence is the number of tokens before it that agree with its place in the prediction.
        """
        return [self._tree(entry) for entry in plan.tree_entries]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Drop the state of ended requests; committed tokens are read by the next `propose`."""
        for outcome in outcomes:
            if outcome.finished:
                self._alignments.pop(outcome.request_id, None)

    def check_integrity(self) -> None:
        """Raise IntegrityError if a request's place in its prediction does not fit its output."""
        for alignment in self._alignments.values():
            alignment.check_integrity()

    def _tree(self, entry: PlanEntry) -> TokenTree:
        request, text, end = entry.request, entry.token_ids, entry.end
        depth = min(self._depth, entry.max_depth)
        if not request.prediction or depth < 1 or entry.max_nodes < 2:
            return single_node(text[end - 1])
        alignment = self._alignments.get(request.request_id)
        if alignment is None:
            alignment = self._alignments[request.request_id] = Alignment(request.prediction)
        alignment.advance(text[len(request.prompt_token_ids) + alignment.read : end])
        builder = TreeBuilder(text[end - 1], entry.max_nodes)
        for number, guess in enumerate(alignment.guesses(depth, self._branches)):
            node: int | None = 0
            matched = alignment.run if number == 0 else 0
            for i, token in enumerate(guess):
                assert node is not None
                sure, seen = match_confidence(matched + i), (float(matched + i),)
                node = builder.add(node, token, self.name, confidence=sure, evidence=seen)
                if node is None:
                    return builder.build()
        return builder.build()
