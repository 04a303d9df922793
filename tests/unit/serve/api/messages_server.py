"""A scripted server with a plain HTTP client for messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import MODEL, Script, ScriptedBackend, http_client, scripted_app
from tests.unit.serve.api.responses_server import named_events

HI = [{"role": "user", "content": "Hi"}]


class MessagesServer:
    """A server, a client, and the prompts that the engine got."""

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[Script], options: dict[str, Any]) -> None:
        self.backend = ScriptedBackend(*answers)
        self.http = http_client(scripted_app(tokenizer, self.backend, **options))

    @property
    def prompts(self) -> list[str]:
        return [bytes(work.prompt_token_ids).decode() for work in self.backend.works]

    async def post(self, path: str = "/messages", **body: Any) -> httpx.Response:
        """Send a request, by default for 100 tokens after "Hi"."""
        usual = {"model": MODEL, "messages": HI} | ({} if "count" in path else {"max_tokens": 100})
        return await self.http.post(path, json=usual | body)

    async def message(self, **body: Any) -> dict[str, Any]:
        answer = await self.post(**body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def events(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream; checks that each has the type that its `event` line names."""
        answer = await self.post(**body, stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return named_events(answer.text)

    async def refusal(self, **body: Any) -> tuple[int, str, str]:
        """Return status, type and message of an error in Anthropic's format."""
        answer = await self.post(**body)
        body = answer.json()
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["request_id"] == answer.headers["x-request-id"]
        assert set(body["error"]) == {"type", "message"}
        return answer.status_code, body["error"]["type"], body["error"]["message"]


def ask(
    tokenizer: Tokenizer,
    answers: Sequence[Script],
    do: Callable[[MessagesServer], Awaitable[None]],
    **options: Any,
) -> None:
    async def run() -> None:
        await do(MessagesServer(tokenizer, answers, options))

    asyncio.run(run())
