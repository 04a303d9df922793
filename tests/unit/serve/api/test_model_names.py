"""Model names in requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import ScriptedBackend, byte_tokenizer, http_client, says, scripted_app

NAMES = ("qwen", "gpt-4o", "org/name")
TURNS = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": TURNS},
    "/completions": {"prompt": "Hi"},
    "/responses": {"input": "Hi"},
    "/messages": {"messages": TURNS, "max_tokens": 5},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def ask(tokenizer: Tokenizer, do: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    app = scripted_app(tokenizer, ScriptedBackend(says("Hello")), models=NAMES)
    asyncio.run(do(http_client(app)))  # type: ignore[arg-type]


def test_all_names_are_listed(tokenizer: Tokenizer) -> None:
    async def do(http: httpx.AsyncClient) -> None:
        listed = (await http.get("/models")).json()["data"]
        assert [card["id"] for card in listed] == list(NAMES)
        assert {card["root"] for card in listed} == {"qwen"}
        assert (await http.get("/models/org/name")).json() == listed[2]
        assert (await http.get("/models/other")).status_code == 404

    ask(tokenizer, do)


@pytest.mark.parametrize("path", BODIES)
def test_any_name_is_answered_under_one_that_is_served(tokenizer: Tokenizer, path: str) -> None:
    async def do(http: httpx.AsyncClient) -> None:
        others = ("", None, "other", "qwen:my-adapter", "QWEN", "claude-opus-5")
        for asked, expected in (*((name, name) for name in NAMES), *((name, "qwen") for name in others)):
            answer = await http.post(path, json=BODIES[path] | {"model": asked})
            assert answer.json()["model"] == expected
        assert (await http.post(path, json=BODIES[path])).json()["model"] == "qwen"

    ask(tokenizer, do)


@pytest.mark.parametrize("path", BODIES)
def test_an_adapter_is_selected_by_its_name(tokenizer: Tokenizer, path: str) -> None:
    backend = ScriptedBackend(says("Hello"))
    app = scripted_app(tokenizer, backend, models=NAMES, adapters=("sql", "org/poems"))

    async def do(http: httpx.AsyncClient) -> None:
        for name in ("sql", "org/poems", "qwen", "gpt-4o", None):
            answer = await http.post(path, json=BODIES[path] | {"model": name})
            assert answer.json()["model"] == (name or "qwen")
        missing = await http.post(path, json=BODIES[path] | {"model": "poems"})
        assert missing.status_code == 404
        assert "allowed: qwen, gpt-4o, org/name, sql, org/poems" in missing.text

    asyncio.run(do(http_client(app)))  # type: ignore[arg-type]
    assert [work.adapter for work in backend.works] == ["sql", "org/poems", None, None, None]


def test_adapters_are_listed_behind_the_model_that_they_are_of(tokenizer: Tokenizer) -> None:
    app = scripted_app(tokenizer, ScriptedBackend(says("Hello")), models=NAMES, adapters=("sql",))

    async def do(http: httpx.AsyncClient) -> None:
        listed = (await http.get("/models")).json()["data"]
        assert [card["id"] for card in listed] == [*NAMES, "sql"]
        assert [card.get("parent") for card in listed] == [None, None, None, "qwen"]
        assert (await http.get("/models/sql")).json() == listed[3]
        assert (await http.get("/models/other")).status_code == 404

    asyncio.run(do(http_client(app)))  # type: ignore[arg-type]
