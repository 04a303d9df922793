"""What policies are compared with: those that always do the same, and the best of these in hindsight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from specinfer.errors import TraceTooSmallError
from specinfer.plan import PlanEntry
from specinfer.replay.replay import Phase, Played, play
from specinfer.replay.trace import DEPTH
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.merging import likeliest
from specinfer.tree.token_tree import single_node

NODES: Final = (2, 4, 8, 16, 32)  # of a tree, the root included


class LookingOn(SpeculationPolicy):
    """Lets everybody guess as configured, and verifies nothing: every step adds one token."""

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The roots."""
        return [single_node(tree.token_ids[0]) for tree in trees]


class CutPolicy(SpeculationPolicy):
    """Some drafts, so many levels deep, and of what all guessed the likeliest nodes, so many a request."""

    def __init__(self, drafts: Collection[str], depth: int, nodes: int) -> None:
        """`nodes` are those of a tree, the root included; likely is what speculators themselves say."""
        self._drafts = frozenset(drafts)
        self._depth = depth
        self._nodes = nodes

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """All entries, of the drafts that take part."""
        return [speculator in self._drafts and self._depth > 0] * len(entries)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """All entries, until the trees are deep enough."""
        return [
            of_tree if max(tree.depths()) < self._depth else ()
            for tree, of_tree in zip(trees, ends, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The likeliest nodes of each tree, and those that have to stay."""
        return [likeliest(tree, tree.likelihoods(), self._nodes) for tree in trees]


@dataclass(frozen=True, slots=True)
class FixedChoice:
    """Who guesses, how deep drafts do, and how many nodes are verified; the same in every step."""

    speculators: tuple[str, ...]
    depth: int  # of drafts' trees; 0: none takes part
    nodes: int  # of a request's tree, the root included


def fixed_choices(
    parts: Sequence[Phase], speculation: SpeculationConfig, nodes: Sequence[int] = NODES
) -> Iterator[FixedChoice]:
    """Every set of speculators, at every depth up to those that are recorded, and in every size.

    A draft's trees are as wide as the expansion says, and chains below its last level. Those of heads are
    cut by nodes alone, whatever the depth.
    """
    recorded = parts[0].texts[0][0].drafts
    drafts, models = tuple(recorded), {name for name, draft in recorded.items() if draft.head is None}
    everybody = (*drafts, *(("lookup",) if speculation.lookup else ()))
    deepest = max(DEPTH, speculation.fixed_expansion.depth)
    for count in range(1, len(everybody) + 1):
        for names in combinations(everybody, count):
            depths: Sequence[int] = (1,) if set(names) & set(drafts) else (0,)
            if models.intersection(names):
                depths = range(1, deepest + 1)
            for depth in depths:
                for most in nodes:
                    yield FixedChoice(names, depth, most)


def play_fixed(parts: Sequence[Phase], speculation: SpeculationConfig, choice: FixedChoice) -> Played:
    """Play parts with one fixed choice."""
    nodes = max(speculation.most_nodes, choice.nodes)
    if choice.depth > speculation.fixed_expansion.depth:
        speculation = replace(speculation, expansion=speculation.fixed_expansion.deepened(choice.depth))
    looks_up = "lookup" in choice.speculators
    limited = replace(speculation.with_tree_size("fixed"), lookup=looks_up, max_nodes=nodes)
    return play(parts, CutPolicy(choice.speculators, choice.depth, choice.nodes), speculation=limited)


def best_fixed(
    parts: Sequence[Phase], speculation: SpeculationConfig, nodes: Sequence[int] = NODES
) -> tuple[FixedChoice | None, Played | None]:
    """The quickest fixed choice in hindsight, and what it comes to; None where nobody can guess.

    Drafts go deeper than the expansion as far as the traces do. Raises TraceTooSmallError where these do not
    even go as deep.
    """
    best: tuple[FixedChoice | None, Played | None] = (None, None)
    for choice in fixed_choices(parts, speculation, nodes):
        try:
            played = play_fixed(parts, speculation, choice)
        except TraceTooSmallError:
            if choice.depth <= speculation.fixed_expansion.depth:
                raise
            continue
        if best[1] is None or played.seconds < best[1].seconds:
            best = choice, played
    return best
