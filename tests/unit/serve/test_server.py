"""The server as a process: keys, waiting and its end."""

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from specinfer.errors import ConfigError
from specinfer.serve.config import ServeConfig
from specinfer.serve.server import _Server, _uvicorn_config, read_keys
from tests.served import Served
from tests.unit.serve.backend.listeners import until
from tests.unit.serve.conftest import FLAGS


def test_comments_of_a_file_of_keys_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys of team A\nk1\n\n  # another\n  k2 \nk#3\n")
    assert read_keys(ServeConfig(api_key=("k0",), api_key_file=str(file))) == ["k0", "k1", "k2", "k#3"]
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(ServeConfig(api_key_file=str(file)))


LONG = {"prompt": "abc", "max_tokens": 800, "ignore_eos": True}


@pytest.mark.thorough
def test_answers_that_outlast_the_grace_end_with_an_error_that_can_be_read(folder: Path) -> None:
    """With a batch of one, no request for 16 answers can be done when the grace is over."""
    with Served(folder, *FLAGS, "--max-batch-size", "1", "--grace", "0.3") as served:

        def ask(number: int) -> httpx.Response:
            return served.post("/v1/completions", {**LONG, "n": 16, "stream": number % 2 == 0})

        with ThreadPoolExecutor(4) as pool:
            asking = pool.map(ask, range(4))
            until(lambda: served.metric("request_prompt_tokens_count") >= 64)
            served.process.send_signal(signal.SIGTERM)
            found = list(asking)
        assert served.process.wait(60) == 0
    assert [one.status_code for one in found] == [200, 503, 200, 503]
    assert [one.text.startswith("data: ") for one in found] == [True, False, True, False]
    message = "the server shut down before the answer was complete; send the request again"
    for one in found:
        error = json.loads(one.text.strip().splitlines()[-1].removeprefix("data: "))
        assert error["error"]["message"] == message
    log = "".join(served.log)
    [cut_off] = re.findall(r"WARNING .*?(\d+) answers were cut off at the end of --grace", log)
    assert 32 < int(cut_off) <= 64
    assert "Traceback" not in log


@pytest.mark.thorough
def test_a_stream_behind_others_begins_at_once_and_is_kept_alive(folder: Path, tmp_path: Path) -> None:
    rare = tmp_path / "rare.yaml"
    rare.write_text("lookup-memory: 0\nping-interval: 0.05\n")
    flags = ("--max-batch-size", "1", "--config", str(rare))
    with Served(folder, *FLAGS, *flags) as served:
        url = f"{served.url}/v1/"
        with httpx.stream("POST", f"{url}completions", json={**LONG, "n": 8, "stream": True}) as first:
            lines = first.iter_lines()  # one that is let go closes the connection
            assert any(line.startswith("data: ") for line in lines)
            message = {"role": "user", "content": "a"}
            for path, body, begins in (
                ("completions", {"prompt": "a", "max_tokens": 3}, ": ping"),
                ("chat/completions", {"messages": [message], "max_tokens": 3}, ": ping"),
                ("responses", {"input": "a", "max_output_tokens": 3}, "event: response.created"),
            ):
                with httpx.stream("POST", url + path, json={**body, "stream": True}, timeout=60) as waiting:
                    assert served.metric("num_requests_waiting") > 0
                    lines_of_it = waiting.iter_lines()
                    assert next(lines_of_it) == begins
                    assert ": ping" in [begins, *(next(lines_of_it) for _ in range(12))]


def begin_with(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each new process of Python run a program first."""
    (folder / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))


# Runs in the engine's process: its next step blocks in C, without Python's lock, once the file exists.
_HANGS = """
import ctypes, sys, threading, time
from pathlib import Path

def patch():
    while not hasattr(sys.modules.get("specinfer.engine.engine"), "Engine"):
        time.sleep(0.05)
    engine = sys.modules["specinfer.engine.engine"].Engine
    land = engine._land

    def hanging(self, *given):
        found = Path({file!r})
        if found.exists():
            found.unlink()
            ctypes.CDLL(None).sleep(1000)
        return land(self, *given)

    engine._land = hanging

if "specinfer.serve.backend.engine_process" in sys.orig_argv:
    threading.Thread(target=patch, daemon=True).start()
"""


@pytest.mark.thorough
def test_answers_outlive_a_hung_engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal stops the first one; a step of the second one hangs in native code."""
    hang = tmp_path / "hang"
    begin_with(_HANGS.format(file=str(hang)), tmp_path, monkeypatch)
    with Served(folder, *FLAGS, "--engine-timeout", "4") as served:

        def text() -> str:
            answer = served.post("/v1/completions", {**LONG, "seed": 1}).json()
            return str(answer["choices"][0]["text"])

        expected = text()
        os.kill(served.engine_pid, signal.SIGSTOP)
        assert text() == expected
        assert served.metric("engine_restarts") == 1
        assert any("has not replied for 4 seconds" in line for line in served.log)
        hang.touch()
        began = time.monotonic()
        assert text() == expected
        assert not hang.exists()
        assert time.monotonic() - began < 60
        assert served.metric("engine_restarts") == 2
        assert any("has made no progress for 4 seconds" in line for line in served.log)


_WRITES_SLOWLY = """
import os, time
replace = os.replace
def slow(source, target):
    time.sleep(0.25 * ("specinfer-prompts-" in str(target)))
    replace(source, target)
os.replace = slow
"""


@pytest.mark.thorough
def test_prompts_on_disk_outlast_ends(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends, and an engine is killed, while files wait to be written."""
    begin_with(_WRITES_SLOWLY, tmp_path, monkeypatch)
    store = tmp_path / "store"

    def ask(served: Served, letter: str) -> tuple[str, int]:
        body = {"prompt": letter * 200, "max_tokens": 4, "seed": 1, "ignore_eos": True}
        answer = served.post("/v1/completions", body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def written() -> int:
        return sum(path.suffix != ".partial" for path in store.glob("*/*"))

    with Served(folder, *FLAGS, "--prompt-store", str(store)) as served:
        assert any(f"; prompt store {store};" in line for line in served.log)
        text, cached = ask(served, "a")
        assert cached == 0
        assert written() < 12
    assert written() == 12  # blocks of 16 tokens
    with Served(folder, *FLAGS, "--prompt-store", str(store)) as served:
        assert ask(served, "a") == (text, 192)
        text, cached = ask(served, "b")
        assert cached == 0
        while (there := written()) < 15:
            time.sleep(0.01)
        assert there < 24
        os.kill(served.engine_pid, signal.SIGKILL)
        again, cached = ask(served, "b")
        assert again == text
        assert 3 * 16 <= cached < 192
        assert served.metric("engine_restarts") == 1


def test_the_client_address_of_a_trusted_proxy_is_used() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0])

    headers = [(b"x-forwarded-for", b"192.0.2.7")]
    scope = {"type": "http", "client": ("127.0.0.1", 1), "headers": headers, "scheme": "http"}
    for trusted in ((), ("127.0.0.0/8",), ("10.0.0.1",)):
        config = _uvicorn_config(ServeConfig(trusted_proxy=trusted), cast(Starlette, app))
        config.load()
        asyncio.run(config.loaded_app({**scope}, None, None))  # type: ignore[arg-type]
    assert seen == ["127.0.0.1", "192.0.2.7", "127.0.0.1"]


@pytest.mark.thorough
def test_sigterm_lets_answers_end_and_takes_no_new_ones(folder: Path) -> None:
    with Served(folder, *FLAGS, "--max-batch-size", "1", "--grace", "200") as served:
        # One after the other, so that most of them wait when the first one starts.
        body = {**LONG, "prompt": ["abc"] * 3, "max_tokens": 1800, "stream": True}
        ended: dict[int, str] = {}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as answer:
            for line in (line for line in answer.iter_lines() if line.startswith("data: {")):
                if not ended:
                    served.process.send_signal(signal.SIGTERM)
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    ended[choice["index"]] = choice["finish_reason"]
        assert ended == dict.fromkeys(range(3), "length")
        assert served.process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            served.get("/health")


@pytest.mark.thorough
def test_a_failed_start_is_explained_in_one_line(folder: Path, taken_port: int) -> None:
    cases: list[tuple[list[str], str]] = [
        (["--port", "PORT"], "cannot listen on 127.0.0.1:PORT"),
        (["--kv-cache-memory", "1KB"], "KV cache"),
        (["--max-context", "9999"], "max_context is 9999"),
        (["--api-key-file", "/nowhere"], "cannot read api_key_file /nowhere"),
    ]
    for flags, message in cases:
        port = str(taken_port)
        flags = ["--port", "0", *(flag.replace("PORT", port) for flag in flags)]  # the last one counts
        command = [sys.executable, "-m", "specinfer", "serve", str(folder), *FLAGS[:2], *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 2, flags
        complaints = [line for line in ended.stderr.splitlines() if line.startswith("specinfer: error:")]
        assert len(complaints) == 1, flags
        assert message.replace("PORT", port) in complaints[0], flags
        assert "Traceback" not in ended.stderr, flags


def test_a_signal_ends_the_server_unless_nohup_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.serve.server.has_terminal", lambda: True)
    server = _Server(uvicorn.Config("none:app"), cast(Any, None))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for before in (print, signal.SIG_IGN):  # a handler, so that a signal that is missed ends no test run
            server.should_exit = False
            earlier = signal.signal(number, before)
            try:
                with server.capture_signals():
                    signal.raise_signal(number)
                assert server.should_exit == (before is print), number
                assert signal.getsignal(number) is before
            finally:
                signal.signal(number, earlier)


async def test_a_sighup_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("specinfer.serve.handover.subprocess.Popen", fails)
    server, before = _Server(uvicorn.Config("none:app"), cast(Any, None)), os.listdir("/proc/self/fd")
    listener = SimpleNamespace(fileno=lambda: 0)
    server.servers = [cast(Any, SimpleNamespace(sockets=[listener]))]
    await server._hand_over()
    assert "a new process cannot start: [Errno 12] Cannot allocate memory; this one goes on" in caplog.text
    assert os.listdir("/proc/self/fd") == before
    assert not server.should_exit


@pytest.mark.slow
def test_sighup_hands_the_port_over_without_a_refused_request(folder: Path) -> None:
    """Requests come without pause while one restart fails and one succeeds; no bit of a text changes."""
    # Without a terminal, and without the nohup that tests may run under.
    heeds = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    alone = partial(subprocess.Popen[str], start_new_session=True, preexec_fn=heeds)
    body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "temperature": 1, "seed": 3}
    kept, stop = httpx.Client(), threading.Event()
    found: dict[str, set[str]] = {"new connections": set(), "one connection": set(), "streams": set()}

    def ask(how: str) -> None:
        client: Any = kept if how == "one connection" else httpx
        asked = {**body, "stream": True, "max_tokens": 600} if how == "streams" else body
        while not stop.is_set():
            text = client.post(f"{served.url}/v1/completions", json=asked, timeout=60).text
            found[how].add("".join(re.findall(r'"(?:text|finish_reason)":"((?:[^"\\]|\\.)*)', text)) or text)

    with Served(folder, *FLAGS, "--grace", "60", popen=cast(Any, alone)) as served:
        children = psutil.Process(served.process.pid).children

        def restarted() -> psutil.Process:
            before = children()
            served.process.send_signal(signal.SIGHUP)
            until(lambda: any(one not in before for one in children()))
            return next(one for one in children() if one not in before)

        asking = [threading.Thread(target=ask, args=(how,)) for how in found]
        for one in asking:
            one.start()
        (broken := restarted()).kill()
        until(lambda: any(f"process {broken.pid} ended with status -9" in line for line in served.log))
        new = restarted()
        try:
            assert served.process.wait(90) == 0
            time.sleep(1)
            assert new.is_running()
        finally:
            stop.set()
            for one in asking:
                one.join()
            new.terminate()
        assert {how: len(texts) for how, texts in found.items()} == dict.fromkeys(found, 1)
        assert all(text.endswith("length") for texts in found.values() for text in texts), found
