"""Trees as large as makes the most tokens per second.

The one idea: a step is expected to make so many tokens in so many seconds, and whatever is added to it is
worth its time while that ratio grows.

    tokens   one for every request, and for every node the probability that it becomes text
    seconds  the target's pass at that many rows, and the passes of the drafts

What is computed of prompts takes its time in any case. So a request whose prompt is being read counts as if
it made a token as the others do: a long step would make every guess look worth its time.

So the nodes of all requests in the batch compete: the likeliest are verified, as many as pay; none where the
target is bound by arithmetic and nobody is sure, all where rows cost nothing. A node is less likely than its
parent, so what is chosen are trees. A draft's pass competes in the same way: it is made for the requests for
which the level it brings is likely to be right.
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

_CURIOSITY: Final = 0.01  # of all time goes at most into drafts that do not seem worth it: they may be by now
_USUAL_UNREAD: Final = 2  # tokens a draft reads in every step: the root, and a last guess it has not run


class CostSize:
    """A TreeSize that weighs what nodes are expected to bring against what they cost.

    Requests that ask for an expansion or a number of nodes get them. Sampled draws are never dropped: whether
    a level is drawn is decided before it is, by what was drawn until then (docs/losslessness.md).
    """

    def __init__(self, target: CostCurve, drafts: Mapping[str, DraftDepth]) -> None:
        self._target = target
        self._drafts = drafts
        self._calibration = Calibration()
        self._saved = dict.fromkeys(drafts, 0.0)  # seconds each draft may spend without seeming worth it
        self._plan = StepPlan(())
        self._trees: dict[str, TokenTree] = {}  # by request, what was guessed in this step
        self._rows = 0  # of the target in this step, without any guess
        self._spent = 0.0  # seconds of this step's passes of drafts, less those its prompts take

    def open(self, plan: StepPlan) -> None:
        """A step begins: nothing is guessed yet."""
        self._plan = plan
        self._trees = {}
        self._rows = sum(entry.end - entry.start for entry in plan.entries)
        alone, with_prompts = self._target.seconds([len(plan.entries), self._rows])
        self._spent = float(alone - with_prompts)

    def note(self, trees: Sequence[TokenTree]) -> None:
        """Remember what has been guessed so far, by request."""
        entries = self._plan.tree_entries
        self._trees = {e.request.request_id: tree for e, tree in zip(entries, trees, strict=True)}

    def starts(self, draft: str, entries: Sequence[PlanEntry], unread: Sequence[int]) -> list[bool]:
        """For those whose first level is worth its pass and the reading, and those with wishes."""
        starts = [True] * len(entries)
        free = [i for i, entry in enumerate(entries) if not _has_wishes(entry)]
        if free:
            worth = self._first_level(draft, [entries[i] for i in free], np.array([unread[i] for i in free]))
            for i, start in zip(free, worth, strict=True):
                starts[i] = bool(start)
        self._spent += float(self._drafts[draft].passes(0, [sum(starts)])[0])
        return starts

    def deeper(self, draft: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[bool]:
        """For those whose last level is likely to be right, and those with wishes."""
        depth = self._drafts[draft]
        level = max(trees[0].depths())
        free = [i for i, entry in enumerate(entries) if not _has_wishes(entry)]
        goes_on = [True] * len(entries)
        if free:
            hopes = [self._calibration.hopes(tree) for tree in trees]
            loose, tokens, rows = self._fixed(entries, trees, hopes)
            candidates = np.array([hope for i in loose for hope in hopes[i][1:]])
            seconds = self._spent + self._target.seconds(rows + np.arange(len(candidates) + 1))
            worth = fastest(candidates, tokens, seconds)
            tokens, rows = tokens + float(candidates[worth].sum()), rows + int(worth.sum())
            gains = np.array([_at_depth(level, trees[i], hopes[i]) for i in free]) * depth.rates()[level]
            # Of the nodes to come the likely ones are verified, one a request; of samples all.
            nodes = sum(1 if i in loose else depth.nodes(level) for i in free) / len(free)
            more = np.arange(len(free) + 1)
            passes = depth.passes(level, len(entries) - len(free) + more)
            seconds = self._spent + passes + self._target.seconds(rows + np.rint(more * nodes).astype(int))
            for i, going in zip(free, fastest(gains, tokens, seconds), strict=True):
                goes_on[i] = bool(going)
        self._spent += float(depth.passes(min(level, depth.deepest - 1), [sum(goes_on)])[0])
        return goes_on

    def fit(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The nodes that make the step faster; requests with wishes of their own keep all of theirs."""
        self.note(trees)
        fitted = list(trees)
        hopes = [self._calibration.hopes(tree) for tree in trees]
        loose, tokens, rows = self._fixed(self._plan.tree_entries, trees, hopes)
        candidates = np.array([hope for i in loose for hope in hopes[i][1:]])
        seconds = self._spent + self._target.seconds(rows + np.arange(len(candidates) + 1))
        kept = fastest(candidates, tokens, seconds)
        first = 0
        for i in loose:
            end = first + trees[i].num_nodes - 1
            fitted[i] = keep(trees[i], [0, *(np.flatnonzero(kept[first:end]) + 1).tolist()])
            first = end
        return fitted

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from every guess whose parent became text, verified or not: the next token is known."""
        for outcome in outcomes:
            tree = self._trees.pop(outcome.request_id, None)
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

    def _fixed(
        self, entries: Sequence[PlanEntry], trees: Sequence[TokenTree], hopes: Sequence[list[float]]
    ) -> tuple[list[int], float, int]:
        """Whose nodes may be left out; and the step's tokens and rows without those nodes."""
        loose, tokens, rows = list[int](), float(len(self._plan.entries)), self._rows
        for i, (entry, tree) in enumerate(zip(entries, trees, strict=True)):
            if not _has_wishes(entry) and prunable(tree):
                loose.append(i)
            else:
                tokens += sum(hopes[i][1:])
                rows += tree.num_nodes - 1
        return loose, tokens, rows

    def _first_level(
        self, name: str, entries: Sequence[PlanEntry], unread: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """For which entries a draft's first level makes the step faster, [entries]."""
        draft = self._drafts[name]
        trees = [self._trees[entry.request.request_id] for entry in entries]
        hopes = [self._calibration.hopes(tree) for tree in trees]
        known = np.array([_at_depth(1, *pair) for pair in zip(trees, hopes, strict=True)])
        gains = draft.rates()[0] * np.maximum(0.0, 1.0 - known)
        tokens = len(self._plan.entries) + sum(sum(of_tree[1:]) for of_tree in hopes)
        rows = self._rows + sum(tree.num_nodes - 1 for tree in trees)
        # Reading a text is once for all of its steps: this one's share is what it brings of what is left.
        reading = draft.reading(np.maximum(unread, _USUAL_UNREAD), _USUAL_UNREAD)
        shares = reading * (1 + gains) / [entry.max_depth + 1 for entry in entries]
        without = self._spent + float(self._target.seconds([rows])[0])
        starts = gains * without > shares * tokens
        requests = int(starts.sum())
        step = self._spent + float(self._target.seconds([rows + requests])[0])
        step += float(draft.passes(0, [requests * _USUAL_UNREAD])[0] + shares[starts].sum())
        worth = (tokens + gains[starts].sum()) / step > tokens / without
        self._saved[name] += _CURIOSITY * (step if worth else without)
        if worth:
            return starts
        starts[:] = False
        least = int(np.argmin(unread))
        cost = float(draft.passes(0, [unread[least]])[0])
        if self._saved[name] >= cost:
            self._saved[name] = 0.0
            starts[least] = True
        return starts


def fastest(hopes: NDArray[np.float64], tokens: float, seconds: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of some candidates make a step's tokens per second highest, [n]; fewer at the same speed.

    Args:
        hopes: the tokens each is expected to bring, [n]; equal ones are chosen in their order.
        tokens: expected of the step without any of them.
        seconds: of the step with 0, 1, ... of them, [n + 1].
    """
    order = np.argsort(-hopes, kind="stable")
    expected = tokens + np.concatenate([[0.0], np.cumsum(hopes[order])])
    chosen = np.zeros(len(hopes), dtype=np.bool_)
    chosen[order[: int(np.argmax(expected / seconds))]] = True
    return chosen


def _has_wishes(entry: PlanEntry) -> bool:
    """Whether the request itself says how large its trees are."""
    wishes = entry.request.params.speculation
    return wishes.expansion is not None or wishes.max_nodes is not None


def _at_depth(depth: int, tree: TokenTree, hopes: Sequence[float]) -> float:
    """The probability that one of a tree's nodes of that depth becomes text."""
    return sum(hope for hope, at in zip(hopes, tree.depths(), strict=True) if at == depth)
