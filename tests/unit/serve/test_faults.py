"""A server whose engine dies, that is full, or that is ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from specinfer import LLM, SamplingParams
from tests.served import Served
from tests.unit.serve.conftest import FLAGS

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("forked")]

LONG = {"model": "tiny", "max_tokens": 1800, "temperature": 1.0, "top_p": 1.0, "stream": True}


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0, timeout=120)


def test_streams_go_on_where_they_were_when_the_engine_is_killed(folder: Path) -> None:
    with LLM(folder, lookup=False, dtype="float32", kv_cache_memory=1 << 24) as llm:
        params = [
            SamplingParams(temperature=1, top_p=1, seed=s, max_tokens=1800, ignore_eos=True) for s in range(4)
        ]
        expected = [output.text for output in llm.generate([f"{s}abc" for s in range(4)], params)]
    with Served(folder, *FLAGS, "--served-model-name", "tiny") as served:
        client, texts, started = client_of(served), ["", "", "", ""], threading.Event()
        first = threading.Lock()
        engine = served.engine_pid  # found first: the texts are short, and other work may delay a search
        assert engine is not None

        def listen(seed: int) -> None:
            stream = client.completions.create(
                prompt=f"{seed}abc", seed=seed, extra_body={"ignore_eos": True}, **LONG
            )
            for chunk in stream:
                texts[seed] += chunk.choices[0].text
                if first.acquire(
                    blocking=False
                ):  # the first reader kills at once, because the texts are short
                    os.kill(engine, signal.SIGKILL)
                    started.set()

        listeners = [threading.Thread(target=listen, args=(seed,)) for seed in range(4)]
        for one in listeners:
            one.start()
        assert started.wait(120)
        time.sleep(0.5)
        served.kill_engine()  # the next one, which starts or goes on with them
        for one in listeners:
            one.join(120)
        assert texts == expected
        until(lambda: served.metric("engine_restarts") >= 1)
        assert any(re.search("status -9 .*; [1-4] answers wait for it", line) for line in served.log)
        served.wait_idle()


def until(so: Callable[[], bool]) -> None:
    """Return when it is so; fails after a minute."""
    end = time.monotonic() + 60
    while not so():
        assert time.monotonic() < end
        time.sleep(0.05)


def error_when_killed(served: Served) -> str:
    """Return the error of a text whose engine is killed after the first token; None if it was complete."""
    until(lambda: served.get("/ready").status_code == 200)
    engine = served.engine_pid
    assert engine is not None
    stream = iter(
        client_of(served).completions.create(
            prompt="abc", extra_body={"speculation": {"verifier": "mss"}, "ignore_eos": True}, **LONG
        )
    )
    next(stream)
    os.kill(engine, signal.SIGKILL)
    try:
        list(stream)
    except openai.APIError as error:
        return str(error)
    return ""


def test_under_mss_a_started_text_ends_with_the_reason(folder: Path) -> None:
    with Served(folder, *FLAGS, "--served-model-name", "tiny") as served:
        # On a busy machine the first token may arrive after the last one was computed.
        message = next(filter(None, (error_when_killed(served) for _ in range(10))), "no text was cut off")
        assert "under mss no other can continue a text that has started" in message
        whole = client_of(served).completions.create(
            model="tiny", prompt="abc", max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert whole.usage.completion_tokens == 5


def test_sigterm_lets_answers_end_and_takes_no_new_ones(folder: Path) -> None:
    with Served(
        folder, *FLAGS, "--served-model-name", "tiny", "--max-batch-size", "1", "--grace", "200"
    ) as served:
        # One after the other, so that most of them wait when the first one starts.
        prompts = ["abc"] * 3
        ended: dict[int, str] = {}
        for chunk in client_of(served).completions.create(
            prompt=prompts, extra_body={"ignore_eos": True}, **LONG
        ):
            if not ended:
                served.process.send_signal(signal.SIGTERM)
            for choice in chunk.choices:
                ended[choice.index] = choice.finish_reason
        assert ended == dict.fromkeys(range(len(prompts)), "length")
        assert served.process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            served.get("/health")


def test_a_failed_start_is_explained_in_one_line(folder: Path, taken_port: int) -> None:
    cases: list[tuple[list[str], str]] = [
        (["--port", "PORT"], "cannot listen on 127.0.0.1:PORT"),
        (["--kv-cache-memory", "1KB"], "KV cache"),
        (["--max-context", "9999"], "max_context is 9999"),
        (["--api-key-file", "/nowhere"], "cannot read api_key_file /nowhere"),
    ]
    for flags, message in cases:
        port = str(taken_port)
        flags = [flag.replace("PORT", port) for flag in flags]
        if "--port" not in flags:
            flags += ["--port", "0"]
        ended = subprocess.run(
            [sys.executable, "-m", "specinfer", "serve", str(folder), *FLAGS[:2], *flags],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 2, flags
        complaints = [line for line in ended.stderr.splitlines() if line.startswith("specinfer: error:")]
        assert len(complaints) == 1, flags
        assert message.replace("PORT", port) in complaints[0], flags
        assert "Traceback" not in ended.stderr, flags
