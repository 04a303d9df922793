"""Paths, methods and origins of browsers, probes and careless clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.tokenizer import Tokenizer
from tests.unit.serve.asked import Asked


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


def test_an_empty_key_in_the_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from specinfer.cli.serve import serve
    from specinfer.errors import ConfigError

    monkeypatch.setenv("SPECINFER_API_KEY", "")
    found = CliRunner().invoke(serve, [str(tmp_path)])
    assert isinstance(found.exception, ConfigError)
    assert "SPECINFER_API_KEY is empty" in str(found.exception)
