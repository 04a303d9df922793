"""A scripted server with OpenAI's client and a plain HTTP client for responses."""

from __future__ import annotations

from typing import Any

import openai
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import Script
from tests.unit.serve.asked import Asked, named_events

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class ResponsesServer(Asked):
    """A server, OpenAI's client, a plain client, and the prompts that the engine got."""

    def __init__(self, tokenizer: Tokenizer, *answers: Script, **options: Any) -> None:
        super().__init__(tokenizer, *answers, **options)
        client = openai.OpenAI(
            api_key="none", base_url="http://server/v1", http_client=self.http, max_retries=0
        )
        self.responses = client.responses

    def stream(self, **body: Any) -> tuple[list[dict[str, Any]], list[str]]:
        """The events of a stream, which the client knows and which are numbered from 0; and their types."""
        events = self.events(**body)
        for one in events:
            EVENT.validate_python(one)
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        return events, [one["type"].removeprefix("response.") for one in events]

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream."""
        answer = self.http.post("/responses", json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        return named_events(answer)

    def refusal(self, **body: Any) -> tuple[int, str | None, str]:
        return self.refused("/responses", **body)
