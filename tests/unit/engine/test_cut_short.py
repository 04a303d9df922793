"""Steps that an interrupt or an error cuts short, and the other requests."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.engine.trace import TreeEvent
from specinfer.request import Delta
from tests.engines import Tiny, assert_idle, engine_of, runner_of, write_tiny

LONG = SamplingParams(temperature=1, seed=2, max_tokens=30)
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_context=96)


def raise_at(call: int, real: Any) -> Any:
    """`real`, except that its call number `call` is interrupted."""
    calls = 0

    def cut(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return real(*args, **options)

    return cut


@pytest.mark.parametrize("call", [2, 3])
@pytest.mark.parametrize(
    "part", ["_executor.launch", "_executor.move", "_speculators.propose", "_speculators.observe"]
)
def test_another_stream_goes_on_with_the_same_text(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, part: str, call: int
) -> None:
    whole = [list(o.token_ids) for o in tiny.llm(["similar"]).generate(PROMPTS, LONG)]
    llm = tiny.llm(["similar"], expansion=(3, 2, 1))
    cut, other = (llm.stream(prompt, LONG) for prompt in PROMPTS)
    for stream in (cut, other):
        next(stream)
    owner, method = getattr(engine_of(llm), part.split(".")[0]), part.split(".")[1]
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, raise_at(call, getattr(owner, method)))
        with pytest.raises(KeyboardInterrupt):
            list(cut)
    *_, last = other
    assert list(last.token_ids) == whole[1]
    assert_idle(llm)


def test_an_answer_that_ended_in_the_step_that_was_cut_short_is_not_lost(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny.llm(["similar"])
    cut = llm.stream(PROMPTS[0], LONG)
    other = llm.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=2))
    for stream in (cut, other):
        next(stream)
    with monkeypatch.context() as patch:
        target = runner_of(llm)
        patch.setattr(target, "move", raise_at(1, target.move))
        with pytest.raises(KeyboardInterrupt):
            list(cut)
    assert engine_of(llm).has_work  # otherwise the other stream would wait forever
    assert [len(output.token_ids) for output in other] == [2]


def test_what_steps_that_raise_have_made_comes_with_the_next(tiny: Tiny) -> None:
    llm = tiny.llm(["similar"])
    (whole,) = llm.generate([PROMPTS[0]], LONG)
    engine, deltas = engine_of(llm), list[Delta]()
    [[admitted]] = llm.intake.prompts([PROMPTS[0]], LONG)
    engine.add(admitted)
    steps: list[TreeEvent] = []

    def refuse(event: TreeEvent) -> None:
        steps.append(event)
        if len(steps) in (2, 3, 4):
            raise ValueError("the disk is full")

    llm.on_tree = refuse
    while engine.has_work:
        try:
            deltas += engine.step()
        except ValueError:
            assert len(steps) in (2, 3, 4)
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
