"""`specinfer demo`."""

from __future__ import annotations

from specinfer.cli import demo
from specinfer.cli.options import DEFAULT_MODEL
from specinfer.hub.catalogue import SHIPPED_HEADS
from specinfer.sampling_params import SamplingParams

QUESTION = demo.PROMPTS[0]


def test_the_head_is_the_default_models() -> None:
    assert SHIPPED_HEADS[demo.HEAD] == DEFAULT_MODEL


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
