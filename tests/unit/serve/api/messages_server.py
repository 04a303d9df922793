"""A scripted server with a plain HTTP client for messages."""

from __future__ import annotations

from typing import Any

import httpx

from tests.scripted_server import MODEL
from tests.unit.serve.asked import Asked, named_events

HI = [{"role": "user", "content": "Hi"}]


class MessagesServer(Asked):
    """A server, a client, and the prompts that the engine got."""

    def post(self, path: str = "/messages", **body: Any) -> httpx.Response:
        """Send a request, by default for 100 tokens after "Hi"."""
        usual = {"model": MODEL, "messages": HI} | ({} if "count" in path else {"max_tokens": 100})
        return self.http.post(path, json=usual | body)

    def message(self, **body: Any) -> dict[str, Any]:
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream."""
        answer = self.post(**body, stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return named_events(answer)

    def refusal(self, **body: Any) -> tuple[int, str, str]:
        """Return status, type and message of an error in Anthropic's format."""
        answer = self.post(**body)
        body = answer.json()
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["request_id"] == answer.headers["x-request-id"]
        assert set(body["error"]) == {"type", "message"}
        return answer.status_code, body["error"]["type"], body["error"]["message"]


def start(index: int, **block: Any) -> dict[str, Any]:
    """The event that opens a block."""
    return {"type": "content_block_start", "index": index, "content_block": block}


def more(index: int, kind: str, **text: str) -> dict[str, Any]:
    """The event of more text in a block."""
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **text}}


def stop(index: int) -> dict[str, Any]:
    """The event that closes a block."""
    return {"type": "content_block_stop", "index": index}
