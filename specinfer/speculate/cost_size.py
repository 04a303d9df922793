"""Trees as large as makes the most tokens per second.

The one idea: a step is expected to make `tokens` in `seconds`, and whatever is added to it is worth its time
while that ratio grows.

    tokens   one for every request, and for every node the probability that it becomes text
    seconds  the target's pass at that many rows, and the passes of the drafts

So the nodes of all requests in the batch compete: sorted by probability they are taken as long as it pays,
none where the target is bound by arithmetic and nobody is sure, all where rows cost nothing. A node is less
likely than its parent, so what is taken are trees. How deep a draft goes is decided before it guesses, from
what its levels have yielded; what has become too small is tried again now and then, as estimates age.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.calibration import Calibration
from specinfer.speculate.draft_depth import DraftDepth
from specinfer.speculate.speculator import Outcome
from specinfer.tree import TokenTree
from specinfer.tree.prune import keep, prunable
from specinfer.tree.token_tree import draws_by_parent

_CURIOSITY: Final = 0.01  # of all time goes at most into trying what does not seem worth it


class CostSize:
    """A TreeSize that weighs what nodes are expected to bring against what they cost.

    Requests that ask for an expansion or a number of nodes get them. Trees with sampled draws are sized by
    their depth alone, which is decided before anything is drawn (the fourth rule of docs/losslessness.md).
    """

    def __init__(self, target: CostCurve, drafts: Mapping[str, DraftDepth]) -> None:
        self._target = target
        self._drafts = drafts
        self._calibration = Calibration()
        self._saved = dict.fromkeys(drafts, 0.0)  # seconds each draft may spend on trying a level more
        self._plan = StepPlan(())
        self._spent = 0.0  # seconds of this step's passes of drafts
        self._proposed: dict[str, TokenTree] = {}  # by request, all that was guessed

    def open(self, plan: StepPlan) -> None:
        """A step begins: nothing is spent yet."""
        self._plan = plan
        self._spent = 0.0
        self._proposed = {}

    def depths(self, speculator: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[int]:
        """Of a draft model, the levels that are worth their passes; of others all, as they cost nothing."""
        draft = self._drafts.get(speculator)
        depths = [entry.max_depth for entry in entries]
        if draft is None:
            return depths
        free = [i for i, entry in enumerate(entries) if not _has_wishes(entry)]
        chosen = self._worth(speculator, draft, [entries[i] for i in free], [trees[i] for i in free])
        asked = len(entries) - len(free)
        for i, depth in zip(free, chosen, strict=True):
            depths[i] = min(depth, depths[i])
        for level in range(draft.deepest):
            grown = asked + sum(depth > level for depth in chosen)
            self._spent += draft.passes(grown)[level]
        return depths

    def fit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The nodes that make the step faster; requests with wishes of their own keep all of theirs."""
        entries, fitted = self._plan.tree_entries, list(trees)
        hopes = [self._calibration.hopes(tree) for tree in trees]
        self._proposed = {e.request.request_id: tree for e, tree in zip(entries, trees, strict=True)}
        tokens, rows, free = float(len(entries)), self._rows, list[int]()
        for i, (entry, tree) in enumerate(zip(entries, trees, strict=True)):
            if not _has_wishes(entry) and prunable(tree):
                free.append(i)
            else:
                tokens += sum(hopes[i][1:])
                rows += tree.num_nodes - 1
        candidates = np.array([hope for i in free for hope in hopes[i][1:]])
        seconds = self._spent + self._target.seconds(rows + np.arange(len(candidates) + 1))
        kept = worth_verifying(candidates, tokens, seconds)
        first = 0
        for i in free:
            end = first + trees[i].num_nodes - 1
            fitted[i] = keep(trees[i], [0, *(np.flatnonzero(kept[first:end]) + 1).tolist()])
            first = end
        return fitted

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from every guess whose parent became text, verified or not: the next token is known."""
        for outcome in outcomes:
            tree = self._proposed.pop(outcome.request_id, None)
            if tree is None or tree.num_nodes == 1:
                continue
            below, children = draws_by_parent(tree.draws), tree.children()
            node = 0
            for level, token in enumerate(outcome.committed):
                draws, child = below.get(node, ()), children[node].get(token)
                self._calibration.learn(draws, child)
                for name in {draw.speculator for draw in draws} & self._drafts.keys():
                    hit = any(draw.node == child and draw.speculator == name for draw in draws)
                    self._drafts[name].learn(level, hit)
                if child is None:
                    break
                node = child

    @property
    def _rows(self) -> int:
        """The target's rows without any guess."""
        return sum(entry.end - entry.start for entry in self._plan.entries)

    def _worth(
        self, name: str, draft: DraftDepth, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]
    ) -> list[int]:
        """The levels of each entry's tree: those that make the step faster, and now and then one more."""
        if not entries:
            return []
        known = [self._known(tree, draft.deepest) for tree in trees]
        yields = draft.yields()
        gains = [_gains(yields, hopes, e.max_depth) for e, hopes in zip(entries, known, strict=True)]
        # Reading a text once is for all of its steps: this one's share is what it brings of what is left.
        reading = draft.reading(entries)
        shares = [
            seconds * (1 + gain[-1]) / (entry.max_depth + 1)
            for seconds, gain, entry in zip(reading, gains, entries, strict=True)
        ]
        tokens = len(self._plan.tree_entries) + sum(map(sum, known))
        rows = self._rows + sum(tree.num_nodes - 1 for tree in trees)
        step = self._spent + float(self._target.seconds([rows])[0])
        reads = [gain[-1] * step > share * tokens for gain, share in zip(gains, shares, strict=True)]
        readers = [i for i, worth in enumerate(reads) if worth]
        passes = np.cumsum([0.0, *draft.passes(len(readers))])
        levels = np.arange(draft.deepest + 1)
        expected = tokens + np.sum([gains[i] for i in readers], axis=0)
        seconds = self._spent + passes + self._target.seconds(rows + levels * len(readers))
        seconds[1:] += sum(shares[i] for i in readers)
        best = int(np.argmax(expected / seconds))
        chosen = [best if worth else 0 for worth in reads]
        return self._curious(name, draft, chosen, reading, float(seconds[best]))

    def _curious(
        self, name: str, draft: DraftDepth, chosen: list[int], reading: Sequence[float], step: float
    ) -> list[int]:
        """The same levels, one entry's with one more where enough time was saved for it."""
        self._saved[name] += _CURIOSITY * step
        cheapest = min(range(len(chosen)), key=lambda i: reading[i] if chosen[i] == 0 else 0.0)
        level = chosen[cheapest]
        if level == draft.deepest:
            return chosen
        cost = draft.passes(1)[level] + (reading[cheapest] if level == 0 else 0.0)
        if self._saved[name] >= cost:
            self._saved[name] = 0.0
            chosen[cheapest] += 1
        return chosen

    def _known(self, tree: TokenTree, levels: int) -> list[float]:
        """The tokens a tree is expected to bring at each of the first levels, [levels]."""
        known = [0.0] * (levels + 1)
        if tree.num_nodes > 1:
            for depth, hope in zip(tree.depths(), self._calibration.hopes(tree), strict=True):
                known[min(depth, levels)] += hope
        return known[1:]


def worth_verifying(
    hopes: NDArray[np.float64], tokens: float, seconds: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which nodes make a step's tokens per second highest, [nodes]; none rather than some at the same speed.

    Args:
        hopes: the probability of each node to become text, [nodes]; a node's is at most its parent's, and
            parents come first.
        tokens: expected of the step without any of the nodes.
        seconds: of the step with 0, 1, ... of the nodes, [nodes + 1].
    """
    order = np.argsort(-hopes, kind="stable")
    expected = tokens + np.concatenate([[0.0], np.cumsum(hopes[order])])
    kept = np.zeros(len(hopes), dtype=np.bool_)
    kept[order[: int(np.argmax(expected / seconds))]] = True
    return kept


def _gains(yields: Sequence[float], known: Sequence[float], room: int) -> list[float]:
    """The tokens that 0, 1, ... levels of a draft add to those known of; no more than there is room for."""
    added = [reached * max(0.0, 1 - hope) for reached, hope in zip(yields, known, strict=True)]
    return [sum(added[: min(levels, room)]) for levels in range(len(yields) + 1)]


def _has_wishes(entry: PlanEntry) -> bool:
    """Whether the request itself says how large its trees are."""
    wishes = entry.request.params.speculation
    return wishes.expansion is not None or wishes.max_nodes is not None
