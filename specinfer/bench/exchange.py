"""One request to a server and what came back of it: server-sent events, and the chunks of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class Exchange:
    """A request and its streamed answer; times are seconds of one clock.

    The terms are those of `vllm bench serve`: a chunk counts once however many tokens it holds, and the end
    is the last chunk with a choice; the usage that may follow is not waited for.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)  # of the chunks that bring text
    ended: float = 0.0  # of the last chunk with a choice
    text: str = ""  # of the answer, without what a model reasons before it
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # as the server counts them; None where it does not say
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt
    speculation: Mapping[str, Any] | None = None  # metrics.speculative_decoding
    error: str = ""  # why there is no whole answer; empty where there is

    def take(self, chunk: Any, now: float) -> None:
        """Add a chunk that arrived at `now`: a completion chunk, usage, or the server's error.

        What is no chunk of an answer becomes the error.
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
        """Tokens of the answer; where the server does not count them, the chunks with text."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        delta = choice.get("delta")
        said: Mapping[str, Any] = delta if isinstance(delta, Mapping) else {"content": choice.get("text")}
        content = said.get("content")
        # Tokens of reasoning and of tool calls are tokens of the answer, under names of their own.
        if content or any(said.get(name) for name in ("reasoning_content", "reasoning", "tool_calls")):
            self.arrivals.append(now)
        if isinstance(content, str):
            self.text += content
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.ended = now

    def _take_usage(self, chunk: Mapping[str, Any]) -> None:
        """Usage may come alone at the end, with the last choice, or so far with every chunk."""
        if isinstance(usage := chunk.get("usage"), Mapping):
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.completion_tokens = _count(usage.get("completion_tokens"))
            if isinstance(details := usage.get("prompt_tokens_details"), Mapping):
                self.cached_tokens = _count(details.get("cached_tokens"))
        metrics = chunk.get("metrics")
        if isinstance(metrics, Mapping) and isinstance(metrics.get("speculative_decoding"), Mapping):
            self.speculation = metrics["speculative_decoding"]


def error_message(body: Any) -> str:
    """What an error object of OpenAI's form, or of what calls itself so, says in one line."""
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
    """Puts packets together and gives back the data of whole events.

    Comments (servers send them to keep a connection open) and the fields `event`, `id` and `retry` are
    skipped. Lines may end with CRLF, LF or CR, a packet may end anywhere, within a character as well.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._lines = 0
        self._data: list[str] = []  # of an event that has not ended

    def feed(self, packet: bytes) -> list[str]:
        """The data of the events that `packet` completes, in order."""
        pending = self._rest + packet
        held = b"\r" if pending.endswith(b"\r") else b""  # the next packet may begin with the LF of a CRLF
        *lines, rest = _LINE_END.split(pending[: len(pending) - len(held)])
        self._rest = rest + held
        return self._read(lines)

    def close(self) -> list[str]:
        """The data of an event that the end of the stream completes: its blank line may be missing."""
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
