"""Paths, methods and origins of browsers, probes and careless clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import ScriptedBackend, byte_tokenizer, http_client, says, scripted_app


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def use(tokenizer: Tokenizer, do: Callable[[httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        app = scripted_app(tokenizer, ScriptedBackend(says("ok")), **options)
        async with http_client(app) as client:
            client.base_url = httpx.URL("http://server")
            await do(client)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/version", "/"])
def test_probes_may_ask_with_head(tokenizer: Tokenizer, path: str) -> None:
    async def do(client: httpx.AsyncClient) -> None:
        head, get = await client.head(path), await client.get(path)
        assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"])

    use(tokenizer, do)


def test_a_trailing_slash_is_reported_and_not_redirected(tokenizer: Tokenizer) -> None:
    """A redirection would name the server's own address, which behind a proxy is not the client's."""

    async def do(client: httpx.AsyncClient) -> None:
        for path in ("/v1/chat/completions/", "/health/"):
            answer = await client.post(path, json={})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"POST {path}: not found; drop the trailing slash"
        answer = await client.get("/" + "x" * 10_000)
        assert answer.status_code == 404
        assert len(answer.content) < 300

    use(tokenizer, do)


def test_an_empty_key_in_the_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from specinfer.cli.serve import serve
    from specinfer.errors import ConfigError

    monkeypatch.setenv("SPECINFER_API_KEY", "")
    found = CliRunner().invoke(serve, [str(tmp_path)])
    assert isinstance(found.exception, ConfigError)
    assert "SPECINFER_API_KEY is empty" in str(found.exception)
