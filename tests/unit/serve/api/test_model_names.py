"""Model names in requests."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer.tokenizer import Tokenizer
from tests.unit.serve.asked import Asked

NAMES = ("qwen", "gpt-4o", "org/name")
TURNS = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": TURNS},
    "/completions": {"prompt": "Hi"},
    "/responses": {"input": "Hi"},
    "/messages": {"messages": TURNS, "max_tokens": 5},
}


def test_all_names_are_listed_and_adapters_behind_their_model(tokenizer: Tokenizer) -> None:
    for adapters in ((), ("sql",)):
        http = Asked(tokenizer, models=NAMES, adapters=adapters).http
        listed = http.get("/models").json()["data"]
        assert [card["id"] for card in listed] == [*NAMES, *adapters]
        assert {card["root"] for card in listed} == {"qwen"}
        assert [card.get("parent") for card in listed] == [None] * 3 + ["qwen"] * len(adapters)
        assert http.get("/models/org/name").json() == listed[2]
        assert http.get("/models/other").status_code == 404
    assert http.get("/models/sql").json() == listed[3]


@pytest.mark.parametrize("path", BODIES)
def test_any_name_is_answered_under_one_that_is_served(tokenizer: Tokenizer, path: str) -> None:
    server = Asked(tokenizer, models=NAMES)
    others = ("", None, "other", "qwen:my-adapter", "QWEN", "claude-opus-5")
    for asked, expected in (*((name, name) for name in NAMES), *((name, "qwen") for name in others)):
        assert server.ok(path, **BODIES[path] | {"model": asked})["model"] == expected
    assert server.ok(path, **BODIES[path])["model"] == "qwen"


@pytest.mark.parametrize("path", BODIES)
def test_an_adapter_is_selected_by_its_name(tokenizer: Tokenizer, path: str) -> None:
    server = Asked(tokenizer, models=NAMES, adapters=("sql", "org/poems"))
    for name in ("sql", "org/poems", "qwen", "gpt-4o", None):
        assert server.ok(path, **BODIES[path] | {"model": name})["model"] == (name or "qwen")
    missing = server.http.post(path, json=BODIES[path] | {"model": "poems"})
    assert missing.status_code == 404
    assert "allowed: qwen, gpt-4o, org/name, sql, org/poems" in missing.text
    assert [work.adapter for work in server.backend.works] == ["sql", "org/poems", None, None, None]
