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

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_model import PassCosts
from specinfer.speculate.policy.decision import Appraisal
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.draft_starts import DraftStarts, Guessed
from specinfer.speculate.policy.estimator import Estimator
from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.speculate.policy.plain_weighing import PlainWeighing
from specinfer.speculate.policy.speculation_policy import StepReport, has_own_size
from specinfer.speculate.policy.weighing import Grown, StepCosts, Weighing
from specinfer.speculate.speculator import Outcome
from specinfer.tree import TokenTree
from specinfer.tree.draw import any_sampled

# When a draft is about to start, the odds of what no draft has guessed count as so much besides: its first
# level brings more than a token. It shows which of their guesses to drop, and whether to go on.
_DOUBT: Final = 0.35


class CostPolicy:
    """A SpeculationPolicy that weighs what nodes are expected to bring against what they cost.

    Requests that ask for an expansion or a number of nodes get them. Sampled draws are never dropped: whether
    a level is drawn is decided before it is, by what was drawn until then (docs/losslessness.md).
    """

    def __init__(
        self, target: PassCosts, drafts: Mapping[str, DraftCosts], weighing: Weighing | None = None
    ) -> None:
        """`weighing` says what guesses are hoped to bring, and has the same drafts; None: one that goes by
        what became of guesses like them.
        """
        self._target = target
        self._drafts = drafts
        self._weighing: Weighing = weighing or PlainWeighing(Estimator(logistics=False), drafts)
        self._starts = {name: DraftStarts(draft) for name, draft in drafts.items()}
        self._entries: tuple[PlanEntry, ...] = ()  # of this step, those with a tree
        self._numbers: dict[str, int] = {}  # of these, by request
        self._waiting: set[int] = set()  # entries of whose trees nobody knows yet what became
        self._costs = StepCosts([0.0], 0, 0, 0.0, 0.0)  # of this step
        self._row = 0.0  # seconds of another row of the target's, in a step in which no prompt is read

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Look up what the target's pass takes, whatever is guessed."""
        self._entries, entries = plan.tree_entries, plan.entries
        self._numbers = {entry.request.request_id: n for n, entry in enumerate(self._entries)}
        self._waiting = set()
        requests, rows = len(entries), sum([entry.end - entry.start for entry in entries])
        last = rows + sum([entry.max_nodes - 1 for entry in self._entries])
        passes = self._target.table(max(last, requests + 1))
        self._costs = StepCosts(passes, rows, last, passes[requests] - passes[rows], float(requests))
        self._row = passes[requests + 1] - passes[requests]
        self._weighing.begin(self._entries)
        return plan

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """For those whose first level is worth its pass and the reading, and those with a size of their own.

        A prompt is read where the reading will have been worth it when the answer is written. A draft whose
        passes have no known price is let start anywhere.
        """
        if speculator not in self._drafts:
            return [True] * len(entries)
        expected = self._weighing.expect(guessed, self._costs, _DOUBT)
        starts = [True] * len(entries)
        free = [i for i, entry in enumerate(entries) if not has_own_size(entry)]
        if free:
            step = Guessed(self._costs, expected, self._numbers, self._row)
            worth = self._starts[speculator].which(
                [entries[i] for i in free], [unread[i] for i in free], step
            )
            for i, start in zip(free, worth, strict=True):
                starts[i] = start
        growing = sum([start and entry.max_nodes > 1 for start, entry in zip(starts, entries, strict=True)])
        if growing:
            self._spend(self._drafts[speculator].passes(growing)[growing])
        return starts

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Those that are likely to become text, and all of requests with a size of their own.

        Each is a row of the draft's pass, and of what it brings one node is likely enough to be verified. One
        whose passes have no known price goes on below all.
        """
        if speculator not in self._drafts:
            return list(ends)
        draft, grown = self._drafts[speculator], list[Grown]()
        free = bound = wide = 0
        for entry, tree, of_tree in zip(entries, trees, ends, strict=True):
            number = self._numbers[entry.request.request_id]
            if has_own_size(entry):
                grown.append(Grown(number, tree, (), ()))
                bound += len(of_tree)
                continue
            levels = [depth(tree.parents, end) for end in of_tree]
            rates = {level: self._rate(draft, level, entry) for level in dict.fromkeys(levels)}
            grown.append(Grown(number, tree, of_tree, [rates[level] for level in levels]))
            free += len(of_tree)
            # Of the nodes to come the likely ones are verified, one of each end; of samples all.
            wide += sum(map(draft.width, levels)) if any_sampled(tree.draws) else len(of_tree)
        passes = draft.passes(bound + free)
        passes = passes[bound:] if bound else passes
        goes_on = self._weighing.deepen(grown, self._costs, passes, wide / free if free else 1.0)
        self._spend(passes[sum(goes_on)])
        each = iter(goes_on)
        return [
            [*of_tree] if has_own_size(entry) else [end for end in of_tree if next(each)]
            for entry, of_tree in zip(entries, ends, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The nodes that make the step faster, of each request as many as it may have.

        Requests with a size of their own have as many as there are.
        """
        self._waiting = {n for n, tree in enumerate(trees) if tree.num_nodes > 1}
        return self._weighing.choose(trees, self._costs) if self._waiting else list(trees)

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal:
        """The hopes it has for the nodes that were chosen, and the seconds it expects the step to take."""
        hopes, costs = self._weighing.hopes(trees), self._costs
        without, requests = costs.passes[costs.rows], int(costs.tokens)
        drafts = costs.spent - (costs.passes[requests] - without)
        seconds = drafts + costs._replace(spent=0.0).seconds(sum(len(of) - 1 for of in hopes))
        return Appraisal(hopes, seconds - without, seconds)

    def observe(self, report: StepReport) -> None:
        """Learn from every guess whose parent became text, verified or not: the next token is known."""
        known = list[tuple[int, Outcome]]()
        for outcome in report.outcomes:
            number = self._numbers.get(outcome.request_id)
            if number in self._waiting:
                self._waiting.remove(number)
                known.append((number, outcome))
        if known:
            self._weighing.learn(known)
        for outcome in report.outcomes:
            if outcome.finished:
                for draft in self._drafts.values():
                    draft.forget(outcome.request_id)

    def _rate(self, draft: DraftCosts, level: int, entry: PlanEntry) -> LevelRate:
        request = entry.request
        return draft.rate(level, request.request_id, request.params.temperature)

    def _spend(self, seconds: float) -> None:
        """A draft's pass is made."""
        self._costs = self._costs._replace(spent=self._costs.spent + seconds)


def depth(parents: Sequence[int], node: int) -> int:
    """How deep a node lies."""
    levels = 0
    while node:
        node, levels = parents[node], levels + 1
    return levels
