"""A scripted server, asked for messages over plain HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import MODEL, Script, ScriptedBackend, http_client, scripted_app
from tests.unit.serve.api.asking import named_events

HI = [{"role": "user", "content": "Hi"}]


class Messaging:
    """A server, a client, and what the engine was asked."""

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[Script], options: dict[str, Any]) -> None:
        self.backend = ScriptedBackend(*answers)
        self.http = http_client(scripted_app(tokenizer, self.backend, **options))

    @property
    def prompts(self) -> list[str]:
        return [bytes(work.prompt_token_ids).decode() for work in self.backend.works]

    async def post(self, path: str = "/messages", **body: Any) -> httpx.Response:
        """The answer to a request for 100 tokens after "Hi", where nothing else is said."""
        usual = {"model": MODEL, "messages": HI} | ({} if "count" in path else {"max_tokens": 100})
        return await self.http.post(path, json=usual | body)

    async def message(self, **body: Any) -> dict[str, Any]:
        answer = await self.post(**body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def events(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream as they stand on the wire; each has the name that its line says."""
        answer = await self.post(**body, stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return named_events(answer.text)

    async def refusal(self, **body: Any) -> tuple[int, str, str]:
        """Status, type and message of an error in Anthropic's shape."""
        answer = await self.post(**body)
        told = answer.json()
        assert set(told) == {"type", "error", "request_id"}
        assert told["type"] == "error"
        assert told["request_id"] == answer.headers["x-request-id"]
        assert set(told["error"]) == {"type", "message"}
        return answer.status_code, told["error"]["type"], told["error"]["message"]


def ask(
    tokenizer: Tokenizer,
    answers: Sequence[Script],
    do: Callable[[Messaging], Awaitable[None]],
    **options: Any,
) -> None:
    async def run() -> None:
        await do(Messaging(tokenizer, answers, options))

    asyncio.run(run())
