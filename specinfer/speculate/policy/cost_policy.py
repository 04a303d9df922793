"""CostPolicy: the tree size with the most tokens per second, with a guard against losing time.

Cost curves give the seconds of a step (choose.py), outcomes of earlier guesses its expected tokens
(acceptance.py). A draft's pass competes with nodes: it runs for the requests whose next level is likely to be
right (drafting.py). A guard compares the time of steps with that of steps without guesses, and switches
speculation off when it loses time (guard.py).

The time of prefill is spent in any case. So a request in prefill counts as if it yielded a token like the
others; otherwise every guess would look worth its time in such a long step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.decision import Appraisal
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.choose import Candidates, StepCosts, choose, fastest, path_probabilities
from specinfer.speculate.policy.drafting import USUAL_UNREAD, Drafting, GrowingGuesses, PricedDraft
from specinfer.speculate.policy.guard import Guard, SelfDraft
from specinfer.speculate.policy.policy import SpeculationPolicy, StepReport, has_own_size
from specinfer.speculation_config import MAX_DEPTH, SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.merging import keep


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
        guard: Guard,
    ) -> None:
        """Make a policy; `acceptance` counts the levels of these drafts."""
        self.guard = guard
        self.acceptance = acceptance
        self._target = target
        self._drafting = {name: Drafting(draft, acceptance.levels[name]) for name, draft in drafts.items()}
        self._models = (target, *(draft.costs for draft in drafts.values()))
        self._entries: Sequence[PlanEntry] = ()  # this step's tree entries
        self._guessed: dict[str, Candidates] = {}  # the guesses to learn from, by request id
        self._costs: StepCosts  # of the step
        self._growing: dict[str, GrowingGuesses] = {}  # by request id, while a draft grows

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
        models = {name: CostModel(curve, learns=measured) for name, curve in drafts.items()}
        priced = {name: PricedDraft(model, shape, known) for name, model in models.items()}
        levels = max(deepest, shape.depth) if speculation.learns_shape else shape.depth
        guard = Guard(costs, models, measured=measured, known=known, self_draft=self_draft)
        acceptance = AcceptanceRates(dict.fromkeys(priced, levels), quick=known)
        return cls(costs, priced, acceptance, guard)

    def follow(self, target: CostCurve, drafts: Mapping[str, CostCurve]) -> None:
        """Replace rough cost curves by whole ones; what was learned about their errors is dropped."""
        curves = (target, *(drafts[name] for name in self._drafting))
        for model, curve in zip(self._models, curves, strict=True):
            model.fade(0.0)
            model.follow(curve)

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Look up the target's passes; if the guard is off, the returned plan names no speculators.

        Requests with a size of their own keep their speculators.
        """
        entries = plan.entries
        self._entries = trees = plan.tree_entries
        self._guessed = {}
        requests, rows = len(entries), sum([entry.end - entry.start for entry in entries])
        context = sum([entry.end for entry in entries]) / max(1, requests)
        for model in self._models:
            model.begin(context)
        last = rows + sum([entry.max_nodes - 1 for entry in trees])
        passes = self._target.table(max(last, requests + 1))
        prompts, row = passes[rows] - passes[requests], passes[requests + 1] - passes[requests]
        self._costs = StepCosts(passes[rows : last + 1], prompts, row, float(requests))
        names = [entry.request.request_id for entry in entries]
        if self.guard.begin(names, len(trees), rows, any(map(has_own_size, trees))) is not None:
            kept = [e if has_own_size(e) else replace(e, speculators=()) for e in entries]
            return StepPlan(tuple(kept))
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
        if speculator not in self._drafting:
            return [True] * len(entries)
        drafting, costs = self._drafting[speculator], self._drafting[speculator].draft.costs
        pairs = zip(self._entries, guessed, strict=True)
        growing = [GrowingGuesses(entry, tree, self.acceptance) for entry, tree in pairs]
        self._growing = {one.entry.request.request_id: one for one in growing}
        starts = drafting.starts(entries, unread, self._growing, self._expect())
        late = list[tuple[int, int]]()
        for i, entry in enumerate(entries):
            # For a prompt, only what this step computes.
            reads = unread[i] - (len(entry.token_ids) - entry.end)
            if starts[i] and not has_own_size(entry) and reads > entry.end - entry.start + USUAL_UNREAD:
                late.append((reads, i))
        affordable = self.guard.allowance.seconds
        for reads, i in sorted(late):
            affordable -= costs.expected(reads)
            starts[i] = affordable >= 0
        drawing = sum([start and entry.max_nodes > 1 for start, entry in zip(starts, entries, strict=True)])
        self._spend(costs.table(drawing)[drawing])
        if any(entry.max_nodes > 1 for entry in entries):
            drafting.count(started=drawing > 0)
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
        if speculator not in self._drafting:
            return list(ends)
        drafting = self._drafting[speculator]
        draft, grown = drafting.draft, [self._growing[entry.request.request_id] for entry in entries]
        for growing, tree in zip(grown, trees, strict=True):
            growing.grow(tree)
        step, gains, bound, wide = self._expect(), list[float](), 0, 0
        for entry, growing, tree, of_tree in zip(entries, grown, trees, ends, strict=True):
            if growing.all_stay:
                bound += len(of_tree)
                continue
            gains += drafting.gains(entry, growing, tree, of_tree, step)
            depths = tree.depths()
            wide += sum([draft.width(depths[end]) if growing.samples else 1 for end in of_tree])
        passes = draft.costs.table(bound + len(gains))[bound:]
        each = wide / len(gains) if gains else 1.0  # target rows per end
        seconds = [step.seconds(round(n * each)) + passes[n] for n in range(len(gains) + 1)]
        goes_on = fastest(gains, step.tokens, seconds)
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
        pairs = zip(self._entries, trees, strict=True)
        guesses = [Candidates(entry, tree, self.acceptance) for entry, tree in pairs]
        self._guessed = {one.entry.request.request_id: one for one in guesses}
        nodes = choose(guesses, self._costs)
        self.guard.nodes = sum(map(len, nodes)) - len(nodes)
        return [keep(tree, of_tree) for tree, of_tree in zip(trees, nodes, strict=True)]

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal:
        """Return the acceptance probabilities of the chosen nodes and the expected seconds of the step."""
        costs = self._costs
        likely = [path_probabilities(self.acceptance.node_rates(tree), tree.parents) for tree in trees]
        seconds = costs.seconds(sum(len(of) - 1 for of in likely)) + costs.prompts
        guesses, whole = seconds - costs.passes[0], seconds + self.guard.overhead
        return Appraisal(likely, guesses, whole, self.guard.off_reason)

    def observe(self, report: StepReport) -> None:
        """Learn from every guess whose parent was accepted, verified or not, and from the step's seconds."""
        for outcome in report.outcomes:
            if (one := self._guessed.pop(outcome.request_id, None)) is not None:
                self.acceptance.learn(one.tree, outcome.committed, one.entry.request.params.temperature)
        if report.seconds:
            self.guard.observe(report.outcomes, report.seconds, report.passes)

    def _expect(self) -> StepCosts:
        """Return the step with the worthwhile guesses so far."""
        growing, tokens, nodes = [*self._growing.values()], self._costs.tokens, 0
        for one, chosen in zip(growing, choose(growing, self._costs), strict=True):
            tokens += sum([one.probabilities[node] for node in chosen]) - 1
            nodes += len(chosen) - 1
        return self._costs._replace(tokens=tokens, nodes=nodes)

    def _spend(self, seconds: float) -> None:
        """Add the seconds of a draft's pass to the step."""
        self._costs = self._costs._replace(spent=self._costs.spent + seconds)
