"""Who is let in, and what becomes of those who are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.request import FinishReason
from specinfer.serve.api_error import ApiError
from specinfer.serve.backend import BackendError, Health
from specinfer.serve.chat import Chat
from specinfer.serve.chat_fields import ChatFields
from specinfer.serve.completion_fields import CompletionFields
from specinfer.serve.completions import Completions
from specinfer.serve.config import ServeConfig
from specinfer.serve.dialect import Dialect
from specinfer.serve.fields import parse
from specinfer.serve.metrics import Metrics
from specinfer.serve.service import Service
from specinfer.serve.work import Delta, EngineFacts, Work
from specinfer.tokenizer import Tokenizer

FACTS = EngineFacts(max_context=100, longest=80, pid=1)
GREEDY = SamplingParams(temperature=0)


class Slow:
    """A backend that says a token of each work and no more, until it is told to end, or to die."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.gone: list[str] = []
        self.more = asyncio.Event()
        self.trouble = ""

    async def generate(self, works: Sequence[Work]) -> AsyncGenerator[Delta]:
        self.works += works
        try:
            for work in works:
                yield Delta(work.id, "a", (97,))
            await self.more.wait()
            if self.trouble:
                raise BackendError(self.trouble)
            for work in works:
                yield Delta(work.id, finish_reason=FinishReason.LENGTH)
        finally:
            self.abort(work.id for work in works)

    def abort(self, ids: Iterable[str]) -> None:
        self.gone += ids

    async def health(self) -> Health:
        return Health(True, FACTS, None)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def service_of(backend: Slow, tokenizer: Tokenizer, **options: int) -> Service:
    config = ServeConfig(**{"max_waiting": 2, **options})
    dialect = Dialect.of(tokenizer)
    return Service(config, backend, tokenizer, FACTS, dialect, models=["m"], batch=1, metrics=Metrics("m"))


def test_more_than_may_wait_are_told_to_come_again(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        backend = Slow()
        service = service_of(backend, tokenizer)
        first = service.answer([(1,), (2,)], [GREEDY, GREEDY])
        assert (await anext(first))[1].text == "a"
        assert service.busy == 2
        with pytest.raises(ApiError, match="2 answers are in progress or wait, and 2 more") as error:
            await anext(service.answer([(3,)], [SamplingParams(n=2)]))
        assert error.value.status == 429
        assert error.value.headers == {"Retry-After": "1"}
        async with aclosing(service.answer([(3,)], [GREEDY])) as third:  # there is room for one
            await anext(third)
        await first.aclose()
        assert service.busy == 0
        assert sorted(backend.gone) == sorted(work.id for work in backend.works)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"n": 10**9}, "n", "n is 1000000000; allowed: at most 4"),
        ({"n": 5, "stream": True}, "n", "n is 5; allowed: at most 4"),
        ({"prompt": ["a"] * 5}, "prompt", "the prompts are 5; allowed: at most 4"),
        ({"prompt": [[97]] * 4, "n": 4}, "n", "are 16 completions; allowed: at most 9"),
    ],
)
def test_more_than_one_request_may_ever_have_is_refused_at_once(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str, said: str
) -> None:
    service = service_of(Slow(), tokenizer, max_waiting=8, max_n=4)

    def ask() -> Chat | Completions:
        if "prompt" in fields:
            return Completions(service, parse(CompletionFields, json.dumps(fields).encode()))
        body = fields | {"messages": [{"role": "user", "content": "a"}]}
        return Chat(service, parse(ChatFields, json.dumps(body).encode()))

    with pytest.raises(ApiError, match=said) as error:
        ask()
    assert error.value.status == 400
    assert error.value.body["error"]["param"] == param


def test_nobody_is_let_in_while_the_server_drains(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        service = service_of(Slow(), tokenizer)
        service.draining = True
        with pytest.raises(ApiError, match="shutting down") as error:
            await anext(service.answer([(1,)], [GREEDY]))
        assert error.value.status == 503

    asyncio.run(run())


def test_an_engine_that_is_gone_is_an_error_of_the_servers(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        backend = Slow()
        backend.trouble = "the engine died"
        backend.more.set()
        answer = service_of(backend, tokenizer).answer([(1,)], [GREEDY])
        await anext(answer)
        with pytest.raises(ApiError, match="the engine died") as error:
            await anext(answer)
        assert error.value.status == 500

    asyncio.run(run())


@pytest.mark.parametrize(
    ("internal", "parameter", "status"), [(True, None, 500), (False, None, 400), (False, "regex", 400)]
)
def test_whose_fault_an_error_is_shows_in_its_status(
    tokenizer: Tokenizer, internal: bool, parameter: str | None, status: int
) -> None:
    class Failing(Slow):
        async def generate(self, works: Sequence[Work]) -> AsyncGenerator[Delta]:
            error = FinishReason.ERROR
            yield Delta(
                works[0].id,
                finish_reason=error,
                error="no token is left",
                parameter=parameter,
                internal_error=internal,
            )

    async def run() -> None:
        await anext(service_of(Failing(), tokenizer).answer([(1,)], [GREEDY]))

    with pytest.raises(ApiError, match="no token is left") as error:
        asyncio.run(run())
    assert (error.value.status, error.value.body["error"]["param"]) == (status, parameter)


def test_a_seed_is_drawn_here_so_that_another_engine_can_go_on(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        backend = Slow()
        backend.more.set()
        service = service_of(backend, tokenizer)
        params = SamplingParams(n=2)
        numbers = [number async for number, _ in service.answer([(1,)], [params])]
        assert numbers == [0, 1, 0, 1]
        assert [work.index for work in backend.works] == [0, 1]
        seeds = {work.params.seed for work in backend.works}
        assert len(seeds) == 1
        assert None not in seeds

    asyncio.run(run())


@pytest.mark.parametrize("text", ["", "x" * 81, "y" * 1_000_000])
def test_a_prompt_that_cannot_fit_is_refused(tokenizer: Tokenizer, text: str) -> None:
    async def run() -> None:
        service = service_of(Slow(), tokenizer)
        service.room(await service.encode(text, "prompt"), "prompt")

    with pytest.raises(ApiError) as error:
        asyncio.run(run())
    assert error.value.body["error"]["param"] == "prompt"


def test_metrics_count_what_was_said(tokenizer: Tokenizer) -> None:
    async def run() -> str:
        backend = Slow()
        backend.more.set()
        service = service_of(backend, tokenizer)
        async for _ in service.answer([(1, 2, 3)], [GREEDY]):
            pass
        return service.metrics.text(await backend.health()).decode()

    text = asyncio.run(run())
    assert 'specinfer:prompt_tokens_total{model_name="m"} 3.0' in text
    assert 'specinfer:generation_tokens_total{model_name="m"} 1.0' in text
    assert 'specinfer:request_success_total{finished_reason="length",model_name="m"} 1.0' in text
