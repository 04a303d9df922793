"""Figures of requests."""

from __future__ import annotations

from specinfer.request import SpeculationFigures


def test_figures_of_several_requests_add_up() -> None:
    total = SpeculationFigures()
    assert total.tokens_per_step == 0.0
    total.add(
        SpeculationFigures(
            steps=2,
            output_tokens=5,
            drafted_tokens=8,
            accepted_tokens=3,
            accepted_per_depth=[2, 1],
            drafted_per_depth=[2, 2],
            accepted_by={"lookup": 3},
            proposed_by={"lookup": 8},
        )
    )
    total.add(
        SpeculationFigures(
            steps=2,
            output_tokens=3,
            drafted_tokens=5,
            accepted_tokens=1,
            accepted_per_depth=[1],
            drafted_per_depth=[2, 1, 1],
            accepted_by={"draft": 1, "lookup": 1},
            proposed_by={"draft": 5},
        )
    )
    assert total == SpeculationFigures(
        steps=4,
        output_tokens=8,
        drafted_tokens=13,
        accepted_tokens=4,
        accepted_per_depth=[3, 1],
        drafted_per_depth=[4, 3, 1],
        accepted_by={"lookup": 4, "draft": 1},
        proposed_by={"lookup": 8, "draft": 5},
    )
    assert total.tokens_per_step == 2.0
