"""The cost policy as it is easiest to read: every question is answered anew, from whole trees and arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.policy.calibration import Calibration
from specinfer.speculate.policy.level_counts import LevelCounts, LevelRate
from specinfer.speculate.policy.speculation_policy import StepReport, has_own_size
from specinfer.tree import TokenTree, merge
from specinfer.tree.expansion import Expansion
from specinfer.tree.merging import firm_nodes, keep, sampled
from specinfer.tree.token_tree import draws_by_parent

Floats = NDArray[np.float64]
LEFT = {False: 1.0, True: 0.3}  # of a first level by others, at first, by whether there is a prediction
MADE = {False: 1.0, True: 8.0}  # tokens of a step with others' guesses, likewise
LIKE_ALL = (
    4  # guesses at a temperature that are thought to have come, right as often as those of all requests
)
LIKE_THESE = 16  # guesses that a request is thought to have had, right as often as those at its temperature
BESIDE = 0.5  # times the odds of others' guesses, beside a draft
DOUBT = 0.35  # times these, when it is about to start


class ObviousPolicy:
    """Decides as CostPolicy does, for one draft, "draft"; learns as it does."""

    def __init__(self, target: CostCurve, draft: CostCurve, expansion: Expansion) -> None:
        self.target, self.draft, self.expansion = target, draft, expansion
        self.all = LevelCounts(expansion.depth)
        # Of each request, and of those of about one temperature, what became of guesses: their levels, and
        # which of them was right.
        self.own: dict[str, list[tuple[int, int | None]]] = {}
        self.alike: dict[str, list[tuple[int, int | None]]] = {}
        self.counts = Calibration()
        self.saved = 0.0
        # What others left of the first level, from the first step on, by whether there is a prediction.
        self.left: dict[bool, list[float]] = {False: [], True: []}
        self.made: dict[bool, list[float]] = {False: [], True: []}  # tokens of a step with others' guesses

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
            samples = [any(map(sampled, trees[i].draws)) for i, _ in free]
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
        self.heats = {e.request.request_id: heat(e) for e in self.entries}
        tokens, nodes = float(self.requests), 0
        stay: list[set[int]] = []
        candidates: list[tuple[float, int, int]] = []  # least likely first; of equal ones the last
        for i, (entry, tree) in enumerate(zip(self.entries, trees, strict=True)):
            hopes, firm = self._hopes(tree), firm_nodes(tree)
            free = sorted((-hopes[node], i, node) for node in range(1, tree.num_nodes) if node not in firm)
            del free[max(0, entry.max_nodes - 1 - len(firm)) :]
            if has_own_size(entry):
                firm |= {node for _, _, node in free}
                free = []
            tokens += sum(hopes[node] for node in firm)
            nodes += len(firm)
            stay.append({0, *firm})
            candidates += free
        # Of equal hopes that of the earlier request, and there that of the earlier node.
        candidates.sort()
        chances = np.array([-hope for hope, _, _ in candidates])
        count = fastest(chances, tokens, self._seconds(nodes + np.arange(len(chances) + 1)))
        for _, i, node in candidates[:count]:
            stay[i].add(node)
        return [keep(tree, sorted(nodes)) for tree, nodes in zip(trees, stay, strict=True)]

    def observe(self, report: StepReport) -> None:
        for outcome in report.outcomes:
            tree = self.trees[outcome.request_id]
            below, node = draws_by_parent(tree.draws), 0
            for level, token in enumerate(outcome.committed if tree.num_nodes > 1 else ()):
                draws, child = below.get(node, []), tree.children()[node].get(token)
                self.counts.learn(draws, child)
                if drawn := [draw for draw in draws if draw.speculator == "draft"]:
                    right = [i for i, draw in enumerate(drawn) if draw.node == child]
                    choice = right[0] if right else None
                    self.all.learn(level, choice)
                    self.own.setdefault(outcome.request_id, []).append((level, choice))
                    self.alike.setdefault(self.heats[outcome.request_id], []).append((level, choice))
                if child is None:
                    break
                node = child
            if outcome.finished:
                self.own.pop(outcome.request_id, None)

    def _hopes(self, tree: TokenTree, doubt: float = 1.0) -> list[float]:
        """How likely each node is to become text; the odds of others' count BESIDE and `doubt` times."""
        rates = [1.0] + [0.0] * (tree.num_nodes - 1)
        for draw, rate in zip(tree.draws, self.counts.rates(tree.draws), strict=True):
            rates[draw.node] = max(rates[draw.node], rate)
        drafted = {draw.node for draw in tree.draws if draw.speculator == "draft"}
        for part in (BESIDE, doubt):
            rates = [
                rate if node in drafted else part * rate / (1 - rate + part * rate)
                for node, rate in enumerate(rates)
            ]
        hopes = [1.0]
        for node in range(1, tree.num_nodes):
            hopes.append(rates[node] * hopes[tree.parents[node]])
        return hopes

    def _guesses(self, entry: PlanEntry) -> TokenTree:
        others, drawn = self.others[entry.request.request_id], self.drawn.get(entry.request.request_id)
        return others if drawn is None else merge([others, drawn])

    def _gain(self, entry: PlanEntry, end: int, price: float, doubt: float = 1.0) -> float:
        """What children of a node of the draft's tree bring that nobody else holds."""
        others, drawn = self.others[entry.request.request_id], self.drawn.get(entry.request.request_id)
        all_of_them = self._guesses(entry)
        hopes = self._hopes(all_of_them, doubt)
        path = () if drawn is None else drawn.path_tokens(end)
        node = next(n for n in range(all_of_them.num_nodes) if all_of_them.path_tokens(n) == path)
        rate, arrives = self._rate(len(path), entry), hopes[node] * missed_by(others, node, hopes)
        samples = drawn is not None and any(map(sampled, drawn.draws))
        return arrives * rate.first + max(0.0, arrives * rate.other - (0.0 if samples else price))

    def _rate(self, level: int, entry: PlanEntry) -> LevelRate:
        """How likely guesses at a level are right, by all requests' outcomes, those alike, and its own."""
        alike = came_of(self.alike.get(heat(entry), ()), level, self.all.rates()[level], LIKE_ALL)
        return came_of(self.own.get(entry.request.request_id, ()), level, alike, LIKE_THESE)

    def _price(self, tokens: float, nodes: int) -> float:
        """The tokens that another row of the target's costs, as four cost it."""
        few, more = self._seconds(np.array([nodes, nodes + 4])).tolist()
        return tokens * (more - few) / (4 * few)

    def _so_far(self, doubt: float = 1.0) -> tuple[float, int]:
        """The tokens and nodes of the step, as it would be without another level."""
        tokens, nodes = float(self.requests), 0
        free: list[float] = []
        for entry in self.entries:
            tree = self._guesses(entry)
            hopes, firm = self._hopes(tree, doubt), firm_nodes(self.others[entry.request.request_id])
            firm |= {draw.node for draw in tree.draws if sampled(draw)}
            best = sorted((hopes[n] for n in range(1, tree.num_nodes) if n not in firm), reverse=True)
            del best[max(0, entry.max_nodes - 1 - len(firm)) :]
            tokens += sum(hopes[node] for node in firm)
            nodes += len(firm)
            if has_own_size(entry):
                tokens, nodes, best = tokens + sum(best), nodes + len(best), []
            free += best
        free.sort(reverse=True)
        kept = fastest(np.array(free), tokens, self._seconds(nodes + np.arange(len(free) + 1)))
        return tokens + sum(free[:kept]), nodes + kept

    def _first_level(self, entries: Sequence[PlanEntry], unread: NDArray[np.int64]) -> NDArray[np.bool_]:
        grows = np.array([entry.max_nodes > 1 for entry in entries])
        tokens, nodes = self._so_far(DOUBT)
        price = self._price(tokens, nodes)
        gains, parts = np.zeros(len(entries)), np.zeros(len(entries))
        # Prompts first: what others leave in this step is not known when one is weighed.
        for i in sorted(range(len(entries)), key=grows.__getitem__):
            entry = entries[i]
            predicted, rate = bool(entry.request.prediction), self._rate(0, entry).any
            seen, made = self.left[predicted], self.made[predicted]
            if grows[i]:
                others = self.others[entry.request.request_id]
                hopes = self._hopes(others, DOUBT)
                gains[i] = self._gain(entry, 0, price, DOUBT)
                seen.append(missed_by(others, 0, hopes))
                made.append(1 + sum(hope for hope in hopes[1:] if hope > price))
            else:
                gains[i] = rate * of_late(seen, LEFT[predicted])
            usual, of_others = rate * of_late(seen, LEFT[predicted]), of_late(made, MADE[predicted])
            # What this step has of all that the draft will bring: the others have what is usual.
            room = entry.room if grows[i] else entry.room - 1  # of which the first token has no guesses
            later = (room - 1 - of_others - gains[i]) / (of_others + usual)
            parts[i] = gains[i] + usual * max(0, later)
        together = 2 * len(entries)
        reading = self.draft.seconds(together + np.maximum(unread, 2) - 2) - self.draft.seconds([together])
        shares = reading * gains / np.maximum(1e-300, parts)
        # Behind a prompt levels are to be worth their passes, too; of a text that is read that is seen below.
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
        self.saved += 0.01 * float(seconds[len(chosen)])
        starts &= ~grows
        starts[chosen] = True
        refused = grows & ~starts
        if refused.any():
            least = int(np.where(refused, unread, 1 << 40).argmin())
            if self.saved >= float(self.draft.seconds([unread[least]])[0]):
                self.saved = 0.0
                starts[least] = True
        return starts

    def _seconds(self, nodes: NDArray[np.int64]) -> Floats:
        return self.spent + self.target.seconds(self.rows + np.minimum(nodes, self.most))


def heat(entry: PlanEntry) -> str:
    """What a request's temperature is called: those of one name are counted together."""
    temperature = entry.request.params.temperature
    if temperature < 1e-5:
        return "greedy"
    return "cool" if temperature <= 0.5 else "warm" if temperature <= 1 else "hot"


def came_of(
    seen: Sequence[tuple[int, int | None]], level: int, usual: LevelRate, thought: float
) -> LevelRate:
    """How often guesses at a level were right, if `thought` ones before these came out as `usual` has it."""
    firsts = others = tries = 0.0
    for at, choice in seen:
        if at == 0:
            firsts, others, tries = 0.97 * firsts, 0.97 * others, 0.97 * tries
        if at == level:
            firsts, others, tries = firsts + (choice == 0), others + bool(choice), tries + 1
    first = (firsts + thought * usual.first) / (tries + thought)
    of_rest = others + thought * usual.other / (1 - usual.first)
    return LevelRate(first, (1 - first) * of_rest / (tries - firsts + thought))


def missed_by(others: TokenTree, node: int, hopes: Sequence[float]) -> float:
    """How likely no child of a node that others have guessed holds the next token."""
    held = draws_by_parent(others.draws).get(node, []) if node < others.num_nodes else []
    return max(0.0, 1.0 - sum(hopes[child] / hopes[node] for child in sorted({draw.node for draw in held})))


def of_late(values: Sequence[float], thought: float) -> float:
    """The mean of three thoughts and then these, each of which counts .97 times as much as the next."""
    weights = 0.97 ** np.arange(len(values) - 1, -1, -1.0)
    before = 3 * 0.97 ** len(values)
    return float((before * thought + (weights * values).sum()) / (before + weights.sum()))


def fastest(hopes: Floats, tokens: float, seconds: Floats) -> int:
    """How many of the likeliest make a step's tokens per second highest."""
    return int(((np.append(0.0, hopes.cumsum()) + tokens) / seconds).argmax())
