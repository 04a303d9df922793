"""`specinfer demo`: figures, reasons and wrapped text."""

from __future__ import annotations

import pytest

from specinfer.cli import demo
from specinfer.cli.options import DEFAULT_MODEL
from specinfer.hub.catalogue import SHIPPED_HEADS
from specinfer.request import Answer, FinishReason, RequestOutput, SpeculationFigures, Timing
from specinfer.sampling_params import SamplingParams

QUESTION = demo.PROMPTS[0]


def output(seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4, 5), steps: int = 4) -> RequestOutput:
    """An answer whose first token took a second, and the others `seconds` more."""
    figures = SpeculationFigures(steps=steps, output_tokens=4)
    timing = Timing(arrived=0.0, first_token=1.0, finished=1.0 + seconds)
    return RequestOutput("0", (9,), Answer(["text"], tokens), FinishReason.STOP, 0, figures, timing)


def compared(*pairs: tuple[RequestOutput, RequestOutput]) -> demo.DemoComparison:
    return demo.DemoComparison(pairs)


def test_the_head_is_the_default_models() -> None:
    assert SHIPPED_HEADS[demo.HEAD] == DEFAULT_MODEL


def test_there_are_a_question_an_edit_and_code() -> None:
    assert [prompt.name for prompt in demo.PROMPTS] == ["A question", "An edit", "Code"]


def test_a_prompt_has_its_median_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(output(2.0), output(seconds, steps=2)) for seconds in (1.0, 40.0, 0.5)]
    demo.show_comparison(QUESTION, compared(*pairs))
    without, trees = [line.split()[2:] for line in capsys.readouterr().out.splitlines()[2:4]]
    assert (without, trees) == (["1.00", "2.0"], ["2.00", "4.0"])


@pytest.mark.parametrize(
    ("trees", "sentence"),
    [
        (output(0.5, steps=2), "2.00 times as fast: a step makes 2.00 tokens and takes 1.00 times as long"),
        (output(2.0, steps=2), "No gain: a step makes 2.00 tokens, but takes 4.00 times as long"),
        (output(1.0), "No gain: hardly any proposal was accepted"),
    ],
)
def test_the_reason_follows_from_the_figures(trees: RequestOutput, sentence: str) -> None:
    reason = demo.reason(QUESTION, compared((output(1.0), trees)))
    assert reason.startswith(sentence)
    assert reason.endswith(".")
    assert (QUESTION.source in reason) == reason[0].isdigit()


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ((1, 2, 3, 4, 5), "Identical texts: all 2 answers are the same with and without speculation."),
        ((1, 2, 3, 4, 6), "DIFFERENT texts: 1 of 2 answers differ with speculation."),
    ],
)
def test_the_last_line_compares_the_texts(
    tokens: tuple[int, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = compared((output(1.0), output(1.0)))
    demo.show_end([equal, compared((output(1.0), output(1.0, tokens)))])
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_streamed_text_is_wrapped_at_spaces_and_keeps_the_indentation_of_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "16")
    wrapped = demo.Wrapped("  ", "> ")
    for piece in ("one two th", "ree four ", "five\n\n", "def f():\n    return ", "1"):
        wrapped.write(piece)
    wrapped.close()
    lines = ["  > one two", "  > three four", "  > five", "", "  > def f():", "  >     return 1"]
    assert capsys.readouterr().out.splitlines() == lines


def test_no_round_finds_its_answer_in_the_round_before() -> None:
    salts = list[str | None]()

    class Recorder:
        def stream_chat(self, messages: object, params: SamplingParams) -> list[object]:
            salts.append(params.cache_salt)
            return ["an answer"]

    for _ in range(3):
        demo.answer(Recorder(), QUESTION)  # type: ignore[arg-type]
    assert None not in salts
    assert len({*salts}) == 3
