"""Keys, hosts, limits, paths and ids, before any endpoint."""

import asyncio
import json
import logging
from itertools import product
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specinfer.serve.http.access import Access, Hosts, Keys
from specinfer.serve.http.api_error import CALLER
from specinfer.tokenizer import Tokenizer
from tests.unit.serve.asked import Asked
from tests.virtual_time import run_virtual

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "client": None, "headers": []}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await PlainTextResponse(str(size))(scope, receive, send)


Headers = list[tuple[bytes, bytes]]


def headers_of(given: dict[str, str]) -> Headers:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]


def ask(
    access: Access, *pieces: bytes, stall: bool = False, more: Headers | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a POST whose body comes in these pieces."""
    sent: list[Message] = []
    left = list(pieces or [b""])
    scope = {**SCOPE, "path": "/v1/models", "client": ("10.0.0.1", 1)}
    scope |= {name: headers.pop(name) for name in ("path", "method") if name in headers}
    scope["headers"] = headers_of(headers) + (more or [])

    async def receive() -> Message:
        if stall and not left:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or stall}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(access(scope, receive, send))
    start, *bodies = sent
    headers_by_name = {k.decode(): v.decode() for k, v in start["headers"]}
    return start["status"], headers_by_name, b"".join(one.get("body", b"") for one in bodies)


def guarded(*keys: str, app: ASGIApp = echo, **options: Any) -> Access:
    usual: dict[str, Any] = {"max_body": 10, "max_bodies": 99, "idle_timeout": 5.0}
    return Access(app, keys=Keys(keys), **usual | options)


def test_only_a_known_key_gets_in() -> None:
    cases: list[tuple[dict[str, str], int]] = [
        ({"authorization": "Bearer sesame"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"authorization": "Bearer sesam"}, 401),
        ({"authorization": "Bearer sesame2"}, 401),
        ({"authorization": "Basic sesame"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": ""}, 401),
        ({}, 401),
        # As Anthropic's clients send it.
        ({"x_api_key": "sesame"}, 200),
        ({"x_api_key": "other", "authorization": "Bearer wrong"}, 200),
        ({"x_api_key": "wrong", "authorization": "Bearer other"}, 200),
        ({"x_api_key": "Bearer sesame"}, 401),
        ({"x_api_key": ""}, 401),
    ]
    for given, status in cases:
        got, headers, body = ask(guarded("sesame", "other"), **given)
        assert got == status, given
        if status == 401:
            assert headers["WWW-Authenticate".lower()] == "Bearer", given
            assert json.loads(body)["error"]["code"] == "invalid_api_key", given


def test_repeated_headers_are_refused() -> None:
    """If a proxy checks the first header and a server the last, a request could pass both."""
    for name, path in product(("host", "authorization", "x-api-key"), ("/v1/models", "/health")):
        twice = headers_of({name: "Bearer sesame"}) * 2
        status, _, body = ask(guarded("sesame"), path=path, more=twice)
        assert status == 400
        assert f"the header {name} appears more than once" in json.loads(body)["error"]["message"]


def test_no_key_is_needed_without_keys_and_for_probes() -> None:
    assert ask(guarded())[0] == 200
    assert ask(guarded("sesame"), path="/health")[0] == 200
    assert ask(guarded("sesame"), path="/metrics")[0] == 401


def test_a_page_elsewhere_makes_nothing_work_here() -> None:
    cases: list[tuple[str, str, int]] = [
        ("same-origin", "http://here", 200),
        ("none", "", 200),
        ("cross-site", "http://elsewhere", 403),
        ("same-site", "http://127.0.0.1:9", 403),
        ("cross-site", "", 403),
        ("cross-site", "http://friend", 200),
    ]
    for site, origin, status in cases:
        access = guarded(origins=("http://friend",))
        assert ask(access, sec_fetch_site=site, origin=origin)[0] == status, (site, origin)
        anybody = guarded(origins=("*",))
        assert ask(anybody, sec_fetch_site=site, origin=origin)[0] == 200, (site, origin)


def test_origins_are_compared_without_sec_fetch_site() -> None:
    """It names its page's site only to this machine itself and over TLS."""
    cases: list[tuple[str, str, int]] = [
        ("http://192.0.2.1:8000", "192.0.2.1:8000", 200),
        ("http://LLM.example", "llm.example", 200),
        ("http://llm.example", "llm.example:80", 200),
        ("https://llm.example", "llm.example", 200),
        ("https://llm.example:443", "llm.example", 200),
        ("http://[::1]:8000", "[::1]:8000", 200),
        ("http://friend", "192.0.2.1:8000", 200),
        ("http://evil.example", "192.0.2.1:8000", 403),
        ("http://192.0.2.1:9000", "192.0.2.1:8000", 403),
        ("http://192.0.2.1", "192.0.2.1:8000", 403),
        ("http://evil.example/192.0.2.1:8000", "192.0.2.1:8000", 403),
        ("null", "192.0.2.1:8000", 403),
        ("http://", "", 403),
        ("x", "x", 403),
    ]
    for origin, host, status in cases:
        access = guarded(origins=("http://friend",))
        assert ask(access, origin=origin, host=host)[0] == status, (origin, host)
        assert ask(access, origin=origin, host=host, method="GET")[0] == 200, (origin, host)
        assert ask(access, origin=origin, host=host, sec_fetch_site="same-origin")[0] == 200, (origin, host)
        assert ask(guarded(), host=host)[0] == 200, (origin, host)


def test_a_request_has_at_most_a_hundred_headers() -> None:
    assert ask(guarded(), **{f"h{number}": "" for number in range(100)})[0] == 200
    for path in ("/v1/models", "/health"):
        status, headers, _ = ask(guarded(), path=path, **{f"h{number}": "" for number in range(101)})
        assert (status, headers["connection"]) == (431, "close")


async def test_bodies_together_have_a_bound_and_the_largest_incomplete_one_is_refused(virtual: None) -> None:
    access, answers = guarded(max_body=1000, max_bodies=1000), {}

    class Client:
        def __init__(self, name: str) -> None:
            self.name, self.pieces = name, asyncio.Queue[tuple[bytes, bool]]()
            self.task = asyncio.ensure_future(access(SCOPE, self.receive, self.send))

        async def receive(self) -> Message:
            body, more = await self.pieces.get()
            return {"type": "http.request", "body": body, "more_body": more}

        async def send(self, message: Message) -> None:
            answers.setdefault(self.name, message.get("status"))

        async def give(self, size: int, more: bool = True) -> None:
            self.pieces.put_nowait((b"x" * size, more))
            await asyncio.sleep(0.01)

    small, medium, large = Client("small"), Client("medium"), Client("large")
    for client, size in ((small, 100), (large, 500), (medium, 300)):
        await client.give(size)
    assert answers == {}
    await small.give(200)  # together 1,100
    assert answers == {"large": 503}
    await medium.give(500)  # the largest itself
    assert answers == {"large": 503, "medium": 503}
    late = Client("late")
    await late.give(400)
    await small.give(600, more=False)  # whole, so the other one makes room
    assert answers == {"large": 503, "medium": 503, "late": 503, "small": 200}
    await asyncio.gather(*(client.task for client in (small, medium, large, late)))
    assert not access._bodies


def test_a_body_is_limited_with_and_without_content_length() -> None:
    assert ask(guarded(), b"0123456789")[2] == b"10"
    assert ask(guarded(), b"01234", b"56789", b"!")[0] == 413
    assert ask(guarded(), b"", content_length="11")[0] == 413
    assert ask(guarded(), b"abc", content_length="-1")[2] == b"3"


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    status, _, body = ask(guarded(idle_timeout=0.05), b"abc", stall=True)
    assert status == 408
    assert "did not arrive in time" in body.decode()


def test_a_body_that_comes_drop_by_drop_is_not_waited_for() -> None:
    """Two megabytes a minute come over a slow line; a kilobyte a minute is there to keep the connection."""

    async def run(size: int, every: float) -> tuple[int, float]:
        access = guarded(max_body=16 << 20, max_bodies=32 << 20, idle_timeout=75.0)
        sent: list[Message] = []
        left = 16 << 20

        async def receive() -> Message:
            nonlocal left
            await asyncio.sleep(every)
            left -= size
            return {"type": "http.request", "body": b"x" * size, "more_body": left > 0}

        async def send(message: Message) -> None:
            sent.append(message)

        await access(SCOPE, receive, send)
        return sent[0]["status"], asyncio.get_running_loop().time()

    for size, every, status in ((1000, 60.0, 408), (2 << 20, 60.0, 200), (1, 0.5, 408)):
        found, ended = run_virtual(run(size, every))
        assert found == status, (size, every)
        assert ended <= 80.0 if status == 408 else ended == 8 * every


def test_a_reader_that_takes_nothing_is_let_go() -> None:
    async def never(message: Message) -> None:
        await asyncio.sleep(60)

    async def nothing() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(guarded(idle_timeout=0.05)(SCOPE, nothing, never))


def test_every_answer_has_an_id_in_the_log_and_no_body_is_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, headers, _ = ask(guarded(max_body=100), b"my secret words")
    [record] = caplog.records
    assert headers["x-request-id"] in record.getMessage()
    assert "POST /v1/models 200" in record.getMessage()
    assert record.request_id == headers["x-request-id"]
    assert "secret" not in caplog.text


def test_a_path_cannot_forge_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ask(guarded(), path="/v1\n12:00:00 INFO server: POST /v1/models 200\x1b[2J\u2028" + "x" * 1000)
    [record] = caplog.records
    line = record.getMessage()
    assert "POST /v1%0A12:00:00%20INFO" in line
    assert line.isprintable()
    assert line.isascii()
    assert len(line) < 500


def failing(error: BaseException) -> Access:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    return guarded(app=app)


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [KeyError("a bug"), Panic("KeyError in Rust")])
def test_a_bug_has_one_id_here_and_in_the_log(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    status, headers, body = ask(failing(error))
    assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
    bug, line = caplog.records
    assert bug.getMessage() == f"{headers['x-request-id']} failed"
    assert "KeyError" in caplog.text
    assert line.status == 500


def test_a_client_that_goes_away_within_its_body_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def never(message: Message) -> None:
        raise AssertionError("no answer may be sent")

    asyncio.run(failing(ClientDisconnect())(SCOPE, nothing, never))
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_the_session_of_a_request_stands_in_the_header_that_is_named(tokenizer: Tokenizer) -> None:
    found: list[str] = []

    async def keep(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(CALLER.get().session)
        await PlainTextResponse("")(scope, receive, send)

    cases: list[tuple[dict[str, str], str]] = [({}, "x_session_id"), ({"session_header": "X-Talk"}, "x_talk")]
    for options, header in cases:
        found.clear()
        access = guarded(app=keep, **options)
        for headers in ({header: "ann"}, {"x_other": "ben"}):
            assert ask(access, **headers)[0] == 200, options
        assert found == ["ann", ""], options
    server = Asked(tokenizer)
    server.http.post("/completions", json={"prompt": "a"}, headers={"X-Session-Id": "ann"})
    assert server.backend.sessions == ["ann"], "the engine gets it"


def test_accepted_host_headers() -> None:
    hosts = Hosts(["Mine.example", "other.example.", "10.1.2.3", "[fe80::1]"])
    admitted = "localhost localhost:8000 LocalHost.:1 127.0.0.1:8000 127.9.8.7 [::1]:8000 [::1] mine.example "
    admitted += "MINE.example:443 mine.example.:443 other.example:8000 10.1.2.3:8000 [fe80::1]:9"
    for host in admitted.split():
        assert hosts.admit(host.encode()), host
    others = "evil.example:8000 localhost.evil.example 127.0.0.1.evil.example 10.1.2.4 [::2]:8000 :8000 "
    others += "0.0.0.0:8000 [ [::1 ::1 [] localhost:8000:1 localhost:x localhost/a a@localhost *"
    for host in ("", "localhost localhost", "\xe9vil.example", *others.split()):
        assert not hosts.admit(host.encode("latin-1")), host


def test_when_names_are_looked_at() -> None:
    cases: list[tuple[list[str], bool, str, bool]] = [
        *(([], False, address, True) for address in ("127.0.0.1", "127.0.1.1", "::1")),
        *(([], False, address, False) for address in ("0.0.0.0", "192.0.2.1")),
        ([], True, "127.0.0.1", False),
        (["a.example"], False, "192.0.2.1", True),
        (["a.example"], True, "127.0.0.1", True),
        *((names, False, "127.0.0.1", False) for names in (["*"], ["a.example", "*"])),
    ]
    for allowed, keyed, address, checked in cases:
        hosts = Hosts.of("mybox", allowed, keyed=keyed, address=address)
        assert (hosts is not None) is checked, (allowed, keyed)
        if hosts is not None:
            assert hosts.admit(b"a.example") is ("a.example" in allowed), (allowed, keyed)
            assert hosts.admit(b"mybox:8000"), (allowed, keyed)
            assert not hosts.admit(b"evil.example"), (allowed, keyed)


def test_another_name_is_refused_before_anything_else_is_looked_at() -> None:
    hosts = Hosts(["mine.example"])
    for access in (guarded(hosts=hosts), guarded("sesame", hosts=hosts)):
        status, _, body = ask(access, host="evil.example:8000", content_length="11")
        error = json.loads(body)["error"]
        assert (status, error["type"]) == (421, "invalid_request_error")
        assert "'evil.example:8000'" in error["message"]
        assert "--allowed-host" in error["message"]
    assert ask(guarded(hosts=hosts), host="mine.example:8000")[0] == 200
    assert ask(guarded(hosts=hosts), host="evil.example", path="/page/main.js")[0] == 421
    assert ask(guarded(hosts=hosts))[0] == 421
    long = ask(guarded(hosts=hosts), host="x" * 60_000)[2]
    assert len(long) < 1000


def test_probes_may_ask_with_head(tokenizer: Tokenizer) -> None:
    http = Asked(tokenizer).http
    for path in ("/health", "/ready", "/v1/models", "/metrics", "/version", "/"):
        head, get = (http.request(method, f"http://server{path}") for method in ("HEAD", "GET"))
        assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"]), path


def test_a_trailing_slash_is_reported_and_not_redirected(tokenizer: Tokenizer) -> None:
    """A redirection would name the server's own address, which behind a proxy is not the client's."""
    http = Asked(tokenizer).http
    for path in ("/v1/chat/completions/", "/health/"):
        answer = http.post(f"http://server{path}", json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"POST {path}: not found; drop the trailing slash"
    answer = http.get("http://server/" + "x" * 10_000)
    assert answer.status_code == 404
    assert len(answer.content) < 300
