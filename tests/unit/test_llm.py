"""LLM: its calls, from several threads, until it is closed."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer import EngineConfig, RequestOutput, SamplingParams
from specinfer.engine.engine import Engine
from specinfer.engine.steps import Stage
from specinfer.errors import ClosedError, ConfigError, RequestError
from specinfer.llm import LLM
from specinfer.tokenizer import ChatEncoder
from tests.engines import ENGINE, Tiny, assert_idle, engine_of, runner_of, slow_generate, tiny_of
from tests.tiny_models import write_pair

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=1, seed=11, max_tokens=16)
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], [40, 41, 42, 40, 41, 42, 40, 41], list(range(5, 45)), [7, 7, 7, 7]]


tiny = tiny_of(vocab_size=64, max_context=96)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[list[int]]:
    return [slow_generate(tiny.target, prompt, SEEDED) for prompt in PROMPTS]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


# Several callers.


@pytest.mark.thorough
def test_threads_in_one_llm_at_once_each_get_exactly_their_texts(
    tiny: Tiny, expected: list[list[int]]
) -> None:
    llm = tiny.llm(drafts=["similar"], lookup=True, max_batch_size=6)
    together = threading.Barrier(4)

    def ask(number: int) -> list[list[list[int]]]:
        together.wait()
        mine = PROMPTS[number:] + PROMPTS[:number]
        streamed = [list(llm.stream(prompt, SEEDED))[-1] for prompt in mine[:2]]
        return [tokens(llm.generate(mine, SEEDED)), tokens(streamed)]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    for number, (generated, streamed) in enumerate(answers):
        rotated = expected[number:] + expected[:number]
        assert generated == rotated
        assert streamed == rotated[:2]
    assert_idle(llm)
    llm.close()


def test_a_request_of_somebody_else_does_not_end_anybodys_generate(
    tiny: Tiny, expected: list[list[int]]
) -> None:
    llm = tiny.llm(lookup=True)
    [[foreign]] = tiny.llm().intake.prompts([[5, 6]], GREEDY)  # from an intake with the same request ids
    engine_of(llm).add(foreign)
    [[mine]] = llm.intake.prompts([[5, 6]], GREEDY)
    assert mine.request.request_id == foreign.request.request_id
    assert tokens(llm.generate(PROMPTS, SEEDED)) == expected
    assert_idle(llm)


def test_a_callback_may_ask_the_same_llm(tiny: Tiny, expected: list[list[int]]) -> None:
    llm = tiny.llm(drafts=["similar"])
    asked: list[list[int]] = []

    def ask_more(output: RequestOutput) -> None:
        if len(asked) < len(PROMPTS):
            asked.append([])
            asked[-1] = tokens(llm.generate([PROMPTS[len(asked) - 1]], SEEDED))[0]

    assert tokens(llm.generate(PROMPTS[:2], SEEDED, on_output=ask_more)) == expected[:2]
    assert asked == expected
    assert_idle(llm)


def test_a_callback_that_raises_cancels_its_requests_at_once(tiny: Tiny, expected: list[list[int]]) -> None:
    llm = tiny.llm(lookup=True)
    llm.on_step = lambda _: time.sleep(0.01)  # answers do not end by themselves meanwhile
    other = llm.stream(PROMPTS[1], SEEDED)
    next(other)

    def refuse(output: RequestOutput) -> None:
        raise OSError("no terminal")

    with pytest.raises(OSError, match="no terminal") as kept:
        llm.generate(PROMPTS, SEEDED, on_output=refuse)
    llm.check_integrity()  # waits for the cancelling
    statistics = llm.statistics()
    assert (statistics.running, statistics.waiting) == (1, 0), kept  # the error, and its frames, are alive
    assert list([*other][-1].token_ids) == expected[1]
    assert_idle(llm)


@pytest.mark.parametrize("ask", ["stream", "stream_chat", "generate", "chat"])
def test_what_cannot_be_served_is_refused_before_anything_runs(tiny: Tiny, ask: str) -> None:
    llm = tiny.llm()
    nothing: list[Any] = [] if ask.startswith("stream") else [[]]
    with pytest.raises(RequestError) as caught:
        getattr(llm, ask)(nothing)
    assert caught.value.parameter == ("messages" if "chat" in ask else "prompt")
    assert llm.statistics().steps == 0


@pytest.mark.parametrize("ask", ["stream_chat", "chat"])
def test_tools_are_the_chat_templates(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    given: list[object] = []

    def token_ids(self: ChatEncoder, messages: object, *, tools: object, **more: object) -> list[int]:
        given.append(tools)
        return [1, 2, 3]

    llm = tiny.llm()
    monkeypatch.setattr(ChatEncoder, "token_ids", token_ids)
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = getattr(llm, ask)([{"role": "user", "content": "hi"}], GREEDY, tools=tools)
    assert [output.token_ids for output in asked][-1]
    with pytest.raises(RequestError) as caught:
        getattr(llm, ask)([{"role": "user", "content": "hi"}], GREEDY, tools="f")
    assert caught.value.parameter == "tools"
    assert given == [tools]


# Statistics of the engine.


def test_no_public_attribute_gives_the_engine(tiny: Tiny) -> None:
    llm = tiny.llm()
    seen: list[str] = []
    for owner in (llm, llm.loop, llm.intake):
        names = [name for name in dir(owner) if not name.startswith("_")]
        seen += [name for name in names if isinstance(getattr(owner, name), Engine)]
    assert seen == []
    assert not hasattr(llm, "engine")


def test_statistics_count_what_was_done_and_who_is_there(tiny: Tiny) -> None:
    llm = tiny.llm(lookup=True, block_size=4)
    llm.generate(PROMPTS[:1], GREEDY)
    first = llm.statistics()
    stream = llm.stream(PROMPTS[0], GREEDY)
    begun, go_on = threading.Event(), threading.Event()
    llm.on_step = lambda _: (begun.set(), go_on.wait()) if llm.statistics().since(first).steps == 2 else None
    next(stream)
    begun.wait()
    done = llm.statistics().since(first)
    assert (done.steps, done.running, done.waiting) == (2, 1, 0)
    assert (done.prefix_queries, done.prefix_hits, done.preemptions) == (7, 6, 0)
    assert set(done.stage_seconds) == set(Stage)
    assert all(seconds > 0 for seconds in done.stage_seconds.values())
    go_on.set()
    stream.close()
    llm.check_integrity()
    assert llm.statistics().running == 0


# Its end.


def test_closing_frees_cache_and_weights(pair: Path) -> None:
    llm = LLM(pair / "target", drafts=[pair / "draft"], **ENGINE)
    llm.generate([1, 2, 3], GREEDY)
    llm.on_step = lambda _: time.sleep(0.01)  # the answer does not end by itself
    stream = llm.stream([1, 2, 3], GREEDY)  # a stream that is still referenced
    next(stream)
    models = llm.models
    held = [weakref.ref(runner_of(llm).cache.keys[0]), weakref.ref(models.target)]
    held += [weakref.ref(model) for model in models.drafts.values()]
    assert len(held) == 3
    del models
    llm.close()
    assert [reference() for reference in held] == [None] * 3
    llm.close()
    with pytest.raises(ClosedError):
        list(stream)


def test_a_closed_llm_says_so_whatever_is_asked(tiny: Tiny) -> None:
    with tiny.llm() as llm:
        assert len(llm.generate(PROMPTS, GREEDY)) == len(PROMPTS)
        unread = llm.stream(PROMPTS[0], GREEDY)
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("hello"),
        lambda: llm.chat([{"role": "user", "content": "hello"}]),
        lambda: llm.stream("hello"),
        lambda: next(unread),
        lambda: llm.variant(lookup=True),
        lambda: llm.models,
        lambda: llm.tokenizer,
        lambda: llm.max_context,
        lambda: llm.on_step,
        lambda: llm.on_tree,
        lambda: llm.explains,
        llm.statistics,
        llm.check_integrity,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="the LLM was closed; make a new one"):
            call()
    llm.close()


# Its config.


def test_a_config_may_stand_for_the_model_and_options_change_it(pair: Path) -> None:
    config = EngineConfig.from_options(str(pair / "target"), {**ENGINE, "max_context": 64, "lookup": True})
    with LLM(config, max_batch_size=3) as llm:
        assert llm.config == config.with_options({"max_batch_size": 3, "quantization": "none"})
        assert (llm.max_context, llm.config.scheduler.max_batch_size) == (64, 3)
        assert llm.models.target.dtype == torch.float32
    with pytest.raises(ConfigError, match="unknown option 'look_up'; did you mean lookup"):
        LLM(config, look_up=True)
