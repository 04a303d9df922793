"""Model names in requests."""

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import MODEL
from tests.unit.serve.asked import BODIES, Asked

NAMES = ("qwen", "gpt-4o", "org/name")


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


def test_any_name_is_answered_under_one_that_is_served(tokenizer: Tokenizer) -> None:
    others = ("", None, "other", "qwen:my-adapter", "QWEN", "claude-opus-5")
    for path, body in BODIES.items():
        server = Asked(tokenizer, models=NAMES)
        for asked, expected in (*((name, name) for name in NAMES), *((name, "qwen") for name in others)):
            assert server.ok(path, **body | {"model": asked})["model"] == expected
        assert server.ok(path, **body)["model"] == "qwen"


def test_an_adapter_is_selected_by_its_name(tokenizer: Tokenizer) -> None:
    for path, body in BODIES.items():
        server = Asked(tokenizer, models=NAMES, adapters=("sql", "org/poems"))
        for name in ("sql", "org/poems", "qwen", "gpt-4o", None):
            assert server.ok(path, **body | {"model": name})["model"] == (name or "qwen")
        missing = server.http.post(path, json=body | {"model": "poems"})
        assert server.ok(path, **body | {"model": MODEL})["model"] == "qwen"  # as the model was given
        assert missing.status_code == 404
        assert "allowed: qwen, gpt-4o, org/name, sql, org/poems" in missing.text
        assert [work.adapter for work in server.backend.works] == ["sql", "org/poems", *[None] * 4]
