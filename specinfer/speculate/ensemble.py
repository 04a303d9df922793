"""Several speculators of any kind -> one merged tree per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specinfer.errors import ConfigError, RequestError, SpeculatorError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.speculate.tree_size import TreeSize
from specinfer.tree import TokenTree, merge
from specinfer.tree.prune import prune
from specinfer.tree.token_tree import single_node


class Ensemble:
    """Asks each speculator in turn and merges what they propose (SpecInfer's merge-based construction).

    A speculator is offered the nodes its predecessors left over, and its guesses that can never become text
    are dropped before the next one is asked. That budget is known before it draws, and sampled draws are
    never dropped for their value, so the merged tree is lossless under every verifier (docs/losslessness.md).
    What of the merged trees is verified is decided by `size`, which draft models ask as well.
    """

    def __init__(self, speculators: Sequence[Speculator], *, vocab: int, size: TreeSize) -> None:
        names = [s.name for s in speculators]
        if len(set(names)) != len(names):
            raise ConfigError(f"speculators are named {names}; each needs a name of its own")
        self._speculators = tuple(speculators)
        self._vocab = vocab  # of the target
        self._size = size

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One merged tree per entry that has a tree, of at most `entry.max_nodes` nodes."""
        entries = plan.tree_entries
        trees = [single_node(entry.token_ids[entry.end - 1]) for entry in entries]
        self._size.open(plan)
        for speculator in self._speculators:
            asked = [i for i, e in enumerate(entries) if _may_guess(speculator.name, e, trees[i])]
            if not asked:
                continue
            budgets = [
                replace(entries[i], max_nodes=entries[i].max_nodes - trees[i].num_nodes + 1) for i in asked
            ]
            self._size.note(trees)
            proposed = speculator.propose(budgets)
            if len(proposed) != len(asked):
                raise SpeculatorError(
                    f"speculator {speculator.name!r} gave {len(proposed)} trees for {len(asked)} entries; "
                    "propose returns one for each"
                )
            for i, budget, tree in zip(asked, budgets, proposed, strict=True):
                _check(speculator.name, budget, tree, self._vocab)
                tree = _possible(tree, entries[i])
                trees[i] = merge((trees[i], tree)) if trees[i].num_nodes > 1 else tree
        return self._size.fit(trees)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Pass the outcomes on to every speculator, and to who sizes the trees."""
        for speculator in self._speculators:
            speculator.observe(outcomes)
        self._size.observe(outcomes)


def _may_guess(name: str, entry: PlanEntry, tree: TokenTree) -> bool:
    wanted = entry.guessers is None or name in entry.guessers
    return wanted and entry.max_depth > 0 and tree.num_nodes < entry.max_nodes


def _check(name: str, entry: PlanEntry, tree: TokenTree, vocab: int) -> None:
    """Raise SpeculatorError unless the tree is one the target may be asked about."""
    root = entry.token_ids[entry.end - 1]
    if tree.token_ids[0] != root:
        fault = f"rooted at token {tree.token_ids[0]}; the last token is {root}"
    elif tree.num_nodes > entry.max_nodes:
        fault = f"of {tree.num_nodes} nodes; entry.max_nodes is {entry.max_nodes}"
    elif (depth := max(tree.depths())) > entry.max_depth:
        fault = f"of depth {depth}; entry.max_depth is {entry.max_depth}"
    elif not all(0 <= token < vocab for token in tree.token_ids):
        fault = f"with tokens outside the vocabulary of {vocab}"
    else:
        return
    raise SpeculatorError(f"speculator {name!r} proposed a tree {fault}; see docs/add_a_speculator.md")


def _possible(tree: TokenTree, entry: PlanEntry) -> TokenTree:
    """The tree without nodes that the request's parameters exclude, or that its end comes before."""
    processors = entry.processors
    if processors is None or tree.num_nodes == 1:
        return tree
    permits = processors.permits if processors.bans else None
    if permits is None and processors.ending.isdisjoint(tree.token_ids):
        return tree
    try:
        return prune(tree, permits=permits, ending=processors.ending)
    except RequestError:  # a grammar too complex to follow: the target's walk will meet it, and say so
        return single_node(tree.token_ids[0])
