"""Streamed chat requests to a server with OpenAI's API, timed chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import openai

Messages = Sequence[Any]  # of {"role": ..., "content": ...}


@dataclass(slots=True)
class Answer:
    """An answer; times are seconds of the event loop's clock. A chunk may hold several tokens."""

    sent: float
    arrivals: list[float] = field(default_factory=list)  # of the chunks with text
    text: str = ""
    tokens: int = 0  # by the server's count, else the chunks
    cached_tokens: int | None = None  # prompt tokens read from the server's cache, if it reports them
    prompt_tokens: int = 0
    tokens_per_step: float | None = None  # if the server reports it
    error: str = ""

    @property
    def first_seconds(self) -> float:
        """Seconds from the request to the first text."""
        return self.arrivals[0] - self.sent

    @property
    def seconds(self) -> float:
        """Seconds from the request to the last text."""
        return self.arrivals[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def token_seconds(self) -> float:
        """Seconds per token after the first."""
        return (self.seconds - self.first_seconds) / max(1, self.tokens - 1)


class Client:
    """A server's first model."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        self.http = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=timeout)
        self.model = ""

    async def __aenter__(self) -> Client:
        self.model = (await self.http.models.list()).data[0].id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()

    async def stream(self, messages: Messages, headers: dict[str, str], fields: dict[str, Any]) -> Any:
        """Return the chunks of an answer; `fields` are more fields of the request."""
        own = {"stream_options": {"include_usage": True}, **fields}
        return await self.http.chat.completions.create(
            model=self.model, messages=messages, stream=True, extra_headers=headers, extra_body=own
        )

    async def ask(self, messages: Messages, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """Return the answer, or its error."""
        clock = asyncio.get_running_loop().time
        answer = Answer(clock())
        try:
            ended = False
            async for chunk in await self.stream(messages, headers or {}, fields):
                if chunk.usage is not None:
                    _count(answer, chunk)
                for choice in chunk.choices[:1]:
                    ended = ended or choice.finish_reason is not None
                    if text := choice.delta.content:
                        answer.arrivals.append(clock())
                        answer.text += text
            if not ended:
                answer.error = f"the stream ended after {len(answer.arrivals)} chunks"
            elif not answer.arrivals:
                answer.arrivals.append(clock())  # a token without text
        except openai.OpenAIError as error:
            answer.error = str(error) or type(error).__name__
        answer.tokens = answer.tokens or len(answer.arrivals)
        return answer


def _count(answer: Answer, chunk: Any) -> None:
    answer.tokens, answer.prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
    answer.cached_tokens = getattr(chunk.usage.prompt_tokens_details, "cached_tokens", None)
    speculation = ((chunk.model_extra or {}).get("metrics") or {}).get("speculative_decoding") or {}
    if speculation.get("num_spec_steps"):
        answer.tokens_per_step = 1 + speculation["num_accepted_draft_tokens"] / speculation["num_spec_steps"]
