"""A scripted server with a plain client that needs no event loop of the test's own."""

import json
from typing import Any

import httpx
from starlette.testclient import TestClient

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import Script, ScriptedBackend, says, scripted_app

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HI},
    "/completions": {"prompt": "Hi"},
    "/responses": {"input": "Hi"},
    "/messages": {"messages": HI, "max_tokens": 9},
}


class Asked:
    """A scripted server, a client, and the works that the engine got."""

    def __init__(self, tokenizer: Tokenizer, *answers: Script, **options: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = ScriptedBackend(*(answers or [says("ok")]))
        self.http = TestClient(scripted_app(tokenizer, self.backend, **options), "http://server/v1")

    @property
    def prompts(self) -> list[str]:
        raw = self.tokenizer.bytes_of
        return [b"".join(map(raw, work.prompt_token_ids)).decode() for work in self.backend.works]

    def form(self, number: int = 0) -> str:
        """Return the source of the form that an answer is held to, or nothing."""
        held = self.backend.works[number].params.structured_output
        return "" if held is None else held.source

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the answer to a request that is served."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def refused(self, path: str, **body: Any) -> tuple[int, str | None, str]:
        """Return status, parameter and message of an error in OpenAI's format."""
        answer = self.http.post(path, json=body)
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the JSON objects of a stream."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def named_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream; checks that each has the type that its `event` line names."""
    found = chunks(answer)
    names = [line for line in answer.text.split("\n") if line.startswith("event: ")]
    assert names == [f"event: {one['type']}" for one in found]
    return found
