"""Requests, guesses and costs in round numbers, for tests of who decides by them."""

from __future__ import annotations

from specinfer import SamplingParams
from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculation_params import SpeculationParams
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from tests import plans

FREE = CostCurve((1, 1000), (1.0, 1.0))  # bound by memory: rows cost nothing
DEAR = CostCurve((1, 2), (1.0, 2.0))  # bound by arithmetic: every row costs what the first costs
HALF = CostCurve((1, 3), (1.0, 2.0))


def entry(
    name: str = "r",
    *,
    room: int = 100,
    rows: int = 1,
    overrides: SpeculationParams | None = None,
    temperature: float = 0,
) -> PlanEntry:
    """A request whose text ends in token 7, of which `rows` tokens are computed in this step."""
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
