"""Streamed chat requests to a server with OpenAI's API, timed chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    error: str = ""

    @property
    def first_seconds(self) -> float:
        """Seconds from the request to the first text."""
        return self.arrivals[0] - self.sent


class Client(openai.AsyncOpenAI):
    """A server; its first model answers."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        super().__init__(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=timeout)
        self.first = ""  # its name, once asked for

    async def ask(
        self, messages: Messages, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Answer:
        """Return the answer, or its error; `fields` are more fields of the request."""
        clock = asyncio.get_running_loop().time
        answer, ended = Answer(clock()), False
        try:
            self.first = self.first or (await self.models.list()).data[0].id
            async for chunk in await self.chat.completions.create(
                model=self.first,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers=headers,
                extra_body=fields,
            ):
                if usage := chunk.usage:
                    answer.tokens, answer.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
                    answer.cached_tokens = getattr(usage.prompt_tokens_details, "cached_tokens", None)
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
