"""CostPolicy: the tree size with the most tokens per second, with a guard against losing time.

Cost curves give the seconds of a step (choose.py), outcomes of earlier guesses its expected tokens
(acceptance.py). A draft's pass competes with nodes: it runs for the requests whose next level is likely to be
right (drafting.py). A guard compares the time of steps with that of steps without guesses, and switches
speculation off when it loses time (guard.py).

The time of prefill is spent in any case. So a request in prefill counts as if it yielded a token like the
others; otherwise every guess would look worth its time in such a long step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.decision import Appraisal
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.choose import (
    NOTHING,
    Candidates,
    StepCosts,
    best_count,
    choose,
    fastest,
    path_probabilities,
)
from specinfer.speculate.policy.drafting import (
    USUAL_UNREAD,
    DraftStarts,
    GrowingGuesses,
    PricedDraft,
    children_each,
    keep_largest,
    useful_levels,
)
from specinfer.speculate.policy.guard import Guard, SelfDraft
from specinfer.speculate.policy.policy import SpeculationPolicy, StepReport, has_own_size
from specinfer.speculation_config import MAX_DEPTH, SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.merging import keep, pinned_nodes


class CostPolicy(SpeculationPolicy):
    """Compares the expected tokens of a node with its cost.

    A request's own expansion or node budget is followed. Sampled draws are never dropped: the decision to
    draw a level is made before it is drawn, from the earlier draws (docs/losslessness.md).
    """

    def __init__(
        self,
        target: CostModel,
        drafts: Mapping[str, PricedDraft],
        acceptance: AcceptanceRates,
        guard: Guard | None = None,
        *,
        divides_budget: bool = False,
    ) -> None:
        """Make a policy; `acceptance` counts the levels of these drafts. Without a guard it is always on.

        With `divides_budget` the levels of a draft's tree divide its node budget. If nodes are so cheap that
        dozens are drawn per level, the first levels would otherwise use all of it.
        """
        self._divides_budget = divides_budget
        self.guard = guard
        self.acceptance = acceptance
        self._target = target
        self._drafts = drafts
        self._models = (target, *(draft.costs for draft in drafts.values()))
        self._starts = {name: DraftStarts(draft, acceptance.levels[name]) for name, draft in drafts.items()}
        self._entries: Sequence[PlanEntry] = ()  # this step's tree entries
        self._guessed: dict[str, tuple[PlanEntry, TokenTree]] = {}  # the guesses to learn from, by request id
        self._costs = NOTHING  # of the step
        self._row = 0.0  # seconds of another row of the target's pass in a step without prefill
        self._growing: dict[str, GrowingGuesses] = {}  # by request id, while a draft grows
        self._refused: set[str] = set()  # drafts that could guess in the step but start for no request

    @classmethod
    def by_curves(
        cls,
        target: CostCurve,
        drafts: Mapping[str, CostCurve],
        speculation: SpeculationConfig,
        *,
        measured: bool,
        known: bool = False,
        deepest: int = MAX_DEPTH,
        self_draft: SelfDraft | None = None,
    ) -> CostPolicy:
        """Return the policy for tree_size "cost", with nothing learned.

        Args:
            target: the target's cost curve.
            drafts: the drafts' cost curves, by name.
            speculation: the engine's options.
            measured: False takes the seconds of steps from the curves instead of a clock.
            known: True if the target's curve gives the time of plain steps, as for streamed weights.
            deepest: maximum levels of trees with a learned shape.
            self_draft: a draft whose memory layers of a target with known costs may get.
        """
        costs = CostModel(target, learns=measured, **({"group": 1} if known else {}))
        shape = speculation.fixed_expansion
        priced = {
            name: PricedDraft(CostModel(curve, learns=measured), shape) for name, curve in drafts.items()
        }
        levels = max(deepest, shape.depth) if speculation.learns_shape else shape.depth
        models = {name: draft.costs for name, draft in priced.items()}
        guard = Guard(costs, models, measured=measured, known=known, self_draft=self_draft)
        return cls(
            costs,
            priced,
            AcceptanceRates(dict.fromkeys(priced, levels), quick=known),
            guard,
            divides_budget=known,
        )

    def follow(self, target: CostCurve, drafts: Mapping[str, CostCurve]) -> None:
        """Replace rough cost curves by whole ones; what was learned about their errors is dropped."""
        curves = (target, *(drafts[name] for name in self._drafts))
        for model, curve in zip(self._models, curves, strict=True):
            model.fade(0.0)
            model.follow(curve)

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Look up the target's passes; if the guard is off, the returned plan names no speculators.

        Requests with a size of their own keep their speculators.
        """
        entries = plan.entries
        self._entries = trees = plan.tree_entries
        self._guessed, self._refused = {}, set()
        requests, rows = len(entries), sum([entry.end - entry.start for entry in entries])
        context = sum([entry.end for entry in entries]) / max(1, requests)
        for model in self._models:
            model.begin(context)
        last = rows + sum([entry.max_nodes - 1 for entry in trees])
        passes = self._target.table(max(last, requests + 1))
        self._costs = StepCosts(passes, rows, last, passes[requests] - passes[rows], float(requests))
        self._row = passes[requests + 1] - passes[requests]
        own_size = any(map(has_own_size, trees))
        if self.guard is not None:
            names = [entry.request.request_id for entry in entries]
            if self.guard.begin(names, len(trees), rows, own_size) is not None:
                plan = StepPlan(
                    tuple([e if has_own_size(e) else replace(e, speculators=()) for e in entries])
                )
        return plan

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """Return True for requests whose first level is worth its cost, and for those with their own size.

        A prompt is read if the draft is expected to save the time over the whole answer. A text with a long
        unread part is read if the guard's allowance covers it. A draft whose passes have no known
        cost always starts.
        """
        if speculator not in self._drafts:
            return [True] * len(entries)
        costs = self._drafts[speculator].costs
        self._growing = {
            entry.request.request_id: GrowingGuesses(
                tree, self.acceptance, entry.max_nodes, all_stay=has_own_size(entry)
            )
            for entry, tree in zip(self._entries, guessed, strict=True)
        }
        tokens, nodes = self._expect()
        starts, late = [True] * len(entries), list[tuple[int, int]]()
        free = [i for i, entry in enumerate(entries) if not has_own_size(entry)]
        if free:
            worth = self._starts[speculator].select(
                [entries[i] for i in free],
                [unread[i] for i in free],
                self._growing,
                *(self._costs, tokens, nodes, self._row),
            )
            for i, start in zip(free, worth, strict=True):
                starts[i], entry = start, entries[i]
                # For a prompt, only what this step computes.
                reads = unread[i] - (len(entry.token_ids) - entry.end)
                if start and reads > entry.end - entry.start + USUAL_UNREAD:
                    late.append((reads, i))
        affordable = math.inf if self.guard is None else self.guard.allowance.seconds
        for reads, i in sorted(late):
            affordable -= costs.expected(reads)
            starts[i] = affordable >= 0
        drawing = sum([start and entry.max_nodes > 1 for start, entry in zip(starts, entries, strict=True)])
        if drawing:
            self._spend(costs.table(drawing)[drawing])
        elif any(entry.max_nodes > 1 for entry in entries):
            self._refused.add(speculator)
        return starts

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        """Return the ends that are likely enough, and all ends of requests with their own size.

        Each end is a row of the draft's pass. It is expected to add one verified node, or all of its children
        if these are samples. A draft whose passes have no known cost draws below all ends.
        """
        if speculator not in self._drafts:
            return list(ends)
        draft, levels = self._drafts[speculator], self.acceptance.levels[speculator]
        grown = [self._growing[entry.request.request_id] for entry in entries]
        for growing, tree in zip(grown, trees, strict=True):
            growing.grow(tree)
        costs, (tokens, nodes) = self._costs, self._expect()
        price = costs.price(tokens, nodes)
        level_price = tokens * draft.costs.expected(1) / costs.seconds(nodes)
        gains, bound, wide = list[float](), 0, 0
        for entry, growing, tree, of_tree in zip(entries, grown, trees, ends, strict=True):
            if growing.all_stay:
                bound += len(of_tree)
                continue
            depths, deepest = tree.depths(), levels.depth
            rates = levels.rates(entry.request.params.temperature)
            brought = [growing.gain(end, rates[min(depths[end], deepest - 1)], price) for end in of_tree]
            wide += sum([draft.width(depths[end]) if growing.samples else 1 for end in of_tree])
            if self._divides_budget and brought:
                room, each, level = entry.max_nodes - tree.num_nodes, children_each(tree), depths[of_tree[-1]]
                wanted = useful_levels(max(brought), rates[min(level, deepest - 1)].first, level_price)
                brought = keep_largest(brought, int(room / (each * min(wanted, deepest - level))))
            gains += brought
        passes = draft.costs.table(bound + len(gains))[bound:]
        each = wide / len(gains) if gains else 1.0  # target rows per end
        seconds = [costs.seconds(nodes + round(n * each)) + passes[n] for n in range(len(gains) + 1)]
        goes_on = fastest(gains, tokens, seconds)
        self._spend(passes[sum(goes_on)])
        answer = iter(goes_on)
        return [
            [*of_tree] if growing.all_stay else [end for end in of_tree if next(answer)]
            for of_tree, growing in zip(ends, grown, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return the nodes that make the step faster, within each request's node budget.

        Requests with a size of their own keep all nodes within it.
        """
        chosen, candidates = list(trees), dict[int, Candidates]()
        for n, (entry, tree) in enumerate(zip(self._entries, trees, strict=True)):
            if len(tree.token_ids) > 1:
                self._guessed[entry.request.request_id] = entry, tree
                likely = path_probabilities(self.acceptance.node_rates(tree), tree.parents)
                candidates[n] = Candidates(likely, pinned_nodes(tree), entry.max_nodes, has_own_size(entry))
        for n, nodes in zip(candidates, choose([*candidates.values()], self._costs), strict=True):
            chosen[n] = keep(trees[n], nodes)
        if self.guard is not None:
            sizes = [min(e.max_nodes, len(t.token_ids)) for e, t in zip(self._entries, chosen, strict=True)]
            self.guard.nodes = sum(sizes) - len(sizes)
        return chosen

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal:
        """Return the acceptance probabilities of the chosen nodes and the expected seconds of the step."""
        costs = self._costs
        likely = [path_probabilities(self.acceptance.node_rates(tree), tree.parents) for tree in trees]
        without, requests = costs.passes[costs.rows], int(costs.tokens)
        drafts = costs.spent - (costs.passes[requests] - without)
        seconds = drafts + costs._replace(spent=0.0).seconds(sum(len(of) - 1 for of in likely))
        overhead, held = (0.0, None) if self.guard is None else (self.guard.overhead, self.guard.off_reason)
        return Appraisal(likely, seconds - without, seconds + overhead, held)

    def observe(self, report: StepReport) -> None:
        """Learn from every guess whose parent was accepted, verified or not, and from the step's seconds."""
        for outcome in report.outcomes:
            if (guessed := self._guessed.pop(outcome.request_id, None)) is not None:
                entry, tree = guessed
                self.acceptance.learn(tree, outcome.committed, entry.request.params.temperature)
        if report.seconds:
            for name in self._refused:
                self._starts[name].refused()
            if self.guard is not None:
                self.guard.observe(report.outcomes, report.seconds, report.passes)

    def _expect(self) -> tuple[float, int]:
        """Return the expected tokens of the step with the guesses so far, and its worthwhile nodes."""
        tokens, nodes, droppable = self._costs.tokens, 0, list[float]()
        for growing in self._growing.values():
            tokens, nodes = tokens + growing.tokens, nodes + growing.nodes
            if growing.all_stay:
                tokens, nodes = tokens + sum(growing.droppable), nodes + len(growing.droppable)
            else:
                droppable += growing.droppable
        droppable.sort(reverse=True)
        count = best_count(droppable, tokens, self._costs.seconds_from(nodes, len(droppable)))
        return tokens + sum(droppable[:count]), nodes + count

    def _spend(self, seconds: float) -> None:
        """Add the seconds of a draft's pass to the step."""
        self._costs = self._costs._replace(spent=self._costs.spent + seconds)
