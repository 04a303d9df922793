from __future__ import annotations

from specinfer.request import Delta, FinishReason, Logprob, SpeculationFigures

PROMPT = (None, {9: Logprob(-2.0, 1, "x")})
FIRST = Delta(
    *("w", "Hel", (1, 2), ({1: Logprob(-1.0, 1, "He")},), ({"step": 1},), ((3, 1),)),
    prompt_logprobs=PROMPT,
    cached_tokens=4,
)
MIDDLE = Delta("w", "l", (5,))
FIGURES = SpeculationFigures(steps=2)
# From another engine without cached tokens.
LAST = Delta("w", "lo", (3,), (), (), ((0, 0),), FinishReason.STOP, figures=FIGURES)


def test_several_deltas_are_one_with_everything_in_order() -> None:
    assert Delta.joined([FIRST]) is FIRST
    assert Delta.joined([FIRST, MIDDLE, LAST]) == Delta(
        "w",
        "Helllo",
        (1, 2, 5, 3),
        FIRST.logprobs,
        FIRST.trees,
        ((3, 1), (0, 0)),
        FinishReason.STOP,
        figures=FIGURES,
        prompt_logprobs=PROMPT,
        cached_tokens=4,
    )
