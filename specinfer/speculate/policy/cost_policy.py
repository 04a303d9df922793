"""Trees as large as makes the most tokens per second, and never slower than no speculation for long.

The cost of a step is computed from cost curves (choose.py), the tokens it makes from results of earlier
guesses (chances.py). A draft's pass competes as nodes do: it is made for the requests for which the level it
brings is likely to be right (drafting.py). A guard compares the time of steps with that of steps without
guesses, and switches speculation off where it loses (guard.py).

The time of prompts that are read is spent in any case. So a request whose prompt is being read counts as if
it made a token as the others do: a long step would make every guess look worth its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.decision import Appraisal
from specinfer.speculate.policy.chances import Chances
from specinfer.speculate.policy.choose import (
    NOTHING,
    Candidates,
    StepCosts,
    along_paths,
    choose,
    depth,
    fastest,
    how_many,
)
from specinfer.speculate.policy.drafting import (
    USUAL_UNREAD,
    DraftStarts,
    Growing,
    PricedDraft,
    Without,
    best_of,
    children_each,
    useful_levels,
)
from specinfer.speculate.policy.guard import Guard, Lending
from specinfer.speculate.policy.policy import SpeculationPolicy, StepReport, has_own_size
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import TokenTree
from specinfer.tree.draw import any_sampled
from specinfer.tree.merging import firm_nodes, keep

_NOBODY: Final = ()


class CostPolicy(SpeculationPolicy):
    """Weighs the tokens that a node is expected to bring against its cost.

    Requests that ask for an expansion or a number of nodes get them. Sampled draws are never dropped: whether
    a level is drawn is decided before it is, by the draws until then (docs/losslessness.md).
    """

    def __init__(
        self,
        target: CostModel,
        drafts: Mapping[str, PricedDraft],
        chances: Chances,
        guard: Guard | None = None,
        *,
        shares_room: bool = False,
    ) -> None:
        """`chances` counts the levels of the same drafts; None for a guard lets everybody guess always.

        With `shares_room` the levels of a draft's tree share its nodes: where they are cheap enough to be
        drawn by dozens, the first ones would take them all.
        """
        super().__init__()
        self._shares_room = shares_room
        self.guard = guard
        self.chances = chances
        self._target = target
        self._drafts = drafts
        self._models = (target, *(draft.costs for draft in drafts.values()))
        self._starts = {name: DraftStarts(draft, chances.levels[name]) for name, draft in drafts.items()}
        self._entries: Sequence[PlanEntry] = ()  # of this step, those with a tree
        self._numbers: dict[str, int] = {}  # of these, by request
        self._trees: Sequence[TokenTree] = ()  # of these, all guesses; learnt from
        self._step = 0, 0  # its requests, and rows without guesses
        self._costs = NOTHING  # of it, where somebody may guess
        self._row = 0.0  # seconds of another row of the target's, in a step in which no prompt is read
        self._growing: list[Growing] = []  # of the entries, while a draft grows
        self._tokens, self._nodes = 0.0, 0  # that the step is expected to make so far, and the nodes that pay
        self._refused: set[str] = set()  # drafts that could guess in the step, and start nowhere
        self._held: str | None = None  # why nobody may guess in this step

    @classmethod
    def by_curves(
        cls,
        target: CostCurve,
        drafts: Mapping[str, CostCurve],
        speculation: SpeculationConfig,
        *,
        measured: bool,
        guarded: bool = True,
        known: bool = False,
        deepest: int | None = None,
        lending: Lending | None = None,
    ) -> CostPolicy:
        """The policy of an engine whose tree_size is "cost", which begins with nothing learnt.

        With `measured=False` the seconds of steps are those of the curves: no clock has a say. With `known`
        the target's curve tells the time of plain steps, as that of a pass which waits for its weights does.
        `deepest` are the levels of trees whose shape is learned, where they are not the usual ones. `lending`
        is of a draft's memory that layers of a target with known costs may have.
        """
        costs = CostModel("target", target, learns=measured, **({"group": 1} if known else {}))
        shape = speculation.fixed_expansion
        priced = {
            name: PricedDraft(CostModel(name, curve, learns=measured), shape)
            for name, curve in drafts.items()
        }
        levels = max(speculation.deepest if deepest is None else deepest, shape.depth)
        models = {name: draft.costs for name, draft in priced.items()}
        guard = Guard(costs, models, measured=measured, known=known, lending=lending) if guarded else None
        return cls(
            costs, priced, Chances(dict.fromkeys(priced, levels), quick=known), guard, shares_room=known
        )

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Look up the target's passes; where the guard holds speculation back, the plan names no speculators.

        Requests with a size of their own keep theirs, unless the draft's memory holds something else.
        """
        entries = plan.entries
        self._entries = trees = plan.tree_entries
        self._numbers = {entry.request.request_id: n for n, entry in enumerate(trees)}
        self._trees, self._refused, self._held, self._costs = (), set(), None, NOTHING
        rows = sum([entry.end - entry.start for entry in entries])
        self._step = len(entries), rows
        context = sum([entry.end for entry in entries]) / max(1, len(entries))
        for model in self._models:
            model.begin(context)
        wishes = any(map(has_own_size, trees))
        if self.guard is not None:
            names = [entry.request.request_id for entry in entries]
            self._held = self.guard.begin(names, len(trees), rows, wishes)
            if self._held is not None:
                own = not self.guard.lacks_draft
                plan = StepPlan(
                    tuple(
                        [e if own and has_own_size(e) else replace(e, speculators=_NOBODY) for e in entries]
                    )
                )
        if self._held is None or wishes:
            self._look_up(*self._step)
        return plan

    def _look_up(self, requests: int, rows: int) -> None:
        """Look up the target's passes of a step of so many requests, with so many rows without guesses."""
        last = rows + sum([entry.max_nodes for entry in self._entries]) - len(self._entries)
        passes = self._target.table(max(last, requests + 1))
        self._costs = StepCosts(passes, rows, last, passes[requests] - passes[rows], float(requests))
        self._row = passes[requests + 1] - passes[requests]

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        """For those whose first level is worth its pass and the reading, and those with a size of their own.

        A prompt is read where the reading will have been worth it when the answer is written. A text that the
        draft is far behind in is read where the guard can afford it. A draft whose passes have no known price
        starts everywhere.
        """
        if speculator not in self._drafts:
            return [True] * len(entries)
        draft, costs = self._drafts[speculator], self._costs
        self._growing = [
            Growing(tree, self.chances, entry.max_nodes, all_stay=has_own_size(entry))
            for entry, tree in zip(self._entries, guessed, strict=True)
        ]
        self._expect()
        step = Without(costs, self._tokens, self._nodes, self._row)
        starts = [True] * len(entries)
        free = [i for i, entry in enumerate(entries) if not has_own_size(entry)]
        if free:
            asked = [entries[i] for i in free]
            growing = {
                n: self._growing[self._numbers[entry.request.request_id]]
                for n, entry in enumerate(asked)
                if entry.max_nodes > 1
            }
            worth = self._starts[speculator].which(asked, [unread[i] for i in free], growing, step)
            for i, start in zip(free, worth, strict=True):
                starts[i] = start
        late = list[tuple[int, int]]()
        for i in free:
            entry = entries[i]
            reads = unread[i] - (len(entry.token_ids) - entry.end)  # of a prompt what this step computes
            if starts[i] and reads > entry.end - entry.start + USUAL_UNREAD:
                late.append((reads, i))
        if late and self.guard is not None:
            affordable = self.guard.allowance
            for left, i in sorted(late):
                affordable -= draft.costs.expected(left)
                starts[i] = affordable >= 0
        drawing = sum([start and entry.max_nodes > 1 for start, entry in zip(starts, entries, strict=True)])
        if drawing:
            self._spend(draft.costs.table(drawing)[drawing])
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
        """Those that are likely to become text, and all of requests with a size of their own.

        Each is a row of the draft's pass, and of the level it brings one node is likely enough to be
        verified; of samples all are. A draft whose passes have no known price goes on below all.
        """
        if speculator not in self._drafts:
            return list(ends)
        draft, levels = self._drafts[speculator], self.chances.levels[speculator]
        own = [has_own_size(entry) for entry in entries]
        grown = [self._growing[self._numbers[entry.request.request_id]] for entry in entries]
        for growing, tree in zip(grown, trees, strict=True):
            growing.grow(tree)
        self._expect()
        price = self._costs.price(self._tokens, self._nodes)
        level_price = self._tokens * draft.costs.expected(1) / self._costs.seconds(self._nodes)
        gains, bound, wide = list[float](), 0, 0
        for entry, growing, tree, of_tree, stays in zip(entries, grown, trees, ends, own, strict=True):
            if stays:
                bound += len(of_tree)
                continue
            rates, deepest = levels.rates(entry.request.params.temperature), levels.all.depth - 1
            brought = list[float]()
            level = 0
            for end in of_tree:
                level = depth(tree.parents, end)
                brought.append(growing.gain(end, rates[min(level, deepest)], price))
                wide += draft.width(level) if growing.samples else 1
            if self._shares_room and brought:
                room, each = entry.max_nodes - tree.num_nodes, children_each(tree)
                wanted = useful_levels(max(brought), rates[min(level, deepest)].first, level_price)
                brought = best_of(brought, int(room / (each * min(wanted, levels.all.depth - level))))
            gains += brought
        passes = draft.costs.table(bound + len(gains))[bound:]
        each = wide / len(gains) if gains else 1.0  # rows of the target's of every end
        costs, nodes = self._costs, self._nodes
        seconds = [costs.seconds(nodes + round(n * each)) + passes[n] for n in range(len(gains) + 1)]
        goes_on = fastest(gains, self._tokens, seconds)
        self._spend(passes[sum(goes_on)])
        answer = iter(goes_on)
        return [
            [*of_tree] if stays else [end for end in of_tree if next(answer)]
            for of_tree, stays in zip(ends, own, strict=True)
        ]

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The nodes that make the step faster, of each request as many as it may have.

        Requests with a size of their own have as many as there are.
        """
        self._trees, chosen = trees, list(trees)
        guessed = [n for n, tree in enumerate(trees) if len(tree.token_ids) > 1]
        if guessed:
            candidates = [self._candidates(self._entries[n], trees[n]) for n in guessed]
            for n, nodes in zip(guessed, choose(candidates, self._costs), strict=True):
                chosen[n] = keep(trees[n], nodes)
        if self.guard is not None:
            most = [min(e.max_nodes, len(t.token_ids)) for e, t in zip(self._entries, chosen, strict=True)]
            self.guard.chosen(sum(most) - len(most))
        return chosen

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal:
        """The probabilities of the nodes that were chosen, and the seconds the step is expected to take."""
        if self._costs is NOTHING:  # nobody may guess
            self._look_up(*self._step)
        costs = self._costs
        likely = [along_paths(self.chances.node_rates(tree), tree.parents) for tree in trees]
        without, requests = costs.passes[costs.rows], int(costs.tokens)
        drafts = costs.spent - (costs.passes[requests] - without)
        seconds = drafts + costs._replace(spent=0.0).seconds(sum(len(of) - 1 for of in likely))
        besides = 0.0 if self.guard is None else self.guard.besides_pass
        return Appraisal(likely, seconds - without, seconds + besides, self._held)

    def observe(self, report: StepReport) -> None:
        """Learn from every guess whose parent became text, verified or not; and from the step's seconds."""
        if self._trees:
            for outcome in report.outcomes:
                number = self._numbers.pop(outcome.request_id, None)
                if number is not None and len(self._trees[number].token_ids) > 1:
                    temperature = self._entries[number].request.params.temperature
                    self.chances.learn(self._trees[number], outcome.committed, temperature)
        if report.seconds:
            for name in self._refused:
                self._starts[name].refused()
            if self.guard is not None:
                self.guard.observe(report.outcomes, report.seconds, report.passes)

    def _expect(self) -> None:
        """The tokens that the step makes with the guesses so far, and the nodes that pay for that."""
        tokens, nodes, loose = self._costs.tokens, 0, list[float]()
        for growing in self._growing:
            tokens, nodes = tokens + growing.tokens, nodes + growing.nodes
            if growing.all_stay:
                tokens, nodes = tokens + sum(growing.loose), nodes + len(growing.loose)
            else:
                loose += growing.loose
        loose.sort(reverse=True)
        count = how_many(loose, tokens, self._costs.seconds_from(nodes, len(loose)))
        self._tokens, self._nodes = tokens + sum(loose[:count]), nodes + count

    def _candidates(self, entry: PlanEntry, tree: TokenTree) -> Candidates:
        """A request's nodes as candidates to be verified."""
        likely = along_paths(self.chances.node_rates(tree), tree.parents)
        firm = firm_nodes(tree) if any_sampled(tree.draws) else frozenset[int]()
        return Candidates(likely, firm, entry.max_nodes, has_own_size(entry))

    def _spend(self, seconds: float) -> None:
        """A draft's pass is made."""
        self._costs = self._costs._replace(spent=self._costs.spent + seconds)
