"""Requests, guesses and costs in round numbers, for tests of policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specinfer import SamplingParams
from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.sampling_params import SpeculationParams
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.drafting import PricedDraft
from specinfer.speculate.policy.guard import Guard
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.token_tree import Expansion
from tests import plans

FREE = CostCurve((1, 1000), (1.0, 1.0))  # memory-bound: rows cost nothing
DEAR = CostCurve((1, 2), (1.0, 2.0))  # compute-bound: every row costs as much as the first
HALF = CostCurve((1, 3), (1.0, 2.0))


def entry(
    name: str = "r",
    *,
    room: int = 100,
    rows: int = 1,
    overrides: SpeculationParams | None = None,
    temperature: float = 0,
) -> PlanEntry:
    """A request whose text ends in token 7, and whose last `rows` tokens are computed in this step."""
    params = SamplingParams(temperature=temperature, speculation=overrides)
    text = [*range(20), 7]
    return plans.entry(
        text, request_id=name, params=params, rows=rows, max_nodes=32, max_depth=room, room=room + 1
    )


def chain(*confidences: float, speculator: str = "s", rule: DrawRule = DrawRule.POINT_MASS) -> TokenTree:
    builder = TreeBuilder(root=7)
    for node, confidence in enumerate(confidences):
        builder.add(node, 10 + node, speculator, rule, confidence=confidence)
    return builder.build()


def unlearning(curve: CostCurve) -> CostModel:
    """Return a cost model that does not learn."""
    return CostModel(curve, learns=False)


class Unguarded(Guard):
    """A guard that lets every step guess."""

    def begin(self, *_: Any, **__: Any) -> None:
        self.off_reason = None

    def observe(self, *_: Any, **__: Any) -> None:
        pass


def sized(
    target: CostCurve, draft: CostCurve | None = None, expansion: tuple[int, ...] = (1, 1, 1, 1)
) -> CostPolicy:
    """Return a policy without a guard's limits for a target, and a draft if given."""
    drafts = {} if draft is None else {"draft": PricedDraft(unlearning(draft), Expansion(expansion))}
    acceptance, costs = AcceptanceRates(dict.fromkeys(drafts, len(expansion))), unlearning(target)
    return CostPolicy(costs, drafts, acceptance, Unguarded(costs, {}))


class Reckless(CostPolicy):
    """Guesses and verifies all nodes unless its guard forbids it."""

    def __init__(
        self, target: CostModel, draft: CostModel, *, guarded: bool = True, known: bool = False
    ) -> None:
        drafts = {"draft": PricedDraft(draft, Expansion((1, 1, 1, 1)))}
        guard = (Guard if guarded else Unguarded)(target, {"draft": draft}, measured=True, known=known)
        super().__init__(target, drafts, AcceptanceRates({"draft": 4}), guard)

    def worth_starting(self, speculator: str, entries: Sequence[PlanEntry], *more: Any) -> list[bool]:
        super().worth_starting(speculator, entries, *more)
        return [True] * len(entries)

    def worth_deepening(self, speculator: str, *asked: Any) -> list[Sequence[int]]:
        return list(asked[-1])  # all ends

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        super().choose_nodes(trees)
        self.guard.nodes = sum(tree.num_nodes - 1 for tree in trees)
        return list(trees)
