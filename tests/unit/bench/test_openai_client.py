"""Requests to a fake server: failures over sockets, arrival times in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from specinfer.bench.exchange import Exchange
from specinfer.bench.openai_client import RequestOptions, connect, first_model, send_request
from specinfer.errors import ConfigError
from specinfer.sampling_params import SamplingParams
from tests.fake_openai_server import DONE, FakeServer, Reply, chat, error, event, usage
from tests.virtual_time import run_virtual

GREEDY = SamplingParams(temperature=0, max_tokens=8, seed=5)
OPTIONS = RequestOptions(params=GREEDY)
HELLO = [{"role": "user", "content": "Hello"}]
WHOLE = [chat(""), chat("Good "), chat("day"), chat("", "stop")]


def exchange_of(reply: Reply, options: RequestOptions = OPTIONS) -> Exchange:
    """The exchange when the server replies so."""

    async def work(url: str) -> Exchange:
        async with connect(url, None) as http:
            return await send_request(http, options, "m", 2, HELLO)

    with FakeServer(lambda request: reply) as server:
        return asyncio.run(work(server.url))


def test_an_answer_is_read_to_its_end() -> None:
    exchange = exchange_of(
        Reply([*WHOLE, b": idle\n\n", usage(7, 5, num_spec_steps=3), DONE, chat("never read")])
    )
    assert (exchange.error, exchange.text, exchange.finish_reason) == ("", "Good day", "stop")
    assert len(exchange.arrivals) == 2
    assert (exchange.prompt_tokens, exchange.completion_tokens) == (7, 5)
    assert exchange.speculation == {"num_spec_steps": 3}
    assert exchange.sent < exchange.arrivals[0] <= exchange.arrivals[1] <= exchange.ended


@pytest.mark.parametrize("size", [1, 5, 64])
def test_packets_may_end_anywhere(size: int) -> None:
    data = b"".join([*WHOLE, usage(7, 5), DONE]).replace(b"\n", b"\r\n")
    exchange = exchange_of(Reply([data[start : start + size] for start in range(0, len(data), size)]))
    assert (exchange.error, exchange.text, exchange.completion_tokens) == ("", "Good day", 5)


MISHAPS = {  # name -> (reply, error, text so far)
    "refused": (error("429 Too Many Requests", "slow down"), "HTTP 429: slow down", ""),
    "no JSON": (Reply([b"<h1>Bad\n gateway</h1>"], "502 Bad Gateway", "text/html"),
                "HTTP 502: <h1>Bad gateway</h1>", ""),
    "silent": (Reply([], "503 Service Unavailable", "text/plain"), "HTTP 503: Service Unavailable", ""),
    "error in the stream": (Reply([chat("Go"), event({"error": {"message": "out of blocks"}}), DONE]),
                            "the server gave up: out of blocks", "Go"),
    "cut": (Reply([chat("Go"), chat("od")], cut=True),
            "the connection failed after 2 chunks: peer closed connection without sending complete", "Good"),
    "cut behind the text": (Reply(WHOLE, cut=True), "the connection failed after 2 chunks", "Good day"),
    "ended early": (Reply([chat("Go")]), "the stream ended after 1 chunks, before the answer did", "Go"),
    "empty": (Reply([]), "the stream ended after 0 chunks", ""),
    "half a chunk": (Reply([chat("Go"), chat("od")[:-9]]), "a chunk is not JSON: '{", "Go"),
    "not streamed": (Reply([b"{}"], kind="application/json"),
                     "the server answered application/json, no event stream", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MISHAPS)
def test_a_mishap_is_the_exchanges_error(name: str) -> None:
    reply, why, message = MISHAPS[name]
    exchange = exchange_of(reply)
    assert exchange.error.startswith(why)
    assert exchange.text == message
    assert exchange.ended >= exchange.sent > 0


def test_a_server_that_is_not_there_is_an_error() -> None:
    with FakeServer(lambda request: Reply([])) as server:
        url = server.url

    async def work() -> Exchange:
        async with connect(url, None) as http:
            with pytest.raises(
                ConfigError, match=rf"no answer from {url}/v1/models: .*is the server running"
            ):
                await first_model(http, 5)
            return await send_request(http, OPTIONS, "m", 0, HELLO)

    assert asyncio.run(work()).error.startswith("the connection failed after 0 chunks")


class _Timed(httpx.AsyncByteStream):
    """Packets with the seconds that pass before each."""

    def __init__(self, *packets: tuple[float, bytes]) -> None:
        self._packets = packets

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds, packet in self._packets:
            await asyncio.sleep(seconds)
            yield packet


def timed(*packets: tuple[float, bytes], options: RequestOptions = OPTIONS) -> Exchange:
    """The exchange, in virtual time, of a request whose answer's head comes after half a second."""

    async def respond(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.5)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=_Timed(*packets))

    async def work() -> Exchange:
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://x") as http:
            return await send_request(http, options, "m", 0, HELLO)

    return run_virtual(work())


def test_an_answer_that_takes_too_long_is_failed() -> None:
    options = RequestOptions(params=GREEDY, timeout=2.0)
    exchange = timed((1.0, chat("a")), (1.0, chat("b")), (1.0, DONE), options=options)
    assert (exchange.error, exchange.text) == ("no whole answer within 2 s", "a")
    assert timed((1.0, chat("a", "stop")), (0.25, DONE), options=options).error == ""
    # The client does not wait for bytes after [DONE].
    assert timed((1.0, chat("a", "stop")), (0.25, DONE), (99.0, b""), options=options).error == ""


def models(reply: Reply, api_key: str | None = None) -> str:
    async def work(url: str) -> str:
        async with connect(f"{url}/v1", api_key) as http:
            return await first_model(http, 5)

    with FakeServer(lambda request: reply, models=reply) as server:
        return asyncio.run(work(server.url))


def test_the_first_model_is_taken() -> None:
    assert models(Reply([b'{"data": [{"id": "a"}, {"id": "b"}]}'])) == "a"
