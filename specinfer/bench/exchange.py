"""An HTTP request to a server and its streamed answer: server-sent events and chunks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class Exchange:
    """A request and its streamed answer; times are seconds of one clock.

    The terms are those of `vllm bench serve`: a chunk counts once whatever its number of tokens, and the
    answer ends with the last chunk that has a choice. A usage chunk after it does not count.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)  # times of the chunks with text
    ended: float = 0.0  # time of the last chunk with a choice
    text: str = ""  # the answer, without reasoning
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # as the server reports them, or None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # prompt tokens read from the server's cache
    speculation: Mapping[str, Any] | None = None  # metrics.speculative_decoding
    error: str = ""  # the reason for an incomplete answer, else empty

    def take(self, chunk: Any, now: float) -> None:
        """Add a chunk that arrived at `now`: a completion chunk, usage, or the server's error.

        Anything else is recorded as an error.
        """
        if not isinstance(chunk, Mapping):
            self.error = f"a chunk is {chunk!r:.80}; a JSON object was expected"
        elif chunk.get("error") or chunk.get("object") == "error":
            self.error = f"the server gave up: {error_message(chunk)}"
        else:
            self._take_usage(chunk)
            choices = chunk.get("choices")
            if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
                self._take_choice(choices[0], now)

    @property
    def ttft(self) -> float:
        """Seconds from the request to the first chunk with text, or to the end of an answer without text."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from the request to the end of the answer."""
        return self.ended - self.sent

    @property
    def itls(self) -> list[float]:
        """Seconds between neighbouring chunks with text."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def output_tokens(self) -> int:
        """Output tokens, or the number of chunks with text if the server does not report tokens."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        delta = choice.get("delta")
        fields: Mapping[str, Any] = delta if isinstance(delta, Mapping) else {"content": choice.get("text")}
        content = fields.get("content")
        # Tokens of reasoning and of tool calls are output tokens, in other fields.
        if content or any(fields.get(name) for name in ("reasoning_content", "reasoning", "tool_calls")):
            self.arrivals.append(now)
        if isinstance(content, str):
            self.text += content
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.ended = now

    def _take_usage(self, chunk: Mapping[str, Any]) -> None:
        """Read the usage, which comes in a last chunk, in the last choice, or cumulatively in every chunk."""
        if isinstance(usage := chunk.get("usage"), Mapping):
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.completion_tokens = _count(usage.get("completion_tokens"))
            if isinstance(details := usage.get("prompt_tokens_details"), Mapping):
                self.cached_tokens = _count(details.get("cached_tokens"))
        metrics = chunk.get("metrics")
        if isinstance(metrics, Mapping) and isinstance(metrics.get("speculative_decoding"), Mapping):
            self.speculation = metrics["speculative_decoding"]


def error_message(body: Any) -> str:
    """Return one line for an error body in OpenAI's format or a similar one."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    for key in ("message", "detail"):
        if isinstance(error, Mapping) and error.get(key):
            error = error[key]
    return " ".join(str(error).split())[:300]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventStream:
    """Assembles packets and returns the data of whole events.

    Skips comments, which servers send to keep a connection open, and the fields `event`, `id` and `retry`.
    Lines may end with CRLF, LF or CR; a packet may end anywhere, even within a character.
    """

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._lines = 0
        self._data: list[str] = []  # data of an unfinished event

    def feed(self, packet: bytes) -> list[str]:
        """Return the data of the events that `packet` completes, in order."""
        pending = self._rest + packet
        unsplit = b"\r" if pending.endswith(b"\r") else b""  # the next packet may begin with the LF of a CRLF
        *lines, rest = _LINE_END.split(pending[: len(pending) - len(unsplit)])
        self._rest = rest + unsplit
        return self._read(lines)

    def close(self) -> list[str]:
        """Return the data of an event that the end of the stream completes without its blank line."""
        lines, self._rest = _LINE_END.split(self._rest), b""
        return self._read([*lines, b""])

    def _read(self, lines: list[bytes]) -> list[str]:
        events = []
        for line in lines:
            if self._lines == 0:
                line = line.removeprefix(_BOM)
            self._lines += 1
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
                continue
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
        return events
