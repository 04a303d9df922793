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
from specinfer.speculate.draft_costs import DraftCosts
from specinfer.speculate.policy import StepReport
from specinfer.tree import TokenTree
from specinfer.tree.prune import keep, prunable
from specinfer.tree.token_tree import draws_by_parent, single_node

_CURIOSITY: Final = 0.01  # of all time goes at most into drafts that do not seem worth it: they may be by now
_NOTHING: Final = single_node(0)  # of a prompt that is being read
_USUAL_UNREAD: Final = 2  # tokens a draft reads in every step: the root, and a last guess it has not run


class CostPolicy:
    """A SpeculationPolicy that weighs what nodes are expected to bring against what they cost.

    Requests that ask for an expansion or a number of nodes get them. Sampled draws are never dropped: whether
    a level is drawn is decided before it is, by what was drawn until then (docs/losslessness.md).
    """

    def __init__(self, target: CostCurve, drafts: Mapping[str, DraftCosts]) -> None:
        self._target = target
        self._drafts = drafts
        self._calibration = Calibration()
        self._saved = dict.fromkeys(drafts, 0.0)  # seconds each draft may spend without seeming worth it
        self._plan = StepPlan(())
        self._trees: dict[str, TokenTree] = {}  # by request, what was guessed in this step
        self._rows = 0  # of the target in this step, without any guess
        self._spent = 0.0  # seconds of this step's passes of drafts, less those its prompts take

    def begin_step(self, plan: StepPlan) -> None:
        """Count the step's rows without any guess."""
        self._plan = plan
        self._trees = {}
        self._rows = sum(entry.end - entry.start for entry in plan.entries)
        alone, with_prompts = self._target.seconds([len(plan.entries), self._rows])
        self._spent = float(alone - with_prompts)

    def show(self, trees: Sequence[TokenTree]) -> None:
        """Remember what has been guessed so far, by request."""
        entries = self._plan.tree_entries
        self._trees = {e.request.request_id: tree for e, tree in zip(entries, trees, strict=True)}

    def worth_starting(
        self, speculator: str, entries: Sequence[PlanEntry], unread: Sequence[int]
    ) -> list[bool]:
        """For those whose first level is worth its pass and the reading, and those with a size of their own.

        A prompt is read where the reading will have been worth it when the answer is written.
        """
        starts = [True] * len(entries)
        free = [i for i, entry in enumerate(entries) if not _has_own_size(entry)]
        if free:
            worth = self._first_level(
                speculator, [entries[i] for i in free], np.array([unread[i] for i in free])
            )
            for i, start in zip(free, worth, strict=True):
                starts[i] = bool(start)
        growing = sum(start and entry.max_nodes > 1 for start, entry in zip(starts, entries, strict=True))
        self._spent += float(self._drafts[speculator].passes(0, [growing])[0])
        return starts

    def worth_deepening(
        self, speculator: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]
    ) -> list[bool]:
        """For those whose last level is likely to be right, and those with a size of their own."""
        depth = self._drafts[speculator]
        level = max(trees[0].depths())
        free = [i for i, entry in enumerate(entries) if not _has_own_size(entry)]
        goes_on = [True] * len(entries)
        if free:
            probabilities = [self._calibration.probabilities(tree) for tree in trees]
            optional, tokens, rows = self._baseline(entries, trees, probabilities)
            candidates = np.array([probability for i in optional for probability in probabilities[i][1:]])
            seconds = self._spent + self._target.seconds(rows + np.arange(len(candidates) + 1))
            worth = fastest(candidates, tokens, seconds)
            tokens, rows = tokens + float(candidates[worth].sum()), rows + int(worth.sum())
            gains = (
                np.array([_at_depth(level, trees[i], probabilities[i]) for i in free]) * depth.rates()[level]
            )
            # Of the nodes to come the likely ones are verified, one a request; of samples all.
            nodes = sum(1 if i in optional else depth.nodes(level) for i in free) / len(free)
            more = np.arange(len(free) + 1)
            passes = depth.passes(level, len(entries) - len(free) + more)
            seconds = self._spent + passes + self._target.seconds(rows + np.rint(more * nodes).astype(int))
            for i, going in zip(free, fastest(gains, tokens, seconds), strict=True):
                goes_on[i] = bool(going)
        self._spent += float(depth.passes(min(level, depth.deepest - 1), [sum(goes_on)])[0])
        return goes_on

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The nodes that make the step faster; requests with a size of their own keep all of theirs."""
        self.show(trees)
        fitted = list(trees)
        if all(tree.num_nodes == 1 for tree in trees):
            return fitted
        probabilities = [self._calibration.probabilities(tree) for tree in trees]
        optional, tokens, rows = self._baseline(self._plan.tree_entries, trees, probabilities)
        candidates = np.array([probability for i in optional for probability in probabilities[i][1:]])
        seconds = self._spent + self._target.seconds(rows + np.arange(len(candidates) + 1))
        kept = fastest(candidates, tokens, seconds)
        first = 0
        for i in optional:
            end = first + trees[i].num_nodes - 1
            fitted[i] = keep(trees[i], [0, *(np.flatnonzero(kept[first:end]) + 1).tolist()])
            first = end
        return fitted

    def observe(self, report: StepReport) -> None:
        """Learn from every guess whose parent became text, verified or not: the next token is known."""
        for outcome in report.outcomes:
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

    def _baseline(
        self, entries: Sequence[PlanEntry], trees: Sequence[TokenTree], probabilities: Sequence[list[float]]
    ) -> tuple[list[int], float, int]:
        """The entries whose nodes are optional, and the step's expected tokens and rows without them."""
        optional, tokens, rows = list[int](), float(len(self._plan.entries)), self._rows
        for i, (entry, tree) in enumerate(zip(entries, trees, strict=True)):
            if not _has_own_size(entry) and prunable(tree):
                optional.append(i)
            else:
                tokens += sum(probabilities[i][1:])
                rows += tree.num_nodes - 1
        return optional, tokens, rows

    def _first_level(
        self, name: str, entries: Sequence[PlanEntry], unread: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """For which entries a draft's first level makes the step faster, or will once it is read."""
        draft = self._drafts[name]
        grows = np.array([entry.max_nodes > 1 for entry in entries])
        trees = [self._trees.get(entry.request.request_id, _NOTHING) for entry in entries]
        probabilities = [self._calibration.probabilities(tree) for tree in trees]
        known = np.array([_at_depth(1, *pair) for pair in zip(trees, probabilities, strict=True)])
        gains = draft.rates()[0] * np.maximum(0.0, 1.0 - known)
        tokens = len(self._plan.entries) + sum(sum(of_tree[1:]) for of_tree in probabilities)
        rows = self._rows + sum(tree.num_nodes - 1 for tree in trees)
        # Reading a text is once for all of its steps: this one's share is what it brings of what is left.
        reading = draft.reading(np.maximum(unread, _USUAL_UNREAD), _USUAL_UNREAD)
        shares = reading * (1 + gains) / np.maximum(1, [entry.room for entry in entries])
        without = self._spent + float(self._target.seconds([rows])[0])
        starts = gains * without > shares * tokens
        first = starts & grows
        requests = int(first.sum())
        step = self._spent + float(self._target.seconds([rows + requests])[0])
        step += float(draft.passes(0, [requests * _USUAL_UNREAD])[0] + shares[first].sum())
        worth = (tokens + gains[first].sum()) / step > tokens / without
        self._saved[name] += _CURIOSITY * (step if worth else without)
        if worth or not grows.any():
            return starts
        starts &= ~grows
        least = int(np.argmin(np.where(grows, unread, np.iinfo(np.int64).max)))
        cost = float(draft.passes(0, [unread[least]])[0])
        if self._saved[name] >= cost:
            self._saved[name] = 0.0
            starts[least] = True
        return starts


def fastest(
    probabilities: NDArray[np.float64], tokens: float, seconds: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which of some candidates make a step's tokens per second highest, [n]; fewer at the same speed.

    Args:
        probabilities: the tokens each is expected to bring, [n]; equal ones are chosen in their order.
        tokens: expected of the step without any of them.
        seconds: of the step with 0, 1, ... of them, [n + 1].
    """
    order = np.argsort(-probabilities, kind="stable")
    expected = tokens + np.concatenate([[0.0], np.cumsum(probabilities[order])])
    chosen = np.zeros(len(probabilities), dtype=np.bool_)
    chosen[order[: int(np.argmax(expected / seconds))]] = True
    return chosen


def _has_own_size(entry: PlanEntry) -> bool:
    """Whether the request itself says how large its trees are."""
    overrides = entry.request.params.speculation
    return overrides.expansion is not None or overrides.max_nodes is not None


def _at_depth(depth: int, tree: TokenTree, probabilities: Sequence[float]) -> float:
    """The probability that one of a tree's nodes of that depth becomes text."""
    return sum(
        probability for probability, at in zip(probabilities, tree.depths(), strict=True) if at == depth
    )
