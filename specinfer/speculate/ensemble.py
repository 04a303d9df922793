"""Several speculators of any kind -> one merged tree per request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from specinfer.errors import ConfigError, RequestError, SpeculatorError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.policy import SpeculationPolicy, StepReport, TrustedPolicy
from specinfer.speculate.speculator import LevelSpeculator, Speculator
from specinfer.tree import TokenTree, merge
from specinfer.tree.prune import prune
from specinfer.tree.token_tree import single_node

_LOG = logging.getLogger(__name__)

AnySpeculator = Speculator | LevelSpeculator


class Ensemble:
    """Asks each speculator in turn and merges what they propose (SpecInfer's merge-based construction).

    A speculator is offered the nodes its predecessors left over, and its guesses that can never become text
    are dropped before the next one is asked. That budget is known before it draws, and sampled draws are
    never dropped for their value, so the merged tree is lossless under every verifier (docs/losslessness.md).
    `policy` decides how deep level speculators go, and which nodes of the merged trees are verified.

    A speculator that raises, or proposes what is no tree, is logged once and never asked again: a bad guesser
    costs time, nothing else.
    """

    def __init__(
        self, speculators: Sequence[AnySpeculator], *, vocab: int, policy: SpeculationPolicy
    ) -> None:
        names = [s.name for s in speculators]
        if len(set(names)) != len(names):
            raise ConfigError(f"speculators are named {names}; each needs a name of its own")
        self._speculators = tuple(speculators)
        # To ask an instance for its methods takes as long as a guess.
        self._by_levels = frozenset(s.name for s in speculators if isinstance(s, LevelSpeculator))
        self._vocab = vocab  # of the target
        self._policy = TrustedPolicy(policy)

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One merged tree per entry that has a tree, of at most `entry.max_nodes` nodes."""
        trees = [single_node(entry.token_ids[entry.end - 1]) for entry in plan.tree_entries]
        self._policy.begin_step(plan)
        for speculator in self._speculators:
            asked, offer = _offer(speculator.name, plan, trees)
            if not offer.entries:
                continue
            self._policy.show(trees)
            proposed = self._from(speculator, offer)
            for i, tree in zip(asked, proposed, strict=False):  # none from one that failed
                if tree.num_nodes > 1:
                    trees[i] = merge((trees[i], tree)) if trees[i].num_nodes > 1 else tree
        return self._policy.choose_nodes(trees)

    def observe(self, report: StepReport) -> None:
        """Pass the outcomes on to every speculator, and all of it to the policy."""
        for speculator in self._speculators:
            self._trying(speculator, partial(speculator.observe, report.outcomes))
        self._policy.observe(report)

    def _from(self, speculator: AnySpeculator, plan: StepPlan) -> list[TokenTree]:
        """What a speculator guesses, checked and without what cannot become text; nothing if it fails."""
        trees: list[TokenTree] = []

        def ask() -> None:
            if speculator.name in self._by_levels:
                proposed = self._grown(cast(LevelSpeculator, speculator), plan)
            else:
                proposed = cast(Speculator, speculator).propose(plan)
            entries = plan.tree_entries
            if len(proposed) != len(entries):
                raise SpeculatorError(
                    f"speculator {speculator.name!r} gave {len(proposed)} trees for {len(entries)} entries; "
                    "propose returns one for each"
                )
            for entry, tree in zip(entries, proposed, strict=True):
                _check(speculator.name, entry, tree, self._vocab)
            trees.extend(_possible(tree, entry) for entry, tree in zip(entries, proposed, strict=True))

        self._trying(speculator, ask)
        return trees

    def _grown(self, speculator: LevelSpeculator, plan: StepPlan) -> list[TokenTree]:
        """The trees of a level speculator: level by level, wherever the policy says that it is worth it."""
        entries = plan.entries
        unread = speculator.begin(plan)
        worth = self._policy.worth_starting(speculator.name, entries, unread)
        which = [i for i, starts in enumerate(worth) if starts]
        while which:
            which = speculator.deepen(which)
            if which:
                going = [entries[i] for i in which], [speculator.tree(i) for i in which]
                worth = self._policy.worth_deepening(speculator.name, *going)
                which = [i for i, goes_on in zip(which, worth, strict=True) if goes_on]
        return [speculator.tree(i) for i, entry in enumerate(entries) if entry.has_tree]

    def _trying(self, speculator: AnySpeculator, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            _LOG.exception(
                "speculator %r failed and is not asked again; texts go on without it", speculator.name
            )
            self._speculators = tuple(s for s in self._speculators if s is not speculator)


def _offer(name: str, plan: StepPlan, trees: Sequence[TokenTree]) -> tuple[list[int], StepPlan]:
    """What a speculator is shown: the entries it may guess for, each with the nodes that are left to it.

    Prompts that are being read are among them. The list says which of `trees` those with a tree have.
    """
    numbers: list[int] = []
    entries: list[PlanEntry] = []
    number = -1
    for entry in plan.entries:
        number += entry.has_tree
        if entry.speculators is not None and name not in entry.speculators:
            continue
        if entry.has_tree:
            numbers.append(number)
            if taken := trees[number].num_nodes - 1:
                entry = replace(entry, max_nodes=entry.max_nodes - taken)
        entries.append(entry)
    return numbers, StepPlan(tuple(entries))


def _check(name: str, entry: PlanEntry, tree: TokenTree, vocab: int) -> None:
    """Raise SpeculatorError unless the tree is one the target may be asked about."""
    root = entry.token_ids[entry.end - 1]
    if tree.token_ids[0] != root:
        fault = f"rooted at token {tree.token_ids[0]}; the last token is {root}"
    elif tree.num_nodes > entry.max_nodes:
        fault = f"of {tree.num_nodes} nodes; entry.max_nodes is {entry.max_nodes}"
    elif tree.num_nodes == 1:
        return
    elif (depth := max(tree.depths())) > entry.max_depth:
        fault = f"of depth {depth}; entry.max_depth is {entry.max_depth}"
    elif not all(0 <= token < vocab for token in tree.token_ids):
        fault = f"with tokens outside the vocabulary of {vocab}"
    elif not all(isinstance(draw.confidence, (int, float)) for draw in tree.draws):
        fault = "with a draw whose confidence is no number"
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
