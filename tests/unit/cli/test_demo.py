"""What `specinfer demo` says of its runs."""

from __future__ import annotations

import pytest

from specinfer.cli import demo
from specinfer.cli.options import DEFAULT_MODEL
from specinfer.hub.catalogue import SHIPPED_HEADS
from specinfer.request import Answer, FinishReason, RequestOutput, SpeculationFigures, Timing
from specinfer.sampling_params import SamplingParams


def output(seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4, 5), steps: int = 4) -> RequestOutput:
    """An answer whose first token came after a second, and the others so many seconds later."""
    figures = SpeculationFigures(steps=steps, output_tokens=4)
    timing = Timing(arrived=0.0, first_token=1.0, finished=1.0 + seconds)
    return RequestOutput("0", (9,), Answer(["text"], tokens), FinishReason.STOP, 0, figures, timing)


def test_the_head_is_the_default_models() -> None:
    assert SHIPPED_HEADS[demo.HEAD] == DEFAULT_MODEL


def compared(*first: tuple[RequestOutput, RequestOutput]) -> list[demo.Pairs]:
    """The pairs of the first prompt; without and with speculation the others take the same time."""
    return [first, *([(output(1.0), output(1.0))] for _ in demo.PROMPTS[1:])]


def test_each_prompt_has_its_median_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(output(2.0), output(slow, steps=2)) for slow in (1.0, 40.0, 0.5)]
    demo._show(compared(*pairs))
    question, other = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert question == ["a", "question", "2.0", "4.0", "2.00x", "2.00", "1.00x"]
    assert other == ["a", "program", "4.0", "4.0", "1.00x", "1.00", "1.00x"]


def test_a_step_that_costs_more_than_it_gains_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    demo._show(compared((output(1.0), output(2.0, steps=2))))
    assert capsys.readouterr().out.splitlines()[1].split()[-3:] == ["0.50x", "2.00", "4.00x"]


@pytest.mark.parametrize(("tokens", "said"), [((1, 2, 3, 4, 5), "yes"), ((1, 2, 3, 4, 6), "NO")])
def test_a_text_that_differs_is_told(
    tokens: tuple[int, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    demo._show(compared((output(1.0), output(1.0)), (output(1.0), output(1.0, tokens))))
    assert f"identical texts: {said}" in capsys.readouterr().out


def test_every_prompt_says_why_it_gains(capsys: pytest.CaptureFixture[str]) -> None:
    demo._show(compared((output(1.0), output(1.0))))
    said = capsys.readouterr().out
    assert all(f"{prompt.name}: {prompt.why}" in said for prompt in demo.PROMPTS)


def test_no_round_finds_its_answer_in_the_round_before() -> None:
    salts = list[str | None]()

    class Recorder:
        def stream_chat(self, messages: object, params: SamplingParams) -> list[object]:
            salts.append(params.cache_salt)
            return ["an answer"]

    for _ in range(3):
        demo._answer(Recorder(), demo.PROMPTS[0])  # type: ignore[arg-type]
    assert None not in salts
    assert len({*salts}) == 3
