"""Requests to a fake server: failures over sockets, arrival times in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from specinfer.bench import openai_client
from specinfer.bench.exchange import Exchange
from specinfer.bench.openai_client import RequestOptions, connect, first_model, send_request, server_root
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


@pytest.mark.parametrize("end", [[], [DONE[:-2]], [DONE[:-1]]])
def test_a_whole_answer_may_end_without_a_word(end: list[bytes]) -> None:
    exchange = exchange_of(Reply([*WHOLE, *end]))
    assert (exchange.error, exchange.text) == ("", "Good day")


def test_one_connection_serves_one_request_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "_IDLE_SECONDS", 60.0)  # however slow the machine is
    refused = error("429 Too Many Requests", "slow down")
    replies = iter([Reply([*WHOLE, DONE]), refused, Reply([*WHOLE, DONE, chat("more")]), Reply([chat("a")])])

    async def work(url: str) -> list[str]:
        async with connect(url, None) as http:
            return [(await send_request(http, OPTIONS, "m", n, HELLO)).text for n in range(4)]

    with FakeServer(lambda request: next(replies)) as server:
        assert asyncio.run(work(server.url)) == ["Good day", "", "Good day", "a"]
    assert server.connections == 1


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


def test_chunks_are_timed_when_their_packet_arrives() -> None:
    second, third = chat("b"), chat("c")
    exchange = timed(
        (0.25, chat("")),  # the role, no text
        (0.25, chat("a")),
        (1.0, b": idle\n\n"),
        (1.0, second[:9]),
        (0.5, second[9:] + third),  # two chunks in one packet
        (0.25, chat("", "length")),
        (5.0, usage(3, 4)),
        (5.0, DONE),
    )
    assert (exchange.error, exchange.text) == ("", "abc")
    assert (exchange.ttft, exchange.itls, exchange.e2el) == (1.0, [2.5, 0.0], 3.75)
    assert exchange.tpot == pytest.approx(2.75 / 3)


def test_an_answer_that_takes_too_long_is_failed() -> None:
    options = RequestOptions(params=GREEDY, timeout=2.0)
    exchange = timed((1.0, chat("a")), (1.0, chat("b")), (1.0, DONE), options=options)
    assert (exchange.error, exchange.text) == ("no whole answer within 2 s", "a")
    assert timed((1.0, chat("a", "stop")), (0.25, DONE), options=options).error == ""
    # The client does not wait for bytes after [DONE].
    assert timed((1.0, chat("a", "stop")), (0.25, DONE), (99.0, b""), options=options).error == ""


def test_the_body_of_requests() -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And?"}]
    plain = {"model": "m", "max_tokens": 8, "temperature": 0, "seed": 8, "stream": True}
    plain["stream_options"] = {"include_usage": True}
    assert OPTIONS.request(3, "m", talk) == {**plain, "messages": talk}
    raw = RequestOptions(params=GREEDY, endpoint="completions", ignore_eos=True)
    prompt = "Hello\n\nHi\n\nAnd?"
    assert raw.request(3, "m", talk) == {**plain, "prompt": prompt, "ignore_eos": True}
    warm = SamplingParams(temperature=0.5, top_p=0.9, top_k=4, max_tokens=8)
    body = {"speculation": False, "max_tokens": None, "max_completion_tokens": 9, "stream_options": None}
    assert RequestOptions(params=warm, body=body).request(0, "m", HELLO) == {
        **{"model": "m", "messages": HELLO, "temperature": 0.5, "seed": 0, "stream": True},
        **{"top_p": 0.9, "top_k": 4, "speculation": False, "max_completion_tokens": 9},
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"endpoint": "chats"}, "endpoint is 'chats'; allowed: chat, completions"),
        ({"timeout": 0.0}, "timeout is 0.0; allowed: a number of seconds above 0"),
        (
            {"body": {"stream": False, "prompt": ""}},
            "body has prompt, stream, which the benchmark sets",
        ),
        ({"body": {"n": 2}}, "body has n = 2; one text per request is measured"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RequestOptions(params=GREEDY, **options)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("https://host/api/v1/", "https://host/api"),
        ("localhost:8000", None),
        ("http://", None),
        ("ftp://host", None),
    ],
)
def test_urls_with_and_without_v1_are_taken(url: str, root: str | None) -> None:
    if root is None:
        with pytest.raises(ConfigError, match="allowed: like http://localhost:8000"):
            server_root(url)
    else:
        assert server_root(url) == root


def models(reply: Reply, api_key: str | None = None) -> str:
    async def work(url: str) -> str:
        async with connect(f"{url}/v1", api_key) as http:
            return await first_model(http, 5)

    with FakeServer(lambda request: reply, models=reply) as server:
        return asyncio.run(work(server.url))


def test_the_first_model_is_taken() -> None:
    assert models(Reply([b'{"data": [{"id": "a"}, {"id": "b"}]}'])) == "a"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply([b'{"data": []}']), "lists no model; give --model"),
        (Reply([b"hello"]), "lists no model; give --model"),
        (error("401 Unauthorized", "no key"), "answered HTTP 401: no key; give --model, or --api-key"),
    ],
)
def test_a_server_without_models_is_refused(reply: Reply, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        models(reply)


def test_an_invalid_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--url needs httpx; .* pip install 'specinfer\[serve\]'"):
        connect("http://localhost:1", None)
