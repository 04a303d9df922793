"""A step's guesses weighed in plain Python: the oracle of the library, and where there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from specinfer.plan import PlanEntry
from specinfer.speculate.policy.draft_costs import DraftCosts, LevelOutcome
from specinfer.speculate.policy.estimator import Estimates
from specinfer.speculate.policy.guesses import Guesses, along_paths
from specinfer.speculate.policy.speculation_policy import has_own_size
from specinfer.speculate.policy.tokens_per_second import fastest, how_many, total
from specinfer.speculate.policy.weighing import BESIDE, Expected, Grown, StepCosts
from specinfer.speculate.speculator import Outcome
from specinfer.tree import Draw, TokenTree
from specinfer.tree.merging import firm_nodes, keep
from specinfer.tree.token_tree import next_nodes

# A tree by number, its nodes that stay, those that may be dropped, likeliest first, and what they bring.
_Droppable = tuple[int, set[int], list[int], list[float]]


class PlainWeighing:
    """A `Weighing` by an estimator; `drafts` are those whose passes have a price."""

    def __init__(self, estimator: Estimates, drafts: Mapping[str, DraftCosts]) -> None:
        self.guesses: list[Guesses] = []  # by entry, what others have guessed and a draft is adding
        self.trees: Sequence[TokenTree] = ()  # what all have guessed in the end
        self._estimator = estimator
        self._drafts = drafts
        self._entries: Sequence[PlanEntry] = ()

    def begin(self, entries: Sequence[PlanEntry]) -> None:
        """As Weighing says."""
        self._entries = entries
        self.trees = ()

    def expect(self, trees: Sequence[TokenTree], costs: StepCosts, doubt: float) -> Expected:
        """As Weighing says."""
        known = [(tree, self.rates(n, tree.draws, tree.num_nodes)) for n, tree in enumerate(trees)]
        self.guesses = [Guesses(tree, rates) for tree, rates in known]
        doubted = [Guesses(tree, self._doubted(tree.draws, rates, doubt)) for tree, rates in known]
        tokens, nodes = self.so_far(doubted, costs)
        price = costs.price(tokens, nodes)
        return Expected(
            tokens,
            nodes,
            price,
            [guesses.left(0) for guesses in doubted],
            [1 + total(filter(price.__lt__, guesses.probabilities[1:])) for guesses in doubted],
        )

    def deepen(
        self, grown: Sequence[Grown], costs: StepCosts, passes: Sequence[float], rows: float
    ) -> list[bool]:
        """As Weighing says."""
        for number, tree, _, _ in grown:
            known = self.guesses[number]
            draws = known.grow(tree)
            known.estimate(draws, self.rates(number, draws, known.num_nodes))
        tokens, nodes = self.so_far(self.guesses, costs)
        price = costs.price(tokens, nodes)
        gains = [
            self.guesses[one.number].gain(end, rate, price)
            for one in grown
            for end, rate in zip(one.ends, one.rates, strict=True)
        ]
        seconds = [costs.seconds(nodes + round(more * rows)) + passes[more] for more in range(len(gains) + 1)]
        return fastest(gains, tokens, seconds)

    def choose(self, trees: Sequence[TokenTree], costs: StepCosts) -> list[TokenTree]:
        """As Weighing says."""
        self.trees = trees
        tokens, nodes = costs.tokens, 0
        hopes = list[float]()  # of all nodes that may be dropped
        choices = list[_Droppable]()
        for i, of_tree in enumerate(self.hopes(trees)):
            entry, tree = self._entries[i], trees[i]
            if tree.num_nodes == 1:
                continue
            stay = firm_nodes(tree)
            droppable = [node for node in range(1, tree.num_nodes) if node not in stay]
            droppable.sort(key=of_tree.__getitem__, reverse=True)
            del droppable[max(0, entry.max_nodes - 1 - len(stay)) :]
            brings = total(map(of_tree.__getitem__, sorted(stay)))
            if has_own_size(entry):
                brings += total(map(of_tree.__getitem__, droppable))
                stay.update(droppable)
                droppable = []
            tokens += brings
            nodes += len(stay)
            of_droppable = [of_tree[node] for node in droppable]
            hopes += of_droppable
            choices.append((i, stay, droppable, of_droppable))
        hopes.sort(reverse=True)
        kept = how_many(hopes, tokens, costs.seconds_from(nodes, len(hopes)))
        # The least likely of those that are kept: of others as likely the first ones are.
        least = hopes[kept - 1] if kept else math.inf
        ties = kept - sum(map(least.__lt__, hopes))
        fitted = list(trees)
        for i, stay, droppable, of_droppable in choices:
            above = sum(map(least.__lt__, of_droppable))
            level = min(ties, of_droppable.count(least))
            ties -= level
            fitted[i] = keep(trees[i], sorted([0, *stay, *droppable[: above + level]]))
        return fitted

    def hopes(self, trees: Sequence[TokenTree]) -> list[list[float]]:
        """As Weighing says."""
        return [
            along_paths(self.rates(n, tree.draws, tree.num_nodes), tree.parents)
            for n, tree in enumerate(trees)
        ]

    def learn(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """As Weighing says."""
        for number, outcome in outcomes:
            tree = self.trees[number]
            becomes = next_nodes(tree, outcome.committed)
            below: dict[int, list[Draw]] = {node: [] for node in becomes}
            for draw in tree.draws:
                if draw.parent in below:
                    below[draw.parent].append(draw)
            path = [(below[node], child) for node, child in becomes.items()]
            request = self._entries[number].request
            temperature = request.params.temperature
            for level, (draws, child) in enumerate(path):
                self._estimator.learn(draws, child, temperature)
                for name in dict.fromkeys(draw.speculator for draw in draws):
                    if name in self._drafts:
                        own = [draw.node for draw in draws if draw.speculator == name]
                        choice = own.index(child) if child in own else None
                        seen = LevelOutcome(request.request_id, level, choice)
                        self._drafts[name].learn(seen, temperature)

    def so_far(self, guesses: Sequence[Guesses], costs: StepCosts) -> tuple[float, int]:
        """The step's expected tokens and nodes below roots, with those of these guesses that pay."""
        tokens, nodes = costs.tokens, 0
        hopes = list[float]()
        for entry, known in zip(self._entries, guesses, strict=True):
            brings, stay, droppable = known.parts(entry.max_nodes, all_stay=has_own_size(entry))
            tokens, nodes = tokens + brings, nodes + stay
            hopes += droppable
        hopes.sort(reverse=True)
        kept = how_many(hopes, tokens, costs.seconds_from(nodes, len(hopes)))
        return tokens + total(hopes[:kept]), nodes + kept

    def rates(self, number: int, draws: Sequence[Draw], num_nodes: int) -> list[float]:
        """The probability of every node that holds a draw to become text if its parent does, [num_nodes]."""
        temperature = self._entries[number].request.params.temperature
        rates = self._estimator.node_rates(draws, num_nodes, temperature)
        return self._doubted(draws, rates, BESIDE) if self._drafts else rates

    def _doubted(self, draws: Sequence[Draw], rates: Sequence[float], part: float) -> list[float]:
        """The rates of nodes, where the odds of those that no draft has drawn count as so much."""
        drafted = {draw.node for draw in draws if draw.speculator in self._drafts}
        return [p if n in drafted else part * p / (1 - p + part * p) for n, p in enumerate(rates)]
