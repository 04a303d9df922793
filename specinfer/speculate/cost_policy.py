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

import math
from collections.abc import Mapping, Sequence
from typing import Final

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_model import PassCosts
from specinfer.speculate.decision import Appraisal
from specinfer.speculate.draft_costs import DraftCosts
from specinfer.speculate.draft_starts import DraftStarts, Guessed
from specinfer.speculate.estimator import Estimates, Estimator
from specinfer.speculate.guesses import Guesses, along_paths
from specinfer.speculate.policy import StepReport, has_own_size
from specinfer.speculate.speculator import LevelOutcome
from specinfer.speculate.tokens_per_second import fastest, how_many
from specinfer.tree import Draw, TokenTree
from specinfer.tree.prune import firm_nodes, keep
from specinfer.tree.token_tree import next_nodes

# Beside drafts the odds of what none of them has guessed count as so much. Estimates of lookups are right on
# average, but those that a step is built on are the ones that came out too high (docs/log.md).
_BESIDE: Final = 0.5
# When a draft is about to start, they count as so much besides: its first level brings more than a token. It
# shows which of their guesses to drop, and whether to go on.
_DOUBT: Final = 0.35
_MORE_ROWS: Final = 4  # over which the price of a row is taken: a curve has steps

# A request, draws in it, all there are below their parents, and how many nodes there are.
Question = tuple[PlanEntry, Sequence[Draw], int]

# A tree by number, its nodes that stay, those that may be dropped, likeliest first, and what they bring.
_Choice = tuple[int, set[int], list[int], list[float]]


class CostPolicy:
    """A SpeculationPolicy that weighs what nodes are expected to bring against what they cost.

    Requests that ask for an expansion or a number of nodes get them. Sampled draws are never dropped: whether
    a level is drawn is decided before it is, by what was drawn until then (docs/losslessness.md).
    """

    def __init__(
        self, target: PassCosts, drafts: Mapping[str, DraftCosts], estimator: Estimates | None = None
    ) -> None:
        """`estimator` says how likely guesses are; without one that is what became of guesses like them."""
        self._target = target
        self._drafts = drafts
        self._estimator: Estimates = estimator or Estimator(logistics=False)
        self._starts = {name: DraftStarts(draft) for name, draft in drafts.items()}
        self._entries: tuple[PlanEntry, ...] = ()  # of this step, those with a tree
        self._temperatures: dict[str, float] = {}  # of this step's requests
        self._requests = 0  # of this step, each of which makes a token
        self._shown: Sequence[TokenTree] = ()  # what all have guessed so far, by entry
        self._guesses: dict[str, Guesses] = {}  # the same and what a draft is adding, by request
        self._trees: dict[str, TokenTree] = {}  # what all have guessed in the end, by request
        self._passes: Sequence[float] = [0.0]  # seconds of the target's pass by its rows
        self._rows = 0  # of the target in the step, without nodes below roots
        self._last = 0  # and with all that there may be
        self._spent = 0.0  # seconds of this step's passes of drafts, less those its prompts take

    def begin_step(self, plan: StepPlan) -> StepPlan:
        """Look up what the target's pass takes, whatever is guessed."""
        self._entries = plan.tree_entries
        self._temperatures = {e.request.request_id: e.request.params.temperature for e in plan.entries}
        self._requests = len(plan.entries)
        self._shown, self._guesses, self._trees = (), {}, {}
        self._rows = sum([entry.end - entry.start for entry in plan.entries])
        self._last = self._rows + sum([entry.max_nodes - 1 for entry in self._entries])
        self._passes = self._target.table(max(self._last, self._requests + 1))
        self._spent = self._passes[self._requests] - self._passes[self._rows]
        return plan

    def show(self, trees: Sequence[TokenTree]) -> None:
        """Remember what has been guessed so far."""
        self._shown = trees

    def worth_starting(
        self, speculator: str, entries: Sequence[PlanEntry], unread: Sequence[int]
    ) -> list[bool]:
        """For those whose first level is worth its pass and the reading, and those with a size of their own.

        A prompt is read where the reading will have been worth it when the answer is written. A draft whose
        passes have no known price is let start anywhere.
        """
        if speculator not in self._drafts:
            return [True] * len(entries)
        asked = [(e, tree.draws, tree.num_nodes) for e, tree in zip(self._entries, self._shown, strict=True)]
        rates = self._rates(asked)
        starts = [True] * len(entries)
        free = [i for i, entry in enumerate(entries) if not has_own_size(entry)]
        if free:
            doubted = [
                self._doubted(tree.draws, known, _DOUBT)
                for tree, known in zip(self._shown, rates, strict=True)
            ]
            self._guesses = self._shown_with(doubted)
            tokens, nodes = self._so_far()
            row = self._passes[self._requests + 1] - self._passes[self._requests]
            step = Guessed(self._guesses, tokens, nodes, self._price(tokens, nodes), self._seconds, row)
            worth = self._starts[speculator].which(
                [entries[i] for i in free], [unread[i] for i in free], step
            )
            for i, start in zip(free, worth, strict=True):
                starts[i] = start
        self._guesses = self._shown_with(rates)
        growing = sum([start and entry.max_nodes > 1 for start, entry in zip(starts, entries, strict=True)])
        if growing:
            self._spent += self._drafts[speculator].passes(growing)[growing]
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
        draft = self._drafts[speculator]
        guesses, asked = list[Guesses](), list[Question]()
        for entry, tree in zip(entries, trees, strict=True):
            known = self._guesses[entry.request.request_id]
            guesses.append(known)
            asked.append((entry, known.grow(tree), known.num_nodes))
        for known, (_, new, _), rates in zip(guesses, asked, self._rates(asked), strict=True):
            known.estimate(new, rates)
        chosen = list[list[int]]()
        free, gains, wide, bound = list[tuple[int, int]](), list[float](), 0, 0
        tokens, nodes = self._so_far()
        price = self._price(tokens, nodes)
        for i, (entry, known, of_tree) in enumerate(zip(entries, guesses, ends, strict=True)):
            if has_own_size(entry):
                chosen.append([*of_tree])
                bound += len(of_tree)
                continue
            chosen.append([])
            for end in of_tree:
                free.append((i, end))
                rate = draft.rate(
                    known.depth(end), entry.request.request_id, entry.request.params.temperature
                )
                gains.append(known.gain(end, rate, known.left(end), price))
                # Of the nodes to come the likely ones are verified, one of each end; of samples all.
                wide += draft.width(known.depth(end)) if known.samples else 1
        passes = draft.passes(bound + len(free))[: bound + len(free) + 1]
        count = 0
        if free:
            each = wide / len(free)
            seconds = [
                self._seconds(nodes + round(more * each)) + taken for more, taken in enumerate(passes[bound:])
            ]
            for (i, end), goes_on in zip(free, fastest(gains, tokens, seconds), strict=True):
                if goes_on:
                    chosen[i].append(end)
                    count += 1
        self._spent += passes[bound + count]
        return list(chosen)

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The nodes that make the step faster, of each request as many as it may have.

        Requests with a size of their own have as many as there are.
        """
        self._trees = {e.request.request_id: tree for e, tree in zip(self._entries, trees, strict=True)}
        tokens, nodes = float(self._requests), 0
        hopes = list[float]()  # of all nodes that may be dropped
        choices = list[_Choice]()
        for i, of_tree in self._hopes(trees):
            entry, tree = self._entries[i], trees[i]
            stay = firm_nodes(tree)
            droppable = [node for node in range(1, tree.num_nodes) if node not in stay]
            droppable.sort(key=of_tree.__getitem__, reverse=True)
            del droppable[max(0, entry.max_nodes - 1 - len(stay)) :]
            if has_own_size(entry):
                stay.update(droppable)
                droppable = []
            tokens += sum([of_tree[node] for node in stay])
            nodes += len(stay)
            of_droppable = [of_tree[node] for node in droppable]
            hopes += of_droppable
            choices.append((i, stay, droppable, of_droppable))
        fitted = list(trees)
        if not choices:
            return fitted
        hopes.sort(reverse=True)
        kept = how_many(hopes, tokens, self._seconds_from(nodes, len(hopes)))
        # The least likely of those that are kept: of others as likely the first ones are.
        least = hopes[kept - 1] if kept else math.inf
        ties = kept - sum(map(least.__lt__, hopes))
        for i, stay, droppable, of_droppable in choices:
            above = sum(map(least.__lt__, of_droppable))
            level = min(ties, of_droppable.count(least))
            ties -= level
            tree, best = trees[i], above + level
            if len(stay) + best + 1 < tree.num_nodes:
                fitted[i] = keep(tree, sorted([0, *stay, *droppable[:best]]))
        return fitted

    def appraise(self, trees: Sequence[TokenTree]) -> Appraisal:
        """The hopes it has for the nodes that were chosen, and the seconds it expects the step to take."""
        asked = [(e, tree.draws, tree.num_nodes) for e, tree in zip(self._entries, trees, strict=True)]
        hopes = [
            along_paths(rates, tree.parents) for rates, tree in zip(self._rates(asked), trees, strict=True)
        ]
        without = self._passes[self._rows]
        drafts = self._spent - (self._passes[self._requests] - without)
        seconds = drafts + self._passes[min(self._rows + sum(len(of) - 1 for of in hopes), self._last)]
        return Appraisal(hopes, seconds - without, seconds)

    def observe(self, report: StepReport) -> None:
        """Learn from every guess whose parent became text, verified or not: the next token is known."""
        for name, draft in self._drafts.items():
            for seen in report.hindsight.get(name, ()):
                draft.learn(seen, self._temperatures.get(seen.request_id))
        for outcome in report.outcomes:
            tree = self._trees.pop(outcome.request_id, None)
            if tree is None or tree.num_nodes == 1:
                continue
            temperature = self._temperatures[outcome.request_id]
            becomes = next_nodes(tree, outcome.committed)
            below: dict[int, list[Draw]] = {node: [] for node in becomes}
            for draw in tree.draws:
                if draw.parent in below:
                    below[draw.parent].append(draw)
            path = [(below[node], child) for node, child in becomes.items()]
            self._estimator.learn_path(path, tree.num_nodes, temperature)
            for level, (draws, child) in enumerate(path):
                self._learn_drafts(outcome.request_id, level, draws, child)
        for outcome in report.outcomes:
            if outcome.finished:
                for draft in self._drafts.values():
                    draft.forget(outcome.request_id)

    def _learn_drafts(self, request_id: str, level: int, draws: Sequence[Draw], child: int | None) -> None:
        """Learn from the draws below one node of the text, of which those at `child` became text."""
        for name, draft in self._drafts.items():
            if own := [draw.node for draw in draws if draw.speculator == name]:
                choice = own.index(child) if child in own else None
                draft.learn(LevelOutcome(request_id, level, choice), self._temperatures[request_id])

    def _shown_with(self, rates: Sequence[Sequence[float]]) -> dict[str, Guesses]:
        """What others than the draft have guessed, by request, where these are the rates of the nodes."""
        return {
            entry.request.request_id: Guesses(tree, of_tree)
            for entry, tree, of_tree in zip(self._entries, self._shown, rates, strict=True)
        }

    def _doubted(self, draws: Sequence[Draw], rates: Sequence[float], part: float) -> list[float]:
        """The rates of nodes, where the odds of those that no draft has drawn count as so much."""
        drafted = {draw.node for draw in draws if draw.speculator in self._drafts}
        # One line: this is asked of every node of a step.
        return [p if n in drafted else part * p / (1 - p + part * p) for n, p in enumerate(rates)]

    def _so_far(self) -> tuple[float, int]:
        """The step's expected tokens and nodes below roots, with those guesses so far that pay."""
        tokens, nodes = float(self._requests), 0
        hopes = list[float]()
        for entry in self._entries:
            guesses = self._guesses[entry.request.request_id]
            brings, stay, droppable = guesses.parts(entry.max_nodes, all_stay=has_own_size(entry))
            tokens, nodes = tokens + brings, nodes + stay
            hopes += droppable
        if not hopes:
            return tokens, nodes
        if len(self._entries) > 1:
            hopes.sort(reverse=True)
        kept = how_many(hopes, tokens, self._seconds_from(nodes, len(hopes)))
        return tokens + sum(hopes[:kept]), nodes + kept

    def _hopes(self, trees: Sequence[TokenTree]) -> list[tuple[int, list[float]]]:
        """The probabilities of all nodes to become text, of each tree with guesses, by its number."""
        known = dict[int, list[float]]()
        asked = dict[int, Question]()
        for i, (entry, tree) in enumerate(zip(self._entries, trees, strict=True)):
            if tree.num_nodes == 1:
                continue
            guesses = self._guesses.get(entry.request.request_id)
            if guesses is not None and guesses.are(tree):
                known[i] = guesses.probabilities
            else:
                asked[i] = (entry, tree.draws, tree.num_nodes)
        for i, rates in zip(asked, self._rates([*asked.values()]), strict=True):
            known[i] = along_paths(rates, trees[i].parents)
        return sorted(known.items())

    def _rates(self, asked: Sequence[Question]) -> list[list[float]]:
        """The probability of every node to become text if its parent does, for each question [num_nodes]."""
        of = self._estimator.node_rates
        rates = [of(draws, nodes, entry.request.params.temperature) for entry, draws, nodes in asked]
        if not self._drafts:
            return rates
        every = zip(asked, rates, strict=True)
        return [self._doubted(draws, known, _BESIDE) for (_, draws, _), known in every]

    def _seconds(self, nodes: int) -> float:
        """Of the step with so many nodes below its roots, as far as it has been spent or will be."""
        return self._spent + self._passes[min(self._rows + nodes, self._last)]

    def _price(self, tokens: float, nodes: int) -> float:
        """The tokens that another row of the target's costs, if a step makes so many with so many nodes."""
        seconds = self._seconds(nodes)
        return tokens * (self._seconds(nodes + _MORE_ROWS) - seconds) / (_MORE_ROWS * seconds)

    def _seconds_from(self, nodes: int, more: int) -> list[float]:
        """Of the step with so many nodes below its roots, and with 1, 2, ... `more`."""
        first = self._rows + nodes
        found = [*map(self._spent.__add__, self._passes[first : min(first + more, self._last) + 1])]
        return found + [self._seconds(nodes + more)] * (more + 1 - len(found))
