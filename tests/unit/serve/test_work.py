from __future__ import annotations

from specinfer.request import FinishReason, Logprob, SpeculationFigures
from specinfer.serve.work import Delta

FIRST = Delta("w", "Hel", (1, 2), ({1: Logprob(-1.0, 1, "He")},), ({"step": 1},), ((3, 1),), cached_tokens=4)
FIGURES = SpeculationFigures(steps=2)
# Of another engine, which found nothing cached.
LAST = Delta("w", "lo", (3,), (), (), ((0, 0),), FinishReason.STOP, figures=FIGURES)


def test_two_deltas_are_one_with_everything_in_order() -> None:
    assert FIRST.followed_by(LAST) == Delta(
        "w",
        "Hello",
        (1, 2, 3),
        FIRST.logprobs,
        FIRST.trees,
        ((3, 1), (0, 0)),
        FinishReason.STOP,
        figures=FIGURES,
        cached_tokens=4,
    )
