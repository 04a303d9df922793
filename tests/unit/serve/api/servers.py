"""Scripted servers with clients of messages and of responses, and the events of their streams."""

from typing import Any

import httpx
import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from specinfer.tokenizer import Tokenizer
from tests.schemas import closed
from tests.scripted_server import MODEL, Script
from tests.unit.serve.asked import HI, Asked, named_events


class MessagesServer(Asked):
    """A server, a client, and the prompts that the engine got."""

    def post(self, path: str = "/messages", **body: Any) -> httpx.Response:
        """Send a request, by default for 100 tokens after "Hi"."""
        usual = {"model": MODEL, "messages": HI} | ({} if "count" in path else {"max_tokens": 100})
        return self.http.post(path, json=usual | body)

    def message(self, **body: Any) -> dict[str, Any]:
        return self.ok("/messages", **{"model": MODEL, "messages": HI, "max_tokens": 100} | body)

    def events(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream."""
        answer = self.post(**body, stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return named_events(answer)

    def refusal(self, **body: Any) -> tuple[int, str, str]:
        """Return status, type and message of an error in Anthropic's format."""
        answer = self.post(**body)
        found = answer.json()
        error = found.pop("error")
        assert found == {"type": "error", "request_id": answer.headers["x-request-id"]}
        assert set(error) == {"type", "message"}
        return answer.status_code, error["type"], error["message"]


def start(index: int, **block: Any) -> dict[str, Any]:
    """The event that opens a block."""
    return {"type": "content_block_start", "index": index, "content_block": block}


def more(index: int, kind: str, **text: str) -> dict[str, Any]:
    """The event of more text in a block."""
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **text}}


def stop(index: int) -> dict[str, Any]:
    """The event that closes a block."""
    return {"type": "content_block_stop", "index": index}


def prompt_tokens(usage: dict[str, Any]) -> int:
    """Return the tokens of a message's prompt: the cached ones, those up to the last mark, and the rest."""
    return sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def item(kind: str, deltas: int) -> list[str]:
    """The types of the events of an item whose text comes in that many pieces."""
    inner = [*[f"{kind}.delta"] * deltas, f"{kind}.done"]
    if kind == "output_text":
        inner = ["content_part.added", *inner, "content_part.done"]
    return ["output_item.added", *inner, "output_item.done"]


class ResponsesServer(Asked):
    """A server, OpenAI's client, a plain client, and the prompts that the engine got."""

    def __init__(self, tokenizer: Tokenizer, *answers: Script, **options: Any) -> None:
        super().__init__(tokenizer, *answers, **options)
        client = openai.OpenAI(api_key="x", base_url="http://server/v1", http_client=self.http, max_retries=0)
        self.responses = client.responses

    def create(self, asked: Any = "Hi", **more: Any) -> Response:
        return self.responses.create(model=MODEL, input=asked, **more)

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


# It has a switch for thoughts, and a variable that opens them with the effort.
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}{{ '!' if m.tool_call_id }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ '\n' }}{% endfor %}assistant: {{ '(' ~ reasoning_effort ~ ')' if thinks }}"
    "{% if thinks or enable_thinking %}<think>{{ '\n' }}"
    "{% elif enable_thinking is false %}<think></think>{% endif %}"
)
PLACE = closed({"city": {"type": "string"}})
ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo"}'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
