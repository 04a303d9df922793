"""The cost policy in its plainest form: computes every answer from whole trees and arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.policy.acceptance import AcceptanceRates, LevelRate
from specinfer.speculate.policy.policy import StepReport, has_own_size
from specinfer.tree import TokenTree
from specinfer.tree.merging import keep, pinned_nodes
from specinfer.tree.token_tree import Expansion, single_node

Floats = NDArray[np.float64]
# initial value of the share of a first level that others miss, without and with a prediction
LEFT = {False: 1.0, True: 0.3}
MADE = {False: 1.0, True: 8.0}  # initial tokens of a step with others' proposals, likewise


class PlainPolicy:
    """Decides and learns like CostPolicy, for one draft named "draft"."""

    def __init__(self, target: CostCurve, draft: CostCurve, expansion: Expansion) -> None:
        self.target, self.draft, self.expansion = target, draft, expansion
        self.acceptance = AcceptanceRates({"draft": expansion.depth})
        # The share of the first level that others missed, per step, without and with a prediction.
        self.left: dict[bool, list[float]] = {False: [], True: []}
        self.made: dict[bool, list[float]] = {False: [], True: []}  # tokens per step with others' proposals

    def begin_step(self, plan: StepPlan) -> StepPlan:
        self.entries, self.requests = plan.tree_entries, len(plan.entries)
        self.rows = sum(entry.end - entry.start for entry in plan.entries)
        self.most = sum(entry.max_nodes - 1 for entry in self.entries)
        alone, with_prompts = self.target.seconds([self.requests, self.rows])
        self.spent = float(alone - with_prompts)
        self.drawn: dict[str, TokenTree] = {}
        return plan

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        self.others = {e.request.request_id: tree for e, tree in zip(self.entries, guessed, strict=True)}
        starts = [True] * len(entries)
        free = [i for i, entry in enumerate(entries) if not has_own_size(entry)]
        if free:
            worth = self._first_level([entries[i] for i in free], np.array([unread[i] for i in free]))
            for i, start in zip(free, worth.tolist(), strict=True):
                starts[i] = start
        growing = sum(start and entry.max_nodes > 1 for start, entry in zip(starts, entries, strict=True))
        self.spent += float(self.draft.seconds([growing])[0])
        return starts

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        self.drawn.update({e.request.request_id: tree for e, tree in zip(entries, trees, strict=True)})
        chosen: list[list[int]] = [
            [*of] if has_own_size(e) else [] for e, of in zip(entries, ends, strict=True)
        ]
        bound = sum(map(len, chosen))
        free = [(i, end) for i, of in enumerate(ends) for end in of if not has_own_size(entries[i])]
        passes = self.draft.seconds(np.arange(bound + len(free) + 1))
        if free:
            tokens, nodes = self._so_far()
            price = self._price(tokens, nodes)
            gains = np.array([self._gain(entries[i], end, price) for i, end in free])
            samples = [any(draw.rule.is_sampled for draw in trees[i].draws) for i, _ in free]
            widths = [self.expansion.widths[len(trees[i].path_tokens(end))] for i, end in free]
            each = sum(w if of_samples else 1 for w, of_samples in zip(widths, samples, strict=True)) / len(
                free
            )
            more = np.rint(np.arange(len(free) + 1) * each).astype(np.int64)
            seconds = self._seconds(nodes + more) + passes[bound:]
            order = (-gains).argsort(kind="stable")
            best = order[: fastest(gains[order], tokens, seconds)]
            for which in sorted(best.tolist()):
                chosen[free[which][0]].append(free[which][1])
        self.spent += float(passes[sum(map(len, chosen))])
        return list(chosen)

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        self.trees = {e.request.request_id: tree for e, tree in zip(self.entries, trees, strict=True)}
        tokens, nodes = float(self.requests), 0
        stay: list[set[int]] = []
        candidates: list[tuple[float, int, int]] = []  # least likely first; the last of equal ones
        for i, (entry, tree) in enumerate(zip(self.entries, trees, strict=True)):
            probabilities, pinned = self._probabilities(tree), pinned_nodes(tree)
            free = sorted(
                (-probabilities[node], i, node) for node in range(1, tree.num_nodes) if node not in pinned
            )
            del free[max(0, entry.max_nodes - 1 - len(pinned)) :]
            if has_own_size(entry):
                pinned |= {node for _, _, node in free}
                free = []
            tokens += sum(probabilities[node] for node in pinned)
            nodes += len(pinned)
            stay.append({0, *pinned})
            candidates += free
        # Among equal probabilities the earlier request comes first, then the earlier node.
        candidates.sort()
        gains = np.array([-probability for probability, _, _ in candidates])
        count = fastest(gains, tokens, self._seconds(nodes + np.arange(len(gains) + 1)))
        for _, i, node in candidates[:count]:
            stay[i].add(node)
        return [keep(tree, sorted(nodes)) for tree, nodes in zip(trees, stay, strict=True)]

    def observe(self, report: StepReport) -> None:
        temperatures = {e.request.request_id: e.request.params.temperature for e in self.entries}
        for outcome in report.outcomes:
            name = outcome.request_id
            if self.trees[name].num_nodes > 1:
                self.acceptance.learn(self.trees[name], outcome.committed, temperatures[name])

    def _probabilities(self, tree: TokenTree) -> list[float]:
        """Return each node's probability of being committed."""
        probabilities, rates = [1.0], self.acceptance.node_rates(tree)
        for node in range(1, tree.num_nodes):
            probabilities.append(rates[node] * probabilities[tree.parents[node]])
        return probabilities

    def _drawn_probabilities(self, entry: PlanEntry) -> tuple[TokenTree, list[float], list[bool]]:
        """Return the draft's tree, its nodes' probabilities, and which of them others have proposed, too."""
        others = self.others[entry.request.request_id]
        tree = self.drawn.get(entry.request.request_id, single_node(others.token_ids[0]))
        paths = {others.path_tokens(node): node for node in range(others.num_nodes)}
        rates, of_others = self.acceptance.node_rates(tree), self.acceptance.node_rates(others)
        probabilities, known = [1.0], [True]
        for node in range(1, tree.num_nodes):
            place = paths.get(tree.path_tokens(node))
            rate = rates[node] if place is None else max(rates[node], of_others[place])
            probabilities.append(rate * probabilities[tree.parents[node]])
            known.append(place is not None)
        return tree, probabilities, known

    def _agreed_probabilities(self, entry: PlanEntry) -> list[float]:
        """Return the probabilities of others' nodes; those that the draft has drawn have the draft's
        confidence.
        """
        others, (drawn, of_drawn, _) = self.others[entry.request.request_id], self._drawn_probabilities(entry)
        drawn_at = {drawn.path_tokens(node): of_drawn[node] for node in range(drawn.num_nodes)}
        probabilities, rates = [1.0], self.acceptance.node_rates(others)
        for node in range(1, others.num_nodes):
            below = rates[node] * probabilities[others.parents[node]]
            probabilities.append(drawn_at.get(others.path_tokens(node), below))
        return probabilities

    def _gain(self, entry: PlanEntry, end: int, price: float) -> float:
        """Return the expected tokens from children of a node of the draft's tree that no other speculator
        has.
        """
        others = self.others[entry.request.request_id]
        drawn, probabilities, _ = self._drawn_probabilities(entry)
        path = drawn.path_tokens(end)
        node = next((n for n in range(others.num_nodes) if others.path_tokens(n) == path), None)
        left = 1.0 if node is None else missed_by(others, node, self.acceptance.node_rates(others))
        rate, arrives = self._rate(len(path), entry), probabilities[end] * left
        samples = any(draw.rule.is_sampled for draw in drawn.draws)
        return arrives * rate.first + max(0.0, arrives * rate.other - (0.0 if samples else price))

    def _rate(self, level: int, entry: PlanEntry) -> LevelRate:
        return self.acceptance.levels["draft"].rates(entry.request.params.temperature)[level]

    def _price(self, tokens: float, nodes: int) -> float:
        """Return the tokens that another target row must bring, from the cost of four rows."""
        few, more = self._seconds(np.array([nodes, nodes + 4])).tolist()
        return tokens * (more - few) / (4 * few)

    def _so_far(self) -> tuple[float, int]:
        """Return the tokens and nodes of the step without another level."""
        tokens, nodes = float(self.requests), 0
        free: list[float] = []
        for entry in self.entries:
            others = self.others[entry.request.request_id]
            probabilities, pinned = self._agreed_probabilities(entry), pinned_nodes(others)
            best = [probabilities[node] for node in range(1, others.num_nodes) if node not in pinned]
            stay = [probabilities[node] for node in pinned]
            drawn, of_drawn, known = self._drawn_probabilities(entry)
            samples = {draw.node for draw in drawn.draws if draw.rule.is_sampled}
            stay += [of_drawn[node] for node in samples]
            best += [of_drawn[n] for n in range(1, drawn.num_nodes) if not known[n] and n not in samples]
            best.sort(reverse=True)
            del best[max(0, entry.max_nodes - 1 - len(stay)) :]
            if has_own_size(entry):
                stay, best = stay + best, []
            tokens += sum(stay)
            nodes += len(stay)
            free += best
        free.sort(reverse=True)
        kept = fastest(np.array(free), tokens, self._seconds(nodes + np.arange(len(free) + 1)))
        return tokens + sum(free[:kept]), nodes + kept

    def _first_level(self, entries: Sequence[PlanEntry], unread: NDArray[np.int64]) -> NDArray[np.bool_]:
        grows = np.array([entry.max_nodes > 1 for entry in entries])
        tokens, nodes = self._so_far()
        price = self._price(tokens, nodes)
        gains, parts = np.zeros(len(entries)), np.zeros(len(entries))
        # Prompts first, since others' proposals of this step are unknown when a prompt is weighed.
        for i in sorted(range(len(entries)), key=grows.__getitem__):
            entry = entries[i]
            predicted, rate = bool(entry.request.prediction), self._rate(0, entry).any
            seen, made = self.left[predicted], self.made[predicted]
            if grows[i]:
                others = self.others[entry.request.request_id]
                probabilities = self._probabilities(others)
                gains[i] = self._gain(entry, 0, price)
                seen.append(missed_by(others, 0, self.acceptance.node_rates(others)))
                made.append(1 + sum(probability for probability in probabilities[1:] if probability > price))
            else:
                gains[i] = rate * of_late(seen, LEFT[predicted])
            usual, of_others = rate * of_late(seen, LEFT[predicted]), of_late(made, MADE[predicted])
            # The expected tokens of the draft's levels in this step; others have their usual share.
            room = entry.room if grows[i] else entry.room - 1  # the first token has no proposals
            later = (room - 1 - of_others - gains[i]) / (of_others + usual)
            parts[i] = gains[i] + usual * max(0, later)
        together = 2 * len(entries)
        reading = self.draft.seconds(together + np.maximum(unread, 2) - 2) - self.draft.seconds([together])
        shares = reading * gains / np.maximum(1e-300, parts)
        # After a prompt levels must pay for their passes, too; for a text that is read, see below.
        level = self.draft.seconds([together]) / len(entries)
        level = level + np.diff(self.target.seconds([self.requests, self.requests + 1]))
        taken = shares + np.where(grows, 0.0, 0.9 * level)
        starts = gains * self._seconds(np.array([nodes])) > taken * tokens
        starts &= grows | np.array([entry.end - entry.start > 1 and entry.room > 2 for entry in entries])
        first = np.flatnonzero(starts & grows)
        first = first[(-gains[first]).argsort(kind="stable")]
        more = np.arange(len(first) + 1)
        seconds = self._seconds(nodes + more) + self.draft.seconds(2 * more)
        seconds[1:] += shares[first].cumsum()
        chosen = first[: fastest(gains[first], tokens, seconds)]
        starts &= ~grows
        starts[chosen] = True
        return starts

    def _seconds(self, nodes: NDArray[np.int64]) -> Floats:
        return self.spent + self.target.seconds(self.rows + np.minimum(nodes, self.most))


def missed_by(others: TokenTree, node: int, rates: Sequence[float]) -> float:
    """Return the probability that no proposed child of a node holds the next token."""
    return max(0.0, 1.0 - sum(rates[child] for child in others.children()[node].values()))


def of_late(values: Sequence[float], thought: float) -> float:
    """Return the mean of three initial values and `values`; each counts .97 times as much as the next."""
    weights = 0.97 ** np.arange(len(values) - 1, -1, -1.0)
    before = 3 * 0.97 ** len(values)
    return float((before * thought + (weights * values).sum()) / (before + weights.sum()))


def fastest(probabilities: Floats, tokens: float, seconds: Floats) -> int:
    """Return the number of likeliest nodes with the highest tokens per second."""
    return int(((np.append(0.0, probabilities.cumsum()) + tokens) / seconds).argmax())
