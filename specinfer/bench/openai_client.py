"""Streamed requests to a server with OpenAI's API, timed chunk by chunk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specinfer.bench.exchange import EventStream, Exchange, error_message
from specinfer.errors import ConfigError
from specinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    import httpx

ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# After a long idle time the server may close a connection just when a request reuses it.
_IDLE_SECONDS = 1.0
_RESERVED = ("model", "messages", "prompt", "stream")  # request fields that --body may not replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options that all requests of a run share."""

    params: SamplingParams  # the first request has its seed, each next one the seed plus one
    endpoint: str = "chat"
    ignore_eos: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)  # more fields; None removes a default field
    timeout: float = 600.0  # seconds for a whole answer

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"endpoint is {self.endpoint!r}; allowed: {', '.join(ENDPOINTS)}")
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout is {self.timeout}; allowed: a number of seconds above 0")
        if reserved := [name for name in _RESERVED if name in self.body]:
            raise ConfigError(f"body has {', '.join(reserved)}, which the benchmark sets; leave it out")
        if self.body.get("n") not in (None, 1):
            raise ConfigError(
                f"body has n = {self.body['n']!r}; one text per request is measured: leave it out"
            )

    def request(self, number: int, model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
        """Return the JSON body of a request; without a chat template, blank lines join its texts."""
        params = self.params
        fields: dict[str, Any] = {"model": model}
        if self.endpoint == "chat":
            fields["messages"] = messages
        else:
            fields["prompt"] = "\n\n".join(message["content"] for message in messages)
        fields["max_tokens"] = params.max_tokens
        fields["temperature"] = params.temperature
        fields["seed"] = (params.seed or 0) + number
        fields["stream"] = True
        fields["stream_options"] = {"include_usage": True}
        # Some servers refuse requests with these fields.
        if params.top_p != 1:
            fields["top_p"] = params.top_p
        if params.top_k:
            fields["top_k"] = params.top_k
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return {name: value for name, value in (fields | dict(self.body)).items() if value is not None}


def server_root(url: str) -> str:
    """Return a server's URL without /v1 and later parts; raises ConfigError for an invalid URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"URL is {url!r}; allowed: like http://localhost:8000 or https://host/v1")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def connect(url: str, api_key: str | None) -> httpx.AsyncClient:
    """Return a client with one connection per request; the caller closes it.

    Raises ConfigError if httpx is missing or `url` is invalid.
    """
    root = server_root(url)
    if find_spec("httpx") is None:
        raise ConfigError("--url needs httpx; install it with: pip install 'specinfer[serve]'")
    import httpx

    headers = {"Accept-Encoding": "identity"}  # compression would delay chunks
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return httpx.AsyncClient(
        base_url=root,
        headers=headers,
        timeout=None,  # each request has a timeout for its whole answer
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS
        ),
        # no proxy for local servers
        trust_env=urlsplit(root).hostname not in ("localhost", "127.0.0.1", "::1"),
    )


async def first_model(http: httpx.AsyncClient, timeout: float) -> str:
    """Return the first model that the server lists; raises ConfigError without a connection or a model."""
    import httpx

    where = f"{str(http.base_url).rstrip('/')}/v1/models"
    try:
        answer = await http.get("/v1/models", timeout=timeout)
    except httpx.HTTPError as error:
        raise ConfigError(f"no answer from {where}: {_reason(error)}; is the server running?") from None
    if answer.status_code != 200:
        raise ConfigError(f"{where} answered {_refusal(answer)}; give --model, or --api-key if it needs one")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{where} lists no model; give --model") from None


async def send_request(
    http: httpx.AsyncClient, options: RequestOptions, model: str, number: int, messages: list[dict[str, str]]
) -> Exchange:
    """Send a request and read its answer to the end; errors are recorded in the exchange.

    The clock is the event loop's.
    """
    import httpx

    loop = asyncio.get_running_loop()
    body = options.request(number, model, messages)
    exchange = Exchange(loop.time())
    try:
        async with (
            asyncio.timeout(options.timeout) as limit,
            http.stream("POST", ENDPOINTS[options.endpoint], json=body) as answer,
        ):
            if answer.status_code != 200:
                await answer.aread()
                exchange.error = _refusal(answer)
            elif "event-stream" not in (kind := answer.headers.get("content-type", "nothing")):
                exchange.error = f"the server answered {kind}, no event stream: it does not stream"
            else:
                packets = answer.aiter_bytes()
                await _read(packets, exchange)
                limit.reschedule(None)
                await _drain(packets)
    except TimeoutError:
        exchange.error = f"no whole answer within {options.timeout:g} s"
    except (httpx.HTTPError, OSError) as error:
        exchange.error = f"the connection failed after {len(exchange.arrivals)} chunks: {_reason(error)}"
    exchange.ended = exchange.ended or loop.time()
    return exchange


async def _read(packets: AsyncIterator[bytes], exchange: Exchange) -> None:
    """Read chunks until [DONE], an error, or the end of the stream."""
    loop = asyncio.get_running_loop()
    events = EventStream()
    async for packet in packets:
        if _take(events.feed(packet), exchange, loop.time()) or exchange.error:
            return
    done = _take(events.close(), exchange, loop.time())
    if not done and not exchange.error and exchange.finish_reason is None:
        exchange.error = f"the stream ended after {len(exchange.arrivals)} chunks, before the answer did"


async def _drain(packets: AsyncIterator[bytes]) -> None:
    """Read the rest of the answer, so that the connection can be reused."""
    import httpx

    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(_IDLE_SECONDS):
            async for _ in packets:
                pass


def _take(events: list[str], exchange: Exchange, now: float) -> bool:
    """Add the events that arrived at `now`; return True after [DONE]."""
    for data in events:
        if data == "[DONE]":
            return True
        try:
            chunk = json.loads(data)
        except ValueError:
            exchange.error = f"a chunk is not JSON: {data!r:.80}"
        else:
            exchange.take(chunk, now)
        if exchange.error:
            break
    return False


def _refusal(answer: httpx.Response) -> str:
    try:
        text = error_message(answer.json())
    except ValueError:
        text = error_message(answer.text) or answer.reason_phrase
    return f"HTTP {answer.status_code}: {text}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
