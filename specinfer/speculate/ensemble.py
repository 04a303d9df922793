"""Several speculators of any kind -> one merged tree per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specinfer.errors import ConfigError
from specinfer.plan import PlanEntry
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.tree import TokenTree, merge
from specinfer.tree.prune import prune
from specinfer.tree.token_tree import single_node


class Ensemble:
    """Asks each speculator in turn and merges what they propose (SpecInfer's merge-based construction).

    A speculator is offered the nodes its predecessors left over, and its guesses that can never become text
    are dropped before the next one is asked. That budget is known before it draws, and sampled draws are
    never dropped for their value, so the merged tree is lossless under every verifier (the fourth rule of
    docs/losslessness.md).
    """

    name = "ensemble"

    def __init__(self, speculators: Sequence[Speculator]) -> None:
        names = [s.name for s in speculators]
        if len(set(names)) != len(names):
            raise ConfigError(f"speculators are named {names}; each needs a name of its own")
        self._speculators = tuple(speculators)

    def propose(self, entries: Sequence[PlanEntry]) -> list[TokenTree]:
        """One merged tree per entry, of at most `entry.max_nodes` nodes."""
        trees = [single_node(entry.token_ids[entry.end - 1]) for entry in entries]
        for speculator in self._speculators:
            asked = [i for i, e in enumerate(entries) if _may_guess(speculator.name, e, trees[i])]
            if not asked:
                continue
            budgets = [
                replace(entries[i], max_nodes=entries[i].max_nodes - trees[i].num_nodes + 1) for i in asked
            ]
            for i, tree in zip(asked, speculator.propose(budgets), strict=True):
                tree = _possible(tree, entries[i])
                trees[i] = merge((trees[i], tree)) if trees[i].num_nodes > 1 else tree
        return trees

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Pass the outcomes on to every speculator."""
        for speculator in self._speculators:
            speculator.observe(outcomes)


def _may_guess(name: str, entry: PlanEntry, tree: TokenTree) -> bool:
    wanted = entry.guessers is None or name in entry.guessers
    return wanted and entry.max_depth > 0 and tree.num_nodes < entry.max_nodes


def _possible(tree: TokenTree, entry: PlanEntry) -> TokenTree:
    """The tree without nodes that the request's parameters exclude, or that its end comes before."""
    processors = entry.processors
    if processors is None or tree.num_nodes == 1:
        return tree
    permits = processors.permits if processors.bans else None
    if permits is None and processors.ending.isdisjoint(tree.token_ids):
        return tree
    return prune(tree, permits=permits, ending=processors.ending)
