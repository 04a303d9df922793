"""A scripted server with OpenAI's client and a plain HTTP client for responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import openai
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import Script, ScriptedBackend, http_client, scripted_app

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def named_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; checks that each has the type that its `event` line names."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        named, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert named == f"event: {found[-1]['type']}"
    return found


class ResponsesServer:
    """A server, OpenAI's client, a plain client, and the prompts that the engine got."""

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[Script], options: dict[str, Any]) -> None:
        self.backend = ScriptedBackend(*answers)
        app = scripted_app(tokenizer, self.backend, **options)
        self.http = http_client(app)
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://server/v1", http_client=http_client(app), max_retries=0
        )
        self.responses = client.responses

    @property
    def prompts(self) -> list[str]:
        return [bytes(work.prompt_token_ids).decode() for work in self.backend.works]

    async def stream(self, **body: Any) -> tuple[list[dict[str, Any]], list[str]]:
        """The events of a stream, which the client knows and which are numbered from 0; and their types."""
        events = await self.events(**body)
        for one in events:
            EVENT.validate_python(one)
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        return events, [one["type"].removeprefix("response.") for one in events]

    async def events(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream; checks that each has the type that its `event` line names."""
        answer = await self.http.post("/responses", json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        return named_events(answer.text)

    async def refusal(self, **body: Any) -> tuple[int, str | None, str]:
        answer = await self.http.post("/responses", json=body)
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]


def ask(
    tokenizer: Tokenizer,
    answers: Sequence[Script],
    do: Callable[[ResponsesServer], Awaitable[None]],
    **options: Any,
) -> None:
    async def run() -> None:
        await do(ResponsesServer(tokenizer, answers, options))

    asyncio.run(run())
