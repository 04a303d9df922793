"""Baselines for policies: fixed choices, and the best fixed choice in hindsight of a workload."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from benchmarks.replay.replay import Phase, Played, play
from benchmarks.replay.trace import DEPTH
from specinfer.errors import TraceTooSmallError
from specinfer.plan import PlanEntry
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.merging import likeliest
from specinfer.tree.token_tree import single_node

NODES: Final = (2, 4, 8, 16, 32)  # per tree, root included


class RootsOnly(SpeculationPolicy):
    """Lets all speculators propose as configured and verifies only roots: each step adds one token."""

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return the roots."""
        return [single_node(tree.token_ids[0]) for tree in trees]


class FixedSizePolicy(SpeculationPolicy):
    """Runs some drafts to a fixed depth, and verifies the likeliest nodes up to a fixed number per
    request.
    """

    def __init__(self, drafts: Collection[str], depth: int, nodes: int) -> None:
        """`nodes` counts a tree's nodes, root included; likelihoods are the speculators' confidences."""
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
        """Return True for the chosen drafts."""
        return [speculator in self._drafts and self._depth > 0] * len(entries)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Return all open leaves until the trees have the fixed depth."""
        return [
            of_tree if max(tree.depths()) < self._depth else ()
            for tree, of_tree in zip(trees, ends, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return the likeliest nodes of each tree, with the nodes that must stay."""
        return [likeliest(tree, tree.likelihoods(), self._nodes) for tree in trees]


@dataclass(frozen=True, slots=True)
class FixedChoice:
    """The speculators, the depth of draft trees and the number of verified nodes, equal in every step."""

    speculators: tuple[str, ...]
    depth: int  # levels of draft trees; 0: no draft runs
    nodes: int  # per request's tree, root included


def fixed_choices(
    parts: Sequence[Phase], speculation: SpeculationConfig, nodes: Sequence[int] = NODES
) -> Iterator[FixedChoice]:
    """Yield every set of speculators, with every depth up to the recorded one and every size.

    A draft's trees have the expansion's widths and are chains below its last level. Trees of heads are
    limited only by nodes.
    """
    recorded = parts[0].texts[0][0].drafts
    drafts, models = tuple(recorded), {name for name, draft in recorded.items() if draft.head is None}
    speculators = (*drafts, *(("lookup",) if speculation.lookup else ()))
    deepest = max(DEPTH, speculation.fixed_expansion.depth)
    for count in range(1, len(speculators) + 1):
        for names in combinations(speculators, count):
            depths: Sequence[int] = (1,) if set(names) & set(drafts) else (0,)
            if models.intersection(names):
                depths = range(1, deepest + 1)
            for depth in depths:
                for limit in nodes:
                    yield FixedChoice(names, depth, limit)


def play_fixed(parts: Sequence[Phase], speculation: SpeculationConfig, choice: FixedChoice) -> Played:
    """Play parts with a fixed choice."""
    nodes = max(speculation.node_limit, choice.nodes)
    if choice.depth > speculation.fixed_expansion.depth:
        speculation = replace(speculation, expansion=speculation.fixed_expansion.deepened(choice.depth))
    looks_up = "lookup" in choice.speculators
    limited = replace(speculation.with_tree_size("fixed"), lookup=looks_up, max_nodes=nodes)
    return play(parts, FixedSizePolicy(choice.speculators, choice.depth, choice.nodes), speculation=limited)


def best_fixed(
    parts: Sequence[Phase], speculation: SpeculationConfig, nodes: Sequence[int] = NODES
) -> tuple[FixedChoice | None, Played | None]:
    """Return the fastest fixed choice and its result, or None if there are no speculators.

    Drafts may go deeper than the expansion, up to the traces' depth. Raises TraceTooSmallError if the traces
    are less deep than the expansion.
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
