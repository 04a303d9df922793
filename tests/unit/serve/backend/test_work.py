from __future__ import annotations

from specinfer.request import Delta, FinishReason, Logprob, SpeculationFigures
from specinfer.sampling_params import SamplingParams
from specinfer.serve.backend.work import CompletionObserver, Work

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


def test_an_observer_counts_its_deltas() -> None:
    observer = CompletionObserver(Work("w", (1,), SamplingParams()), arrived=10.0)
    observer.delta(Delta("w", started=True), now=11.0)
    assert (observer.first, observer.tokens, observer.finish_reason) == (None, 0, FinishReason.ABORT)
    for now, delta in ((12.0, FIRST), (13.0, MIDDLE), (14.0, LAST)):
        observer.delta(delta, now)
    assert (observer.first, observer.tokens, observer.cached_tokens) == (12.0, 4, 4)
    assert observer.finish_reason is FinishReason.STOP
