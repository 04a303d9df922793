"""Fields that the server does not know: ignored with a line in the log, or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from specinfer.serve.api.chat import ChatFields
from specinfer.serve.api.completions import CompletionFields
from specinfer.serve.fields.body import FieldPolicy
from specinfer.serve.http.api_error import ApiError
from tests.unit.serve.fields.bodies import TOOL, read


def test_unknown_fields_are_ignored_with_one_line_a_name(caplog: pytest.LogCaptureFixture) -> None:
    policy = FieldPolicy("ignore")
    message = {"role": "user", "content": [{"type": "text", "text": "a", "odd part": 1}], "odd one": 2}
    more: dict[str, Any] = {
        "odd": {"deep": 1},
        "messages": [message, message | {"another": 3}],
        "tools": [TOOL | {"odd": 1}],
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fields = read(ChatFields, more, policy)
    assert [one.model_dump(exclude_none=True) for one in fields.functions] == [TOOL["function"]]
    part = {"type": "text", "text": "a"}
    assert [one.rendered()["content"] for one in fields.messages] == [[part], [part]]
    logged = [record.getMessage() for record in caplog.records]
    names = ("another", "odd", "odd one", "odd part")
    assert sorted(logged) == sorted(f"the unknown field {name!r} is ignored" for name in names)
    for wrong in ({"temperature": -1}, {"typical_p": 0.5}, {"messages": [{"role": "robot", "odd": 1}]}):
        with pytest.raises(ApiError):
            read(ChatFields, more | wrong, policy).params()


def test_names_that_are_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    policy = FieldPolicy("ignore")
    shadows = {"__class__": 1, "_x": 1, "check": 2, "model_config": 3, "__pydantic_extra__": {}}
    assert read(CompletionFields, shadows, FieldPolicy("ignore")) == read(CompletionFields, {})
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for batch in range(3):
            names = {f"k{number}-{'x' * 200}": 1 for number in range(batch * 600, (batch + 1) * 600)}
            assert read(CompletionFields, names, policy).prompt == "a"
    assert len(caplog.records) == 1000
    assert "more are left out" in caplog.records[-1].getMessage()
    assert max(len(record.getMessage()) for record in caplog.records) < 200
    assert len(policy._logged) == 1000
