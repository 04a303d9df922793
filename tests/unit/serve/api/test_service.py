"""Admission of requests: queues, limits and failures."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.request import Delta, FinishReason, Logprob
from specinfer.serve.api.chat import Chat, ChatFields
from specinfer.serve.api.completions import CompletionFields, Completions
from specinfer.serve.api.service import MAX_FIGURES, Service
from specinfer.serve.backend.work import EngineInfo, UnavailableError, Work
from specinfer.serve.fields.body import FieldPolicy
from specinfer.serve.http.api_error import ApiError
from specinfer.speculate.lookups.prediction import MAX_DELETED
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import Script, ScriptedBackend, scripted_service
from tests.unit.serve.asked import BODIES, HI, Asked

FACTS = EngineInfo(max_context=100, max_length=80)
GREEDY = SamplingParams(temperature=0)
UNENDED = [Delta("", "a", (97,)), None]
FAILED = Delta("", finish_reason=FinishReason.ERROR, error="3 steps failed", internal_error=True)
WHOLE = Delta("", "a", (97,), finish_reason=FinishReason.LENGTH)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def service_of(tokenizer: Tokenizer, *scripts: Script, **options: int) -> Service:
    backend = ScriptedBackend(*(scripts or [UNENDED]))
    return scripted_service(tokenizer, backend, facts=FACTS, batch=1, **{"max_waiting": 2, **options})


# About 3 s: it waits for time limits.
async def test_requests_beyond_the_queue_get_retry_after(tokenizer: Tokenizer) -> None:
    service = service_of(tokenizer)
    first = service.answer([(1,), (2,)], [GREEDY, GREEDY])
    assert (await anext(first))[1].text == "a"
    assert service.busy == 2
    with pytest.raises(ApiError, match="2 answers are in progress or waiting, and this request has") as error:
        await anext(service.answer([(3,)], [SamplingParams(n=2)]))
    assert (error.value.status, error.value.headers) == (429, {"Retry-After": "1"})
    async with aclosing(service.answer([(3,)], [GREEDY])) as third:  # there is room for one
        await anext(third)
    await first.aclose()
    assert service.busy == 0
    assert len(set(service.backend.gone)) == 3


def test_more_than_one_request_may_ever_have_is_refused_at_once(tokenizer: Tokenizer) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"n": 10**9}, "n", "n is 1000000000; allowed: at most 4"),
        ({"n": 5, "stream": True}, "n", "n is 5; allowed: at most 4"),
        ({"prompt": ["a"] * 5}, "prompt", "the prompts are 5; allowed: at most 4"),
        ({"prompt": [[97]] * 4, "n": 4}, "n", "are 16 completions; allowed: at most 9"),
    ]
    service = service_of(tokenizer, max_waiting=8, max_n=4)

    def ask(fields: dict[str, Any]) -> Chat | Completions:
        if "prompt" in fields:
            return Completions(service, FieldPolicy().parse(CompletionFields, json.dumps(fields).encode()))
        body = fields | {"messages": HI}
        return Chat(service, FieldPolicy().parse(ChatFields, json.dumps(body).encode()))

    for fields, param, message in cases:
        with pytest.raises(ApiError, match=message) as error:
            pytest.fail(f"{fields!r}: {ask(fields)}")
        assert (error.value.status, error.value.body["error"]["param"]) == (400, param), fields


async def test_no_request_is_admitted_while_the_server_drains(tokenizer: Tokenizer) -> None:
    service = service_of(tokenizer)
    service.draining = True
    with pytest.raises(ApiError, match="shutting down") as error:
        await anext(service.answer([(1,)], [GREEDY]))
    assert error.value.status == 503


async def test_the_status_separates_client_and_server_errors(tokenizer: Tokenizer) -> None:
    for internal, parameter, status in ((True, None, 500), (False, None, 400), (False, "regex", 400)):
        failed = replace(FAILED, internal_error=internal, parameter=parameter)
        with pytest.raises(ApiError, match="3 steps failed") as error:
            await anext(service_of(tokenizer, [failed]).answer([(1,)], [GREEDY]))
        assert (error.value.status, error.value.body["error"]["param"]) == (status, parameter)


def test_one_of_several_that_fails_leaves_the_others_their_answers(tokenizer: Tokenizer) -> None:
    async def run(*deltas: Delta) -> list[tuple[int, str | None]]:
        service = service_of(tokenizer, *([delta] for delta in deltas))
        answers = service.answer([(1,)], [SamplingParams(n=2)])
        return [(number, delta.finish_reason) async for number, delta in answers]

    assert asyncio.run(run(FAILED, WHOLE)) == [(0, "error"), (1, "length")]
    assert asyncio.run(run(WHOLE, FAILED)) == [(0, "length"), (1, "error")]
    with pytest.raises(ApiError, match="3 steps failed"):
        asyncio.run(run(FAILED, FAILED))
    refused = replace(FAILED, internal_error=False, parameter="regex")
    with pytest.raises(ApiError, match="3 steps failed") as caught:  # which holds for all of them
        asyncio.run(run(refused, WHOLE))
    assert caught.value.status == 400


@pytest.mark.parametrize("max_wait", [0, 5])
async def test_a_stream_begins_when_it_can_be_refused_no_more(tokenizer: Tokenizer, max_wait: int) -> None:
    admitted, started = ((0, Delta("")), (1, Delta(""))), (1, Delta("", started=True))
    service = service_of(tokenizer, max_wait=max_wait)

    async def generate(works: Sequence[Work], session: str = "") -> AsyncGenerator[Delta]:
        for number, delta in (*admitted, started, (0, WHOLE), (1, WHOLE)):
            yield replace(delta, id=works[number].id)

    service.backend.generate = generate
    found = [delta async for _, delta in service.answer([(1,)], [SamplingParams(n=2)])]
    assert [delta.text for delta in found] == ["", "a", "a"]  # one sign
    assert found[0].started == bool(max_wait)
    fields = FieldPolicy().parse(
        CompletionFields, json.dumps({"prompt": "a", "n": 2, "stream": True}).encode()
    )
    first, *events = [event async for event in Completions(service, fields).events()]
    assert (first, len(events)) == ("", 2)


async def test_retryable_errors_have_retry_after(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="it waited") as error:
        await anext(service_of(tokenizer, [UnavailableError("it waited")]).answer([(1,)], [GREEDY]))
    assert (error.value.status, error.value.headers) == (503, {"Retry-After": "5"})


def test_parameters_are_checked_once_with_a_seed_so_that_another_engine_can_go_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[SamplingParams]()
    monkeypatch.setattr(SamplingParams, "_check", lambda params: checked.append(params))
    for path, body in BODIES.items():
        server, count = Asked(tokenizer), 2 if "completions" in path else 1
        server.ok(path, **body | ({"n": 2} if count == 2 else {}))
        assert [work.index for work in server.backend.works] == [*range(count)]
        assert [work.params for work in server.backend.works] == checked * count, path
        assert checked.pop().seed is not None


REPORTS = (None, {2: Logprob(-0.5, 1, "b")})


async def scored(works: Sequence[Work], session: str = "") -> AsyncGenerator[Delta]:
    """Deltas of completion 0 come last, with the log-probabilities of its prompt."""
    for work in reversed(works):
        asked = work.params.prompt_logprobs is not None and work.index == 0
        yield Delta(work.id, "a", (97,), prompt_logprobs=REPORTS if asked else None)
        yield Delta(work.id, "b", (98,), finish_reason=FinishReason.LENGTH)


def test_log_probabilities_of_a_prompt_stand_in_its_first_choice(tokenizer: Tokenizer) -> None:
    caught = [None, {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    prompts: dict[str, Any] = {"n": 2, "prompt_logprobs": 1, "max_tokens": 2, "prompt": ["ab", "c"]}
    chat = {name: value for name, value in prompts.items() if name != "prompt"} | {"messages": HI}

    async def run(answers: Chat | Completions, streamed: bool) -> list[tuple[int, Any]]:
        if not streamed:
            choices = (await answers.whole())["choices"]
        else:
            chunks = [json.loads(event.removeprefix("data: ")) async for event in answers.events()]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return sorted((one["index"], one["prompt_logprobs"]) for one in choices if "prompt_logprobs" in one)

    for streamed in (False, True):
        service = service_of(tokenizer, max_waiting=8)
        service.backend.generate = scored
        completions = Completions(
            service, FieldPolicy().parse(CompletionFields, json.dumps(prompts).encode())
        )
        assert asyncio.run(run(completions, streamed)) == [(0, caught), (2, caught)]
        answers = Chat(service, FieldPolicy().parse(ChatFields, json.dumps(chat).encode()))
        assert asyncio.run(run(answers, streamed)) == [(0, caught)]


def test_a_prediction_is_encoded_once_and_cut(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **more: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", counted)

    async def run() -> list[Work]:
        service = service_of(tokenizer, [WHOLE], max_waiting=8)
        params = SamplingParams(n=4, max_tokens=8, prediction="ab" * (1 << 20))
        async for _ in service.answer([(1,)], [params]):
            pass
        return service.backend.works

    works = asyncio.run(run())
    assert encoded == [16 * (8 + MAX_DELETED)]
    assert len({id(work.params.prediction) for work in works}) == 1
    assert works[0].params.prediction == tuple(b"ab" * 516)


def test_more_figures_of_prompts_than_an_answer_may_have_are_refused(tokenizer: Tokenizer) -> None:
    scored = SamplingParams(prompt_logprobs=20)

    async def run(*tokens: int) -> None:
        service = service_of(tokenizer, max_waiting=8)
        answers = service.answer([(1,) * count for count in (*tokens, 99)], [scored] * len(tokens) + [GREEDY])
        async with aclosing(answers):
            await anext(answers)

    assert MAX_FIGURES // 21 == 12483
    asyncio.run(run(12000, 483))
    with pytest.raises(ApiError, match="have 262164 log-probabilities; allowed: at most 262144; ") as error:
        asyncio.run(run(12000, 484))
    assert (error.value.status, error.value.body["error"]["param"]) == (400, "prompt_logprobs")


async def test_a_prompt_that_cannot_fit_is_refused(tokenizer: Tokenizer) -> None:
    service = service_of(tokenizer)
    for text in ("", "x" * 81, "y" * 1_000_000):
        with pytest.raises(ApiError) as error:
            service.room(await service.encode(text, "prompt"), "prompt")
        assert error.value.body["error"]["param"] == "prompt"
